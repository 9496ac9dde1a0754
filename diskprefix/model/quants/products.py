"""Products with quantised matrices: which kernel computes them, and how it takes them.

The compiled product (`native`) takes every form as it is. Where there is none, torch's kernels do. Both give a row the
same bits whatever is computed beside it. Those of torch take fewer forms: with 4 bits scales and zeros are rounded to
bfloat16, with 8 bits a row of the matrix has one scale. So with them a model has other weights. The identity names the
kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from diskprefix.errors import ModelError
from diskprefix.model.exact.rows import is_ours
from diskprefix.model.quants.forms import Quants, unpacked
from diskprefix.model.quants.quant_form import FORMS, QuantForm
from diskprefix.native import COLUMNS, ROWS
from diskprefix.native.library import operators
from diskprefix.native.matrix import Matrix, product, rows_of

Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""From rows [.., columns of the matrix] to [.., rows of the matrix], in bfloat16."""

TORCH = "torch"

_int4 = torch.ops.aten._weight_int4pack_mm_for_cpu
_int8 = torch.ops.aten._weight_int8pack_mm


def kernel() -> str:
    """Returns which kernel computes the products, and what decides about its bits."""
    found = operators()
    return TORCH if found is None else found.identity


def matrix_of(packed: torch.Tensor, form: QuantForm, bias: torch.Tensor | None) -> Matrix | None:
    """Returns a matrix that is packed as `quants` describes, for the compiled product; None if there is none."""
    if operators() is None:
        return None
    return Matrix(
        packed,
        (packed.shape[0] * ROWS, packed.shape[1] * form.unit_columns),
        bits=form.bits,
        group=form.group,
        has_zeros=form.has_zeros,
        scales=form.scales,
        numbers=form.numbers,
        has_table=bool(form.table),
        bias=bias,
    )


def weights_of(packed: torch.Tensor, form: QuantForm) -> torch.Tensor:
    """Returns the weights, bfloat16 [rows, columns]."""
    found = operators()
    matrix = matrix_of(packed, form, None)
    if found is None or matrix is None:
        return unpacked(packed, form).dequantised()
    return rows_of(found, matrix, torch.arange(matrix.rows))


def product_of(packed: torch.Tensor, form: QuantForm, bias: torch.Tensor | None, matrix: Matrix | None) -> Product:
    """Returns the product with it: the compiled one if there is a `matrix`. Raises `ModelError` if only that knows the
    form."""
    found = operators()
    if found is not None and matrix is not None:
        return partial(product, found, matrix=matrix)
    if form not in FORMS:
        raise ModelError("the quants of a .gguf file need the compiled operators; add --weights native")
    quants = unpacked(packed, form)
    return _of_4_bits(quants, bias) if form.bits == 4 else _of_8_bits(quants, bias)


def _of_4_bits(quants: Quants, bias: torch.Tensor | None) -> Product:
    matrix = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quants.codes.to(torch.int32), 1)
    assert quants.zeros is not None, "all forms in 4 bits have zeros"
    # The kernel computes (code - 8) × scale + zero.
    pairs = torch.stack([quants.scales, quants.zeros + 8 * quants.scales], dim=-1)
    scales = pairs.transpose(0, 1).contiguous().bfloat16()
    return _on_rows(lambda rows: _int4(rows, matrix, COLUMNS, scales), bias)


def _of_8_bits(quants: Quants, bias: torch.Tensor | None) -> Product:
    weights = quants.dequantised().float()
    scales = (weights.abs().amax(dim=1, keepdim=True) / 127).bfloat16()
    divisors = torch.where(scales == 0, 1.0, scales.float())
    codes = (weights / divisors).round_().clamp_(-127, 127).to(torch.int8)
    scale = scales[:, 0].contiguous()
    return _on_rows(lambda rows: _int8(rows, codes, scale), bias)


def _on_rows(multiply: Product, bias: torch.Tensor | None) -> Product:
    def product(rows: torch.Tensor) -> torch.Tensor:
        token = is_ours.set(True)
        try:
            found = multiply(rows.reshape(-1, rows.shape[-1]).contiguous())
        finally:
            is_ours.reset(token)
        found = found if bias is None else found + bias
        return found.view(*rows.shape[:-1], -1)

    return product
