"""The compiled products of each head's rows: right, and the same bits for a row in every company."""

from __future__ import annotations

import pytest
import torch

from diskprefix.native.dense import head_products
from diskprefix.native.library import Operators

HEADS, MOST = 3, 70
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 0.01, torch.float16: 2e-3}


def product(
    operators: Operators, rows: torch.Tensor, matrices: torch.Tensor, outer: int, *, is_turned: bool
) -> torch.Tensor:
    out = torch.full((HEADS, rows.shape[1], outer + 3), 7.0, dtype=rows.dtype)
    head_products(operators, rows, matrices, out[..., :outer], is_turned=is_turned)
    assert (out[..., outer:] == 7).all(), "nothing is written beside a row"
    return out[..., :outer]


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@pytest.mark.parametrize("is_turned", [False, True], ids=["plain", "turned"])
@pytest.mark.parametrize(("inner", "outer"), [(64, 96), (40, 35)])
def test_each_head_has_its_matrix_and_a_row_the_same_bits_beside_any_others(
    operators: Operators, dtype: torch.dtype, is_turned: bool, inner: int, outer: int
) -> None:
    random = torch.Generator().manual_seed(1)
    # Rows and matrices are parts of larger tensors, as in a model.
    rows = torch.randn(MOST, HEADS, inner + 8, generator=random).to(dtype)[..., :inner].transpose(0, 1)
    shape = (outer, inner) if is_turned else (inner, outer)
    matrices = torch.randn(HEADS, shape[0] + 4, shape[1], generator=random).to(dtype)[:, : shape[0]]
    expected = rows.double() @ (matrices.mT if is_turned else matrices).double()
    whole = product(operators, rows, matrices, outer, is_turned=is_turned)
    assert (whole.double() - expected).abs().max() < ERRORS[dtype] * expected.abs().max()
    for first, last in [(0, 1), (3, 4), (1, 9), (5, 20), (2, 35), (40, MOST)]:
        found = product(operators, rows[:, first:last], matrices, outer, is_turned=is_turned)
        assert torch.equal(found, whole[:, first:last]), (first, last)


def test_the_number_of_threads_changes_no_bit(operators: Operators) -> None:
    random = torch.Generator().manual_seed(2)
    rows, matrices = (torch.randn(HEADS, n, 64, generator=random).bfloat16() for n in (20, 32))
    found = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        found.append(product(operators, rows, matrices, 32, is_turned=True))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
