"""Matrices in the forms of `quant_form.py`, as the compiled operators take them."""

from __future__ import annotations

import torch

from diskprefix.errors import ModelError
from diskprefix.model.quants.quant_form import QuantForm
from diskprefix.native import ROWS, calls
from diskprefix.native.library import Operators, operators
from diskprefix.native.matrix import Matrix


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
        form=form,
    )


def weights_of(packed: torch.Tensor, form: QuantForm) -> torch.Tensor:
    """Returns the weights, bfloat16 [rows, columns]. All variants round them. Raises `MemoryError`."""
    matrix, operators = matrix_of(packed, form, None), compiled()
    ids, out = torch.arange(matrix.rows), torch.empty(matrix.rows, matrix.columns, dtype=torch.bfloat16)
    call = calls.LookupCall(len(ids), ids.data_ptr(), matrix.address, out.data_ptr(), torch.get_num_threads())
    if operators.look_up(bytes(call)):
        raise MemoryError("there is no memory left for looking rows up")
    return out
