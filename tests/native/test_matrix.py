"""The compiled product with a matrix: its weights, and the same bits for a row in every company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from diskprefix.model.quants.forms import Quants
from diskprefix.model.quants.products import matrix_of as matrix_in_memory
from diskprefix.model.quants.quant_form import FORMS, QuantForm
from diskprefix.native import library
from diskprefix.native.library import Operators
from diskprefix.native.matrix import Matrix, product, rows_of
from tests.model.quants.test_forms import quants_of
from tests.native.variants import IN_FLOAT32, WITH_DOTS, of_this_cpu

ROWS, COLUMNS = 48, 352
"""An odd number of strips, and more blocks than are taken at once."""
MOST = 70


def matrix_of(rows: int, columns: int, bits: int) -> Matrix:
    form = next(form for form in FORMS if form.bits == bits)
    return matrix_with(quants_of(form, rows, columns))


def matrix_with(quants: Quants, bias: torch.Tensor | None = None) -> Matrix:
    return matrix_in_memory(quants.packed(), quants.form, bias)


def product_of(
    operators: Operators, quants: Quants, bias: torch.Tensor | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    matrix = matrix_with(quants, bias)
    return lambda rows: product(operators, rows, matrix)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_computes_with_the_weights_of_the_form(operators: Operators, form: QuantForm) -> None:
    quants = quants_of(form, ROWS, COLUMNS)
    found = product_of(operators, quants)(torch.eye(COLUMNS).bfloat16())
    assert torch.equal(found.t(), quants.dequantised())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_rows_are_looked_up(operators: Operators, form: QuantForm) -> None:
    quants = quants_of(form, ROWS, COLUMNS)
    ids = torch.tensor([[47, 0, 17], [17, 8, 7]])
    assert torch.equal(rows_of(operators, matrix_with(quants), ids), quants.dequantised()[ids])


@pytest.mark.parametrize("ids", [[0, ROWS], [-1]])
def test_rows_that_a_matrix_does_not_have_are_refused(operators: Operators, ids: list[int]) -> None:
    with pytest.raises(IndexError, match=f"of {ROWS} rows"):
        rows_of(operators, matrix_of(ROWS, COLUMNS, 4), torch.tensor(ids))


@pytest.mark.parametrize("form", FORMS[:1], ids=str)
def test_a_row_has_the_same_bits_beside_any_others(operators: Operators, form: QuantForm) -> None:
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(4)).bfloat16()
    check_company(product_of(operators, quants_of(form, ROWS, COLUMNS), bias))


def check_company(product: Callable[[torch.Tensor], torch.Tensor]) -> None:
    rows = torch.randn(MOST, COLUMNS, generator=torch.Generator().manual_seed(4)).bfloat16()
    whole = product(rows)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        for count in (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 47, 48, 49, MOST):
            for start in {0, 1, MOST - count} if count < MOST else {0}:
                assert torch.equal(product(rows[start : start + count]), whole[start : start + count])


def test_rows_of_any_size_are_multiplied(operators: Operators) -> None:
    product = product_of(operators, quants_of(FORMS[0], ROWS, COLUMNS))
    rows = torch.randn(7, COLUMNS, generator=torch.Generator().manual_seed(9)).bfloat16()
    expected = product(rows)
    for power in (-60, 60):
        assert torch.equal(product(rows * 2.0**power), expected * 2.0**power)
    rows[3, 5] = float("inf")
    found = product(rows)
    assert not found[3].isfinite().any()
    assert torch.equal(found[[0, 1, 2, 4, 5, 6]], expected[[0, 1, 2, 4, 5, 6]])


def test_a_matrix_in_bfloat16_is_taken_as_it_lies(operators: Operators) -> None:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(8)).bfloat16()
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(4)).bfloat16()
    matrix = Matrix(weight, (ROWS, COLUMNS), bias=bias)
    check_company(lambda rows: product(operators, rows, matrix))
    plain, one_by_one = Matrix(weight, (ROWS, COLUMNS)), torch.eye(COLUMNS).bfloat16()
    assert torch.equal(product(operators, one_by_one, plain).t(), weight)
    assert torch.equal(torch.cat([product(operators, row[None], plain) for row in one_by_one]).t(), weight)


def test_it_is_as_near_to_the_exact_product_as_bfloat16_can_be(operators: Operators) -> None:
    quants, bias = quants_of(FORMS[0], ROWS, COLUMNS), torch.arange(float(ROWS)) / 100
    rows = torch.randn(33, COLUMNS, generator=torch.Generator().manual_seed(5)).bfloat16()
    exact = rows.double() @ quants.dequantised().double().t() + bias
    found = product_of(operators, quants, bias)(rows)
    assert float((found.double() - exact).abs().max()) < float(exact.abs().max()) * 2**-8


def test_rows_of_any_shape_are_taken(operators: Operators) -> None:
    product = product_of(operators, quants_of(FORMS[0], ROWS, COLUMNS))
    rows = torch.randn(2, 3, COLUMNS, generator=torch.Generator().manual_seed(6)).bfloat16()
    turned = rows.transpose(0, 1)
    assert torch.equal(product(turned), product(turned.contiguous()))
    assert torch.equal(product(rows).view(6, ROWS), product(rows.view(6, COLUMNS)))
    assert product(rows[:0]).shape == (0, 3, ROWS)


@pytest.mark.parametrize("variants", [IN_FLOAT32, WITH_DOTS])
def test_variants_that_compute_in_the_same_way_give_the_same_bits(variants: tuple[str, ...]) -> None:
    quants = quants_of(FORMS[1], ROWS, COLUMNS)
    rows = torch.randn(37, COLUMNS, generator=torch.Generator().manual_seed(7)).bfloat16()
    found = []
    for variant in set(of_this_cpu()) & set(variants):
        library.choose(variant)
        operators = library.operators()
        assert operators is not None
        found.append(product_of(operators, quants)(rows))
    assert all(torch.equal(one, found[0]) for one in found)
