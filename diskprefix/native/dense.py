"""The compiled products of rows with matrices that are not quantised, called with torch's tensors."""

from __future__ import annotations

import struct

import numpy as np
import torch

from diskprefix.native import require
from diskprefix.native.attention_operator import DTYPES
from diskprefix.native.library import Operators

_CALL = struct.Struct("@6q P2q P2q PP3q P")
"""`DenseProduct` of `source/interface.h`."""


def head_products(
    operators: Operators,
    rows: torch.Tensor,
    matrices: torch.Tensor,
    out: torch.Tensor,
    *,
    is_turned: bool,
    bias: torch.Tensor | None = None,
) -> None:
    """Writes rows × matrix of each head to `out`, [heads, rows, outer]. `rows` are [heads, rows, inner]. `matrices` are
    [heads, inner, outer], or if `is_turned` [heads, outer, inner]. All have one dtype. `bias`, float32 [outer], is
    added before a number is rounded. Raises `MemoryError`."""
    (heads, num_rows, inner), outer = rows.shape, out.shape[-1]
    require(
        matrices.shape == (heads, *((outer, inner) if is_turned else (inner, outer)))
        and out.shape == (heads, num_rows, outer)
        and rows.dtype is matrices.dtype is out.dtype
        and rows.dtype in DTYPES
        and rows.stride(2) == matrices.stride(2) == out.stride(2) == 1
        and (bias is None or (bias.dtype is torch.float32 and bias.shape == (outer,) and bias.is_contiguous())),
        *(rows, matrices, out),
    )
    call = _CALL.pack(
        *(DTYPES[rows.dtype], int(is_turned), heads, num_rows, inner, outer),
        *(rows.data_ptr(), rows.stride(0), rows.stride(1)),
        *(matrices.data_ptr(), matrices.stride(0), matrices.stride(1)),
        *(0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0), out.stride(1)),
        *(torch.get_num_threads(), operators.parallel_for),
    )
    if operators.dense(call):
        raise MemoryError("there is no memory left for a product")


def linear(
    operators: Operators, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns [.., outer] for rows [.., inner] and a matrix [outer, inner], which may lie in memory either way. All
    have one dtype. Raises `MemoryError`."""
    flat = rows.reshape(1, -1, rows.shape[-1])
    out = flat.new_empty(1, flat.shape[1], matrix.shape[0])
    if 1 not in matrix.stride():
        matrix = matrix.contiguous()
    is_turned = matrix.stride(1) == 1
    head_products(
        operators,
        flat if flat.stride(2) == 1 else flat.contiguous(),
        (matrix if is_turned else matrix.t())[None],
        out,
        is_turned=is_turned,
        bias=None if bias is None else bias.detach().float().contiguous(),
    )
    return out.view(*rows.shape[:-1], matrix.shape[0])


def batched(operators: Operators, rows: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Returns [.., rows, outer] for rows [.., rows, inner] and matrices [.., inner, outer], as `torch.matmul`. Raises
    `MemoryError`."""
    batch = np.broadcast_shapes(rows.shape[:-2], matrices.shape[:-2])
    left, right = (
        one.expand(*batch, *one.shape[-2:]).reshape(-1, *one.shape[-2:]).contiguous() for one in (rows, matrices)
    )
    out = left.new_empty(len(left), left.shape[1], right.shape[2])
    head_products(operators, left, right, out, is_turned=False)
    return out.view(*batch, *out.shape[1:])
