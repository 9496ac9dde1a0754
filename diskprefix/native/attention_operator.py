"""The compiled attention, called with torch's tensors."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from diskprefix.native import require
from diskprefix.native.library import Operators

_CALL = struct.Struct("@8q P2q 2P 2d q P")
_RUN = struct.Struct("@3q P2q P2q")
"""`Attention` and `Run` of `source/interface.h`."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the compiled attention and norms take. The numbers are those of `DType`."""


def attention(
    operators: Operators,
    query: torch.Tensor,
    runs: Sequence[tuple[int, int, int, torch.Tensor, torch.Tensor]],
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns [rows, heads, value_dim] for `query`, [heads, rows, key_dim], in the dtype of all tensors.

    `runs` are the sequences in the order of their rows: the position of the first row, the number of rows, the position
    with which the memory begins, and the memory of keys and of values, [kv_heads, tokens, dim]. It must hold whatever a
    row sees: its own token and those before it, or the last `window` of them, or those of its chunk of `chunk` tokens.
    `sinks` holds a number for each head, float32. `scale` must be positive. Raises `MemoryError`.
    """
    query = _with_rows(query)
    heads, rows, key_dim = query.shape
    runs = [
        (start, num_rows, first, _with_rows(keys), _with_rows(values)) for start, num_rows, first, keys, values in runs
    ]
    _, _, _, keys, values = runs[0]
    out = query.new_empty(rows, heads, values.shape[-1])
    query_strides = query.stride()
    call = _CALL.pack(
        *(DTYPES[query.dtype], heads, keys.shape[0], key_dim, values.shape[-1], len(runs), window, chunk),
        *(query.data_ptr(), query_strides[0], query_strides[1], out.data_ptr()),
        *(0 if sinks is None else sinks.data_ptr(), scale, softcap),
        *(torch.get_num_threads(), operators.parallel_for),
    )
    if operators.attention(call, b"".join(run_of(*run) for run in runs)):
        raise MemoryError("there is no memory left for attention")
    return out


def run_of(start: int, num_rows: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> bytes:
    """Returns the `Run` of a sequence, as `attention` takes it. The numbers of a token lie side by side in memory."""
    key_strides, value_strides = keys.stride(), values.stride()
    require(key_strides[2] == value_strides[2] == 1, keys, values)
    return _RUN.pack(
        *(start, num_rows, first),
        *(keys.data_ptr(), key_strides[0], key_strides[1]),
        *(values.data_ptr(), value_strides[0], value_strides[1]),
    )


def _with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with the numbers of a row side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
