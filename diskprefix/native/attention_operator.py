"""The compiled attention, called with torch's tensors."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from diskprefix.native import require
from diskprefix.native.library import Operators

_CALL = struct.Struct("@8q P2q 2P 2d q")
_RUN = struct.Struct("@3q P3q P3q Pq")
"""`Attention` and `Run` of `source/interface.h`."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
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
    """From a row to that of the next head, or token, in numbers."""
    kept: tuple[array[int], torch.Tensor] | None = None
    """What `pages` is the address of, and the memory, if nobody else keeps them."""


def contiguous(tensor: torch.Tensor) -> PagedRows:
    """Returns memory [kv_heads, tokens, dim] as one page of `ONE_PAGE` tokens. Keep the result until the operator
    returns."""
    require(tensor.stride(2) == 1, tensor)
    table = array("Q", [tensor.data_ptr()])
    head_stride, token_stride, _ = tensor.stride()
    return PagedRows(table.buffer_info()[0], 0, head_stride, token_stride, (table, tensor))


def attention(
    operators: Operators,
    query: torch.Tensor,
    runs: Sequence[bytes],
    *,
    kv_heads: int,
    value_dim: int,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [rows, heads, value_dim] for `query`, [heads, rows, key_dim], in the dtype of keys and values.

    `runs` are the sequences in the order of their rows, as `run_of` describes them. Their pages must hold whatever a
    row sees: its own token and those before it, or the last `window` of them, or those of its chunk of `chunk` tokens,
    and those of its span.
    `sinks` holds a number for each head, float32. `scale` must be positive. Raises `MemoryError`.
    """
    query = query if query.stride(-1) == 1 else query.contiguous()
    heads, rows, key_dim = query.shape
    require(heads % kv_heads == 0, query)
    out = query.new_empty(rows, heads, value_dim)
    query_strides = query.stride()
    call = _CALL.pack(
        *(DTYPES[query.dtype], heads, kv_heads, key_dim, value_dim, len(runs), window, chunk),
        *(query.data_ptr(), query_strides[0], query_strides[1], out.data_ptr()),
        *(0 if sinks is None else sinks.data_ptr(), scale, softcap),
        torch.get_num_threads(),
    )
    if operators.attention(call, b"".join(runs)):
        raise MemoryError("there is no memory left for attention")
    return out


def attention_to_all(
    operators: Operators, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """Returns [heads, rows, dim] for `query`, `key` and `value` of this shape: each row sees all. As in encoders of
    pictures, where it takes a third of the time of torch's. Raises `MemoryError`."""
    heads, rows, dim = query.shape
    # Tiles are read whole.
    keys, values = (contiguous(torch.nn.functional.pad(one, (0, 0, 0, -rows % _TILE))) for one in (key, value))
    # These names keep the memory until the operator returns.
    spans = array("q", [0, rows])
    run = run_of(0, rows, ONE_PAGE, keys, values, spans=spans)
    return attention(operators, query, [run], kv_heads=heads, value_dim=dim, scale=scale).transpose(0, 1)


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
    return _RUN.pack(start, num_rows, page_tokens, *keys[:4], *values[:4], address, count // 2)
