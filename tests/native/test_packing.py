"""Weights of GGUF files are packed, looked up and multiplied number for number."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from diskprefix.model.quants.products import matrix_of
from diskprefix.model.quants.quant_form import FILE_FORMS, form_of
from diskprefix.native import library
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix, product, rows_of
from diskprefix.native.packing import _TYPES, pack
from tests.native.variants import IN_FLOAT32, WITH_DOTS, of_this_cpu

ROWS, COLUMNS = 48, 512
ONE_OF_EACH_FORM = {form: kind for kind, form in FILE_FORMS.items()}.values()
SPECIAL = [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0x3C00, 0xBC00, 0x0400]
"""float16 numbers: zeros, the smallest, the largest, infinite ones, no number, ones."""


_HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "IQ1_M": (),
}
"""At which bytes of a block there are float16 numbers, where not at the first one alone."""


def content_of(kind: str, rows: int = 16, columns: int = 512) -> np.ndarray[Any, Any]:
    """Random blocks with random finite scales."""
    rng = np.random.default_rng(len(kind))
    weights, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, columns // weights, num_bytes), dtype=np.uint8)
    for at in _HALVES.get(kind, (0,)):
        numbers = rng.normal(0, 0.01, blocks[..., :1].shape).astype(np.float16)
        blocks[..., at : at + 2] = numbers.view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(100, 140, blocks[..., 0].shape)
    if kind == "IQ1_M":  # The first bits of its float16.
        blocks[..., 55] = blocks[..., 55] & 15 | 32
    return blocks.reshape(rows, -1)


def dequantised(kind: str, content: np.ndarray[Any, Any]) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.dequantize(content, gguf.GGMLQuantizationType[kind])).bfloat16()


def packed(operators: Operators, kind: str, content: np.ndarray[Any, Any], order: torch.Tensor | None = None) -> Matrix:
    """Returns the packed matrix, made in two pieces."""
    form, rows = form_of(kind), torch.from_numpy(content)
    assert form is not None
    out = torch.zeros(form.packed_shape(ROWS, COLUMNS), dtype=torch.uint8)
    if order is None:
        pack(operators, kind, rows[:16], None, out[:1])
        pack(operators, kind, rows[16:], None, out[1:])
    else:
        pack(operators, kind, rows, order[:32], out[:2])
        pack(operators, kind, rows, order[32:], out[2:])
    return matrix_of(out, form, None)


def weights_in(operators: Operators, matrix: Matrix) -> torch.Tensor:
    return rows_of(operators, matrix, torch.arange(ROWS))


def some_rows(count: int) -> torch.Tensor:
    return torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(3)).bfloat16()


def test_the_types_are_those_with_a_form() -> None:
    assert set(_TYPES) == set(FILE_FORMS)


def test_memory_is_hardly_more_than_the_file() -> None:
    """The few that take more are decoded codes of a grid."""
    more = {}
    for kind, form in FILE_FORMS.items():
        weights, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        more[kind] = form.weight_bits / (num_bytes * 8 / weights)
    grids = {kind for kind in FILE_FORMS if kind.startswith(("IQ1", "IQ2", "IQ3", "TQ1"))}
    assert {kind for kind, times in more.items() if times > 1.05} == grids
    assert form_of("F16") is None


@pytest.mark.parametrize("kind", _TYPES)
def test_weights_are_those_of_the_gguf_library(operators: Operators, kind: str) -> None:
    content = content_of(kind, ROWS, COLUMNS)
    matrix, expected = packed(operators, kind, content), dequantised(kind, content)
    assert torch.equal(weights_in(operators, matrix).view(torch.int16), expected.view(torch.int16))
    one_by_one = torch.eye(COLUMNS).bfloat16()
    assert torch.equal(product(operators, one_by_one, matrix).t(), expected)
    assert torch.equal(product(operators, one_by_one[-64:-63], matrix)[0], expected[:, -64])
    assert torch.equal(product(operators, one_by_one[100:105], matrix).t(), expected[:, 100:105])


@pytest.mark.parametrize("kind", _TYPES)
def test_scales_may_be_anything(operators: Operators, kind: str) -> None:
    """With scales of 0 and less, 0 and -0 are told apart."""
    content = content_of(kind, ROWS, COLUMNS)
    num_bytes = _TYPES[kind][2]
    blocks = content.reshape(ROWS, -1, num_bytes)
    numbers = np.resize(np.array(SPECIAL, np.uint16), blocks.shape[:2])
    for at in _HALVES.get(kind, (0,)):
        blocks[..., at : at + 2] = np.roll(numbers, at, axis=0)[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = np.resize(np.array([0, 1, 2, 3, 127, 253, 254, 255], np.uint8), blocks.shape[:2])
    found, expected = weights_in(operators, packed(operators, kind, content)), dequantised(kind, content)
    is_number = ~expected.isnan()
    assert torch.equal(is_number, ~found.isnan())
    assert torch.equal(found[is_number].view(torch.int16), expected[is_number].view(torch.int16))


@pytest.mark.parametrize("kind", ONE_OF_EACH_FORM)
def test_a_row_has_the_same_bits_beside_any_others(operators: Operators, kind: str) -> None:
    matrix, rows = packed(operators, kind, content_of(kind, ROWS, COLUMNS)), some_rows(65)
    whole = product(operators, rows, matrix)
    exact = rows.double() @ weights_in(operators, matrix).double().t()
    assert float((whole.double() - exact).abs().max()) < float(exact.abs().max()) * 2**-7
    for count in (1, 2, 5, 6, 7, 17, 64):
        assert torch.equal(product(operators, rows[1 : count + 1], matrix), whole[1 : count + 1])


@pytest.mark.parametrize("kind", ONE_OF_EACH_FORM)
@pytest.mark.parametrize("variants", [IN_FLOAT32, WITH_DOTS])
def test_variants_that_compute_in_the_same_way_give_the_same_bits(kind: str, variants: tuple[str, ...]) -> None:
    content, found = content_of(kind, ROWS, COLUMNS), []
    for variant in set(of_this_cpu()) & set(variants):
        library.choose(variant)
        operators = library.operators()
        assert operators is not None
        found.append(product(operators, some_rows(7), packed(operators, kind, content)))
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_rows_are_put_into_an_order(operators: Operators, kind: str) -> None:
    content = content_of(kind, ROWS, COLUMNS)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    found = weights_in(operators, packed(operators, kind, content, order))
    assert torch.equal(found, dequantised(kind, content)[order.long()])


def test_threads_change_nothing(operators: Operators) -> None:
    content = content_of("Q5_K", ROWS, COLUMNS)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(weights_in(operators, packed(operators, "Q5_K", content)))
    assert torch.equal(*found)


def test_other_halves_of_the_bytes_are_other_weights(operators: Operators) -> None:
    """The comparison would show a wrong order."""
    content = content_of("Q4_0", ROWS, COLUMNS)
    turned = content.reshape(ROWS, -1, 18).copy()
    turned[..., 2:] = turned[..., 2:] >> 4 | turned[..., 2:] << 4
    found = weights_in(operators, packed(operators, "Q4_0", turned.reshape(ROWS, -1)))
    assert not torch.equal(found, dequantised("Q4_0", content))
