"""Matrices in the forms of `quant_form.py`, for the compiled operators."""

from __future__ import annotations

import numpy as np

from diskprefix.errors import ModelError
from diskprefix.native import ROWS, address_of, calls
from diskprefix.native.compute_threads import num_threads
from diskprefix.native.library import Operators, operators
from diskprefix.native.matrix import Matrix
from diskprefix.runtime.plan.quants.quant_form import QuantForm


def compiled() -> Operators:
    """Returns the compiled operators. Raises `ModelError` if there are none."""
    compiled = operators()
    if compiled is None:
        raise ModelError("quantised weights need the compiled operators; add --weights native")
    return compiled


def matrix_of(packed: np.ndarray, form: QuantForm, bias: np.ndarray | None) -> Matrix:
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


def weights_of(packed: np.ndarray, form: QuantForm) -> np.ndarray:
    """Returns the weights, bfloat16 [rows, columns]. All variants round them. Raises `MemoryError`."""
    matrix, operators = matrix_of(packed, form, None), compiled()
    ids, out = np.arange(matrix.rows), np.empty((matrix.rows, matrix.columns), np.uint16)
    call = calls.LookupCall(len(ids), address_of(ids), matrix.address, address_of(out), num_threads())
    if operators.look_up(bytes(call)):
        raise MemoryError("there is no memory left for looking rows up")
    return out
