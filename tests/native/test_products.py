"""The compiled products with matrices: weights number for number, and rows alike in every company."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.native import packing as native_packing
from diskprefix.native.compute_threads import use_threads
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix, fills_blocks
from diskprefix.native.packing import TYPES
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from tests.arrays import array_of
from tests.native.one_operation import (
    head_products,
    matrix_of,
    norm,
    pack,
    packed_head_products,
    product,
    rows_of,
)
from tests.native.one_operation import matrix as plain_matrix
from tests.native.variants import chosen, in_depth
from tests.runtime.plan.quants import reference

ROWS, COLUMNS = 48, 352
"""An odd number of strips, and more blocks than are taken at once."""
MOST = 70
KINDS = ("Q4_1", "Q8_0")
"""Of which much is shown; with one of each form it takes long."""


@pytest.fixture(params=in_depth("8", "15", "bf16"))
def operators(request: pytest.FixtureRequest) -> Operators:
    return chosen(*request.param)


def product_of(operators: Operators, bias: torch.Tensor | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    matrix = packed(operators, "Q4_1", content_of("Q4_1", ROWS, COLUMNS), bias=bias)
    return lambda rows: product(operators, rows, matrix)


def test_other_rows_change_no_bit_of_a_product(operators: Operators) -> None:
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(4)).bfloat16()
    check_company(product_of(operators, bias))


def check_company(product: Callable[[torch.Tensor], torch.Tensor]) -> None:
    rows = torch.randn(MOST, COLUMNS, generator=torch.Generator().manual_seed(4)).bfloat16()
    whole = product(rows)
    for num_threads in (1, 2, 4):
        use_threads(num_threads)
        for count in (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 47, 48, 49, MOST):
            for start in {0, 1, MOST - count} if count < MOST else {0}:
                assert torch.equal(product(rows[start : start + count]), whole[start : start + count])


def test_rows_of_any_size_are_multiplied(operators: Operators) -> None:
    product = product_of(operators)
    rows = torch.randn(7, COLUMNS, generator=torch.Generator().manual_seed(9)).bfloat16()
    expected = product(rows)
    for power in (-60, 60):
        assert torch.equal(product(rows * 2.0**power), expected * 2.0**power)
    rows[3, 5] = float("inf")
    found = product(rows)
    assert not found[3].isfinite().any()
    assert torch.equal(found[[0, 1, 2, 4, 5, 6]], expected[[0, 1, 2, 4, 5, 6]])


def test_a_bfloat16_matrix_is_used_in_place(operators: Operators) -> None:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(8)).bfloat16()
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(4)).bfloat16()
    matrix = plain_matrix(weight, (ROWS, COLUMNS), bias=bias)
    check_company(lambda rows: product(operators, rows, matrix))
    plain, one_by_one = plain_matrix(weight, (ROWS, COLUMNS)), torch.eye(COLUMNS).bfloat16()
    assert torch.equal(product(operators, one_by_one, plain).t(), weight)
    assert torch.equal(torch.cat([product(operators, row[None], plain) for row in one_by_one]).t(), weight)


@pytest.mark.parametrize("kind", ["bfloat16", *KINDS])
def test_a_part_of_a_matrix_computes_its_rows(operators: Operators, kind: str) -> None:
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(4)).bfloat16()
    rows = torch.randn(33, COLUMNS, generator=torch.Generator().manual_seed(5)).bfloat16()
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(8)).bfloat16()
    plain = plain_matrix(weight, (ROWS, COLUMNS), bias=bias)
    content = None if kind == "bfloat16" else content_of(kind, ROWS, COLUMNS)
    matrix = plain if content is None else packed(operators, kind, content, bias=bias)
    expected = product(operators, rows, matrix)
    for first, end in ((0, 16), (16, 48), (32, 48)):
        assert torch.equal(product(operators, rows, matrix.part(first, end)), expected[:, first:end])
    with pytest.raises(ValueError, match="does not take"):
        matrix.part(8, 48)


# Weights of GGUF files are packed, looked up and multiplied number for number.

WIDE = 512
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
    "NVFP4": (),
    "IQ1_M": (),
}
"""At which bytes of a block there are float16 numbers, where not at the first one alone."""


def content_of(kind: str, rows: int = 16, columns: int = 512, seed: int = 0) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(len(kind) + 100 * seed)
    weights, num_bytes = reference.SIZES[kind]
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
        return torch.from_numpy(reference.dequantised(kind, content)).bfloat16()


def packed(
    operators: Operators,
    kind: str,
    content: np.ndarray[Any, Any],
    order: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> Matrix:
    form, rows = FILE_FORMS[kind], torch.from_numpy(content)
    weights, num_bytes = reference.SIZES[kind]
    out = torch.zeros(form.packed_shape(len(content), content.shape[1] // num_bytes * weights), dtype=torch.uint8)
    if order is None:
        pack(operators, kind, rows[:16], None, out[:1])
        pack(operators, kind, rows[16:], None, out[1:])
    else:
        pack(operators, kind, rows, order[:32], out[:2])
        pack(operators, kind, rows, order[32:], out[2:])
    return matrix_of(out, form, bias)


def weights_in(operators: Operators, matrix: Matrix) -> torch.Tensor:
    """Looked up in another order, each row twice."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    first, second = rows_of(operators, matrix, order.repeat(2)).chunk(2)
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))
    return first[order.argsort()]


def wide_rows(count: int) -> torch.Tensor:
    return torch.randn(count, WIDE, generator=torch.Generator().manual_seed(3)).bfloat16()


def repeated(kind: str) -> np.ndarray[Any, Any]:
    """Random blocks, whose second half is the first one again."""
    return np.tile(content_of(kind, ROWS, WIDE // 2), 2)


def cancelling(rows: torch.Tensor) -> torch.Tensor:
    """Returns rows whose products with `repeated` matrices are 0 but for rounding, which shows the order of the sum."""
    half = rows[:, : WIDE // 2]
    return torch.cat([half, -half], 1)


def test_the_types_are_those_with_a_form() -> None:
    assert set(TYPES) == set(FILE_FORMS)


def test_no_two_forms_have_one_text() -> None:
    assert len({str(form) for form in FILE_FORMS.values()}) == len({*FILE_FORMS.values()})


@pytest.mark.parametrize("shape", [(24, 64), (32, 48), (32,), (2, 16, 32)])
def test_a_matrix_of_partial_blocks_is_reported(shape: tuple[int, ...]) -> None:
    assert not fills_blocks(np.zeros(shape))
    assert fills_blocks(np.zeros((32, 64)))


def test_memory_is_hardly_more_than_the_file() -> None:
    """The few that take more are decoded codes of a grid, and one with a factor of each row in each unit."""
    more = {}
    for kind, form in FILE_FORMS.items():
        weights, num_bytes = reference.SIZES[kind]
        more[kind] = form.weight_bits / (num_bytes * 8 / weights)
    grids = {kind for kind in FILE_FORMS if kind.startswith(("IQ1", "IQ2", "IQ3", "TQ1"))}
    assert {kind for kind, times in more.items() if times > 1.05} == grids | {"NVFP4"}
    assert more["NVFP4"] < 1.12
    assert "F16" not in FILE_FORMS


@pytest.mark.parametrize("kind", TYPES)
def test_weights_are_those_of_the_gguf_library(operators: Operators, kind: str) -> None:
    content = content_of(kind, ROWS, WIDE)
    matrix, expected = packed(operators, kind, content), dequantised(kind, content)
    assert torch.equal(weights_in(operators, matrix).view(torch.int16), expected.view(torch.int16))
    one_by_one = torch.eye(WIDE).bfloat16()
    assert_equal(operators, product(operators, one_by_one, matrix).t(), expected)
    assert_equal(operators, product(operators, one_by_one[-64:-63], matrix)[0], expected[:, -64])
    assert_equal(operators, product(operators, one_by_one[100:105], matrix).t(), expected[:, 100:105])


def assert_equal(operators: Operators, computed: torch.Tensor, expected: torch.Tensor) -> None:
    """In 8 bits, 1 is 127 × a rounded scale, so a result may be rounded to the neighbour."""
    if operators.rows != "8":
        assert torch.equal(computed, expected)
    else:
        assert ((computed.float() - expected.float()).abs() <= 2.0**-7 * expected.float().abs()).all()
        assert (computed == expected).double().mean() > 0.9


def test_rows_have_factors(operators: Operators) -> None:
    """llama.cpp multiplies the whole product with the factor of a matrix. Powers of 2 round nothing."""
    content, form = content_of("NVFP4", ROWS, WIDE), FILE_FORMS["NVFP4"]
    rows, order = torch.from_numpy(content), torch.arange(ROWS - 1, -1, -1, dtype=torch.int32)
    out = torch.zeros(form.packed_shape(ROWS, WIDE), dtype=torch.uint8)
    factors = 2.0 ** np.arange(-24, 24, dtype=np.float32)
    native_packing.pack(operators, "NVFP4", array_of(rows), array_of(order), array_of(out), factors)
    expected = dequantised("NVFP4", content).flip(0) * torch.from_numpy(factors)[:, None]
    found = weights_in(operators, matrix_of(out, form, None))
    assert torch.equal(found.float(), expected)
    # A single one rounds at most once more than a product does.
    native_packing.pack(operators, "NVFP4", array_of(rows), None, array_of(out), np.full(ROWS, 0.0123, np.float32))
    expected = torch.from_numpy(reference.dequantised("NVFP4", content)) * float(np.float32(0.0123))
    error = (weights_in(operators, matrix_of(out, form, None)).float() - expected).abs()
    assert (error <= 2.0**-8 * expected.abs()).all()
    with pytest.raises(ValueError, match="does not take"):
        native_packing.pack(operators, "NVFP4", array_of(rows), None, array_of(out), factors[1:])


@pytest.mark.parametrize("kind", TYPES)
def test_scales_may_be_anything(operators: Operators, kind: str) -> None:
    """With scales of 0 and less, 0 and -0 are told apart."""
    content = content_of(kind, ROWS, WIDE)
    num_bytes = TYPES[kind].num_bytes
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
def test_other_rows_change_no_bit_of_a_product_with_a_file(operators: Operators, kind: str) -> None:
    matrix, rows, bias = packed(operators, kind, repeated(kind)), wide_rows(65), torch.arange(float(ROWS)) / 100
    exact = rows.double() @ weights_in(operators, matrix).double().t() + bias
    error = (product(operators, rows, packed(operators, kind, repeated(kind), bias=bias)).double() - exact).abs().max()
    assert float(error) < float(exact.abs().max()) * (2**-6 if operators.rows == "8" else 2**-7)
    rows = cancelling(rows)
    whole = product(operators, rows, matrix)
    assert whole.any()
    for count in (1, 2, 5, 6, 7, 17, 64):
        assert torch.equal(product(operators, rows[1 : count + 1], matrix), whole[1 : count + 1])


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_rows_are_put_into_an_order(operators: Operators, kind: str) -> None:
    content = content_of(kind, ROWS, WIDE)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    found = weights_in(operators, packed(operators, kind, content, order))
    assert torch.equal(found, dequantised(kind, content)[order.long()])


def test_threads_change_nothing_in_what_is_packed(operators: Operators) -> None:
    content = content_of("Q5_K", ROWS, WIDE)
    found = []
    for threads in (1, 2):
        use_threads(threads)
        found.append(weights_in(operators, packed(operators, "Q5_K", content)))
    assert torch.equal(*found)


# Products of each head's rows with a matrix of its own.

HEADS = 3
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 0.01}


def products_of_heads(
    operators: Operators, rows: torch.Tensor, matrices: torch.Tensor, outer: int, *, is_transposed: bool
) -> torch.Tensor:
    out = torch.full((HEADS, rows.shape[1], outer + 3), 7.0, dtype=rows.dtype)
    head_products(operators, rows, matrices, out[..., :outer], is_transposed=is_transposed)
    assert (out[..., outer:] == 7).all(), "nothing is written beside a row"
    return out[..., :outer]


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("is_transposed", [False, True], ids=["plain", "turned"])
@pytest.mark.parametrize(("inner", "outer"), [(64, 96), (40, 35)])
def test_each_head_has_its_matrix_and_other_rows_change_no_bit(
    operators: Operators, dtype: torch.dtype, is_transposed: bool, inner: int, outer: int
) -> None:
    random = torch.Generator().manual_seed(1)
    # Rows and matrices are parts of larger tensors, as in a model.
    rows = torch.randn(MOST, HEADS, inner + 8, generator=random).to(dtype)[..., :inner].transpose(0, 1)
    shape = (outer, inner) if is_transposed else (inner, outer)
    matrices = torch.randn(HEADS, shape[0] + 4, shape[1], generator=random).to(dtype)[:, : shape[0]]
    expected = rows.double() @ (matrices.mT if is_transposed else matrices).double()
    whole = products_of_heads(operators, rows, matrices, outer, is_transposed=is_transposed)
    assert (whole.double() - expected).abs().max() < ERRORS[dtype] * expected.abs().max()
    for first, last in [(0, 1), (3, 4), (1, 9), (5, 20), (2, 35), (40, MOST)]:
        use_threads(1 + first % 3)
        found = products_of_heads(operators, rows[:, first:last], matrices, outer, is_transposed=is_transposed)
        assert torch.equal(found, whole[:, first:last]), (first, last)


def test_each_head_has_its_quants(operators: Operators) -> None:
    matrices = [packed(operators, "Q5_0", content_of("Q5_0", ROWS, 64, seed)) for seed in range(HEADS)]
    # Rows are parts of larger ones, as in a model.
    rows = torch.randn(MOST, HEADS, 72, generator=torch.Generator().manual_seed(1)).bfloat16()
    rows = rows[..., :64].transpose(0, 1)
    for count in (1, 5, MOST):
        out = torch.full((HEADS, count, ROWS + 3), 7.0, dtype=torch.bfloat16)
        packed_head_products(operators, rows[:, :count], matrices, out[..., :ROWS])
        expected = torch.stack([product(operators, one[:count], its) for one, its in zip(rows, matrices, strict=True)])
        assert torch.equal(out[..., :ROWS], expected)
        assert (out[..., ROWS:] == 7).all(), "nothing is written beside a row"


# Norms.


def rows_of_any_size(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return (torch.randn(count, width, generator=random) * torch.logspace(-3, 3, count)[:, None]).to(dtype)


def exact_norm(rows: torch.Tensor, weight: torch.Tensor, kind: int, epsilon: float) -> torch.Tensor:
    numbers = rows.double()
    numbers = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + epsilon)
    if kind == 0:
        return (numbers.to(rows.dtype) * weight).double()
    return numbers * (weight.double() + 1 if kind == 2 else weight.double())


@pytest.mark.parametrize("width", [1, 5, 16, 40, 576])
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("dtype", ERRORS)
def test_a_norm_is_exact_but_for_its_rounding(operators: Operators, dtype: torch.dtype, kind: int, width: int) -> None:
    rows = rows_of_any_size(6, width, dtype).clamp(-6e4, 6e4)
    weight = torch.randn(width, generator=torch.Generator().manual_seed(2)).to(dtype)
    found, exact = norm(operators, rows, weight, kind, 1e-5), exact_norm(rows, weight, kind, 1e-5)
    limit = 4e-6 if dtype is torch.float32 else torch.finfo(dtype).eps
    assert ((found.double() - exact).abs() <= exact.abs() * limit + torch.finfo(dtype).smallest_normal).all()
    assert torch.equal(torch.cat([norm(operators, row[None], weight, kind, 1e-5) for row in rows]), found)
