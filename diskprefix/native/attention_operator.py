"""The compiled attention, called with arrays."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from diskprefix.native import address_of, require
from diskprefix.native.compute_threads import num_threads
from diskprefix.native.library import Operators

_CALL = struct.Struct("@8q P2q 2P 2d q")
_RUN = struct.Struct("@3q P4q P4q Pq")
"""`Attention` and `Run` of `source/interface.h`."""

DTYPES = {np.dtype(np.float32): 0, np.dtype(np.uint16): 1}
"""What the operators take. The numbers are those of `DType`."""

ONE_PAGE = 1 << 40
"""The tokens of a page that is all of a sequence's memory."""
_TILE = 256
"""`KEY_TILE` of `source/attention.h`: tokens that are read together, whether all of them are seen or not."""


class PagedRows(NamedTuple):
    """The rows of one layer, [kv_heads, tokens, dim], in the pages of a sequence. Numbers of a row lie side by side."""

    pages: int
    """The address of the pages' addresses. Those of pages of which no row sees a token may be 0."""
    offset: int
    """The bytes in a page before the rows of this layer."""
    head_stride: int
    token_stride: int
    """From a row to that of the next head, or token, in numbers or `Eights`."""
    in_eights: int = 0
    """1 for rows of 8 bits."""
    kept: tuple[array[int], np.ndarray] | None = None
    """What `pages` is the address of, and the memory, if nobody else keeps them."""


def contiguous(rows: np.ndarray) -> PagedRows:
    """Returns memory [kv_heads, tokens, dim] as one page of `ONE_PAGE` tokens. Keep the result until the operator
    returns."""
    head_stride, token_stride, stride = _strides(rows)
    require(stride == 1, rows)
    table = array("Q", [address_of(rows)])
    return PagedRows(table.buffer_info()[0], 0, head_stride, token_stride, kept=(table, rows))


def _strides(numbers: np.ndarray) -> list[int]:
    """Returns the numbers from one to the next in each dimension."""
    return [stride // numbers.itemsize for stride in numbers.strides]


def attention(
    operators: Operators,
    query: np.ndarray,
    runs: Sequence[bytes],
    *,
    kv_heads: int,
    value_dim: int,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Returns [rows, heads, value_dim] for `query`, [heads, rows, key_dim], in the dtype of keys and values.

    `runs` are the sequences in the order of their rows, as `run_of` describes them. Their pages must hold whatever a
    row sees: its own token and those before it, or the last `window` of them, or those of its chunk of `chunk` tokens,
    and those of its span.
    `sinks` holds a number for each head, float32. `scale` must be positive. Raises `MemoryError`.
    """
    query = query if query.strides[-1] == query.itemsize else np.ascontiguousarray(query)
    heads, rows, key_dim = query.shape
    require(heads % kv_heads == 0, query)
    out, strides = np.empty((rows, heads, value_dim), query.dtype), _strides(query)
    call = _CALL.pack(
        *(DTYPES[query.dtype], heads, kv_heads, key_dim, value_dim, len(runs), window, chunk),
        *(address_of(query), *strides[:2], address_of(out)),
        *(address_of(sinks), scale, softcap),
        num_threads(),
    )
    if operators.attention(call, b"".join(runs)):
        raise MemoryError("there is no memory left for attention")
    return out


def attention_to_all(
    operators: Operators, query: np.ndarray, key: np.ndarray, value: np.ndarray, scale: float
) -> np.ndarray:
    """Returns [heads, rows, dim] for `query`, `key` and `value` of this shape: each row sees all. As in encoders of
    pictures, where it takes a third of the time of torch's. Raises `MemoryError`."""
    heads, rows, dim = query.shape
    # Tiles are read whole.
    keys, values = (contiguous(np.pad(one, ((0, 0), (0, -rows % _TILE), (0, 0)))) for one in (key, value))
    # These names keep the memory until the operator returns.
    spans = array("q", [0, rows])
    run = run_of(0, rows, ONE_PAGE, keys, values, spans=spans)
    return attention(operators, query, [run], kv_heads=heads, value_dim=dim, scale=scale).swapaxes(0, 1)


NO_SPANS = array("q")


def run_of(
    start: int,
    num_rows: int,
    page_tokens: int,
    keys: tuple[Any, ...],
    values: tuple[Any, ...],
    *,
    spans: array[int] = NO_SPANS,
) -> bytes:
    """Returns the `Run` of a sequence, as `attention` takes it: `num_rows` rows, the first at position `start`, and its
    pages of `page_tokens` tokens, the first of which begins with position 0. `keys` and `values` begin as
    `PagedRows` do. `spans` has the begin and the end of each span whose tokens see each other, in order. Keep it until
    the operator returns."""
    if not (start >= 0 and num_rows > 0 and page_tokens > 0):
        raise ValueError(f"a compiled operator does not take {num_rows} rows from {start} on in pages of {page_tokens}")
    if spans and max(spans) > start + num_rows:
        raise ValueError(f"a compiled operator does not take spans that end behind {start + num_rows}: {spans}")
    address, count = spans.buffer_info()
    return _RUN.pack(start, num_rows, page_tokens, *keys[:5], *values[:5], address, count // 2)
