"""The compiled products of each head's rows with a matrix of that head, called with torch's tensors."""

from __future__ import annotations

import struct

import torch

from diskprefix.native import require
from diskprefix.native.attention_operator import DTYPES
from diskprefix.native.library import Operators

_CALL = struct.Struct("@6q P2q P2q P3q P")
"""`HeadProduct` of `source/interface.h`."""


def head_products(
    operators: Operators, rows: torch.Tensor, matrices: torch.Tensor, out: torch.Tensor, *, is_turned: bool
) -> None:
    """Writes rows × matrix of each head to `out`, [heads, rows, outer]. `rows` are [heads, rows, inner]. `matrices` are
    [heads, inner, outer], or if `is_turned` [heads, outer, inner]. All have one dtype. Raises `MemoryError`."""
    (heads, num_rows, inner), outer = rows.shape, out.shape[-1]
    require(
        matrices.shape == (heads, *((outer, inner) if is_turned else (inner, outer)))
        and out.shape == (heads, num_rows, outer)
        and rows.dtype is matrices.dtype is out.dtype
        and rows.stride(2) == matrices.stride(2) == out.stride(2) == 1,
        *(rows, matrices, out),
    )
    call = _CALL.pack(
        *(DTYPES[rows.dtype], int(is_turned), heads, num_rows, inner, outer),
        *(rows.data_ptr(), rows.stride(0), rows.stride(1)),
        *(matrices.data_ptr(), matrices.stride(0), matrices.stride(1)),
        *(out.data_ptr(), out.stride(0), out.stride(1), torch.get_num_threads(), operators.parallel_for),
    )
    if operators.head_products(call):
        raise MemoryError("there is no memory left for a product")
