"""Quantised matrices for the compiled operators (`native`), which take every form as it is, and for the kernels of an
accelerator, which take those of `FORMS` in a layout of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from diskprefix.errors import ModelError
from diskprefix.kv.step import is_accelerated
from diskprefix.model.exact import accelerated
from diskprefix.model.exact.rows import as_ours
from diskprefix.model.quants.forms import unpacked
from diskprefix.model.quants.quant_form import FORMS, QuantForm
from diskprefix.native import ROWS
from diskprefix.native import matrix as native
from diskprefix.native.library import Operators, operators
from diskprefix.native.matrix import Matrix

if TYPE_CHECKING:
    from diskprefix.accelerator.grouped import GroupedMatrix

Product: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""From rows [.., columns of the matrix] to [.., rows of the matrix], in bfloat16."""


def compiled() -> Operators:
    """Returns the compiled operators. Raises `ModelError` if there are none."""
    found = operators()
    if found is None:
        raise ModelError("quantised weights need the compiled operators; add --weights native")
    return found


def matrix_of(packed: torch.Tensor, form: QuantForm, bias: torch.Tensor | None) -> Matrix:
    """Returns a matrix that is packed as `quant_form` describes."""
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
    matrix = matrix_of(packed, form, None)
    return native.rows_of(compiled(), matrix, torch.arange(matrix.rows))


def product_of(matrix: Matrix) -> Product:
    return partial(native.product, compiled(), matrix=matrix)


def kernel_on(device: torch.device) -> str:
    """Returns the kernels that compute with quantised weights on a device, for the identity. Raises `ModelError` if
    there are none."""
    return accelerated.kernel(device) if is_accelerated(device) else compiled().identity


def grouped_of(packed: torch.Tensor, form: QuantForm) -> GroupedMatrix:
    """Returns a matrix that is packed as `quant_form` describes, for an accelerator; that of each expert if `packed`
    has these in front. Raises `ModelError` for forms that only files have."""
    if form not in FORMS:
        raise ModelError(f"no kernel of an accelerator takes weights in the form {form}; add --weights native")
    quants = unpacked(packed.flatten(0, -3), form)
    kind = getattr(torch, form.scales)
    codes, scales, zeros = (
        None if part is None else part.view(*packed.shape[:-3], -1, part.shape[1])
        for part in (quants.codes, quants.scales.to(kind), None if quants.zeros is None else quants.zeros.to(kind))
    )
    assert codes is not None
    assert scales is not None
    return accelerated.grouped(codes, scales, zeros, form.bits)


def product_on_accelerator(matrix: GroupedMatrix, bias: torch.Tensor | None) -> Product:
    return partial(as_ours, accelerated.grouped_product, matrix, bias)
