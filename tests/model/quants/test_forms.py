"""Matrices in 4 and 8 bits: how near they are, and that a form holds them exactly."""

from __future__ import annotations

import pytest
import torch

from diskprefix.model.quants.forms import Quants, quantised, weights_of
from diskprefix.model.quants.quant_form import FILE_FORMS, QuantForm
from diskprefix.model.quants.quantising import pack_in_pieces
from diskprefix.native.matrix import fills_blocks
from tests.model.quantising_in_place import FORMS, form_in, weights_of_quants


def quants_of(form: QuantForm, rows: int = 48, columns: int = 96, seed: int = 0) -> Quants:
    """A matrix that this form holds."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << form.bits, (rows, columns), generator=generator) + int(form.numbers[0])
    scales, zeros = torch.randn(2, rows, columns // form.group, generator=generator).mul_(0.01).half().float()
    return Quants(codes.to(torch.int8), scales, zeros if form.has_zeros else None)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_what_is_packed_has_the_weights_that_were_quantised(form: QuantForm) -> None:
    quants = quants_of(form)
    packed = quants.packed()
    assert form_in(quants) == form
    assert packed.shape == form.packed_shape(48, 96)
    assert torch.equal(weights_of(packed, form), weights_of_quants(quants))


def test_no_two_forms_have_one_text() -> None:
    assert len({str(form) for form in FILE_FORMS.values()}) == len({*FILE_FORMS.values()})


def test_four_bits_are_nearer_than_equal_steps_from_the_least_to_the_largest() -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    groups = weight.view(64, 8, 32)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    plain = ((groups - low) / (high - low) * 15).round() / 15 * (high - low) + low
    found = weights_of_quants(quantised(weight, 4)).float() - weight
    assert found.square().sum() < 0.93 * (plain - groups).square().sum()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("scale", [0.0, 1e-2, 1.0, 1e4])
def test_weights_of_any_size_stay_what_they_are_relative_to_the_largest(bits: int, scale: float) -> None:
    weight = torch.linspace(-1, 1, 16 * 64).view(16, 64) * scale
    # A group of equal weights.
    weight[0, :32] = 0.75 * scale
    found = weights_of_quants(quantised(weight, bits)).float()
    assert torch.isfinite(found).all()
    assert float((found - weight).abs().max()) <= scale * (0.01 if bits == 8 else 0.06)


def test_pieces_of_a_matrix_get_the_form_that_all_its_rows_have(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 64)
    # Scales of these rows are not float16 numbers.
    weight[40] *= 1e-8
    monkeypatch.setattr("diskprefix.model.quants.quantising._AT_ONCE", 16 * 64)
    packed, kind = pack_in_pieces(weight, 4, 2)
    whole = quantised(weight, 4)
    assert kind == whole.kind
    assert torch.equal(packed, whole.packed())


def test_long_matrices_are_quantised_in_parts_as_they_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(3))
    whole = quantised(weight, 4).packed()
    monkeypatch.setattr("diskprefix.model.quants.forms._AT_ONCE", 5 * 64)
    assert torch.equal(quantised(weight, 4).packed(), whole)


@pytest.mark.parametrize("shape", [(24, 64), (32, 48), (32,), (2, 16, 32)])
def test_what_does_not_fill_whole_blocks_cannot_be_quantised(shape: tuple[int, ...]) -> None:
    assert not fills_blocks(torch.zeros(shape))
    assert fills_blocks(torch.zeros(32, 64))
