"""Quantised matrices for the kernels of an accelerator, which take those of `FORMS` and `FLOAT8_FORMS` in a layout of
their own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from diskprefix.errors import ModelError
from diskprefix.kv.step import is_accelerated
from diskprefix.model.exact import accelerated
from diskprefix.model.exact.rows import as_ours
from diskprefix.model.quants.forms import unpacked
from diskprefix.model.quants.products import Product, compiled
from diskprefix.model.quants.quant_form import FLOAT8_FORMS, FORMS, QuantForm

if TYPE_CHECKING:
    from diskprefix.accelerator.grouped import GroupedMatrix


def kernel_on(device: torch.device) -> str:
    """Returns the kernels that compute with quantised weights on a device, for the identity. Raises `ModelError` if
    there are none."""
    return accelerated.kernel(device) if is_accelerated(device) else compiled().identity


def grouped_of(packed: torch.Tensor, form: QuantForm) -> GroupedMatrix:
    """Returns a matrix that is packed as `quant_form` describes, for an accelerator; that of each expert if `packed`
    has these in front. Raises `ModelError` for forms that only files have."""
    if form not in (*FORMS, *FLOAT8_FORMS):
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
