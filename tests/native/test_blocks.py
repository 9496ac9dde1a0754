"""The compiled parts of a layer: each gives what its steps give one by one, to a row the same in every company."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from diskprefix.native.blocks import Gated, Norm
from diskprefix.native.library import Operators
from diskprefix.native.matrix import product
from tests.native.test_matrix import matrix_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def rows_of(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    random = torch.Generator().manual_seed(1)
    return (torch.randn(count, width, generator=random) * torch.logspace(-3, 3, count)[:, None]).to(dtype)


def exact_norm(norm: Norm, rows: torch.Tensor) -> torch.Tensor:
    numbers, weight = rows.double(), norm.weight.double()
    numbers = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + norm.epsilon)
    if norm.kind == 0:
        return (numbers.to(rows.dtype) * norm.weight).double()
    return numbers * (weight + 1 if norm.kind == 2 else weight)


@pytest.mark.parametrize("width", [1, 5, 16, 40, 576])
@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_exact_but_for_its_rounding(operators: Operators, dtype: torch.dtype, kind: int, width: int) -> None:
    rows = rows_of(6, width, dtype).clamp(-6e4, 6e4)
    norm = Norm(torch.randn(width, generator=torch.Generator().manual_seed(2)).to(dtype), kind, 1e-5)
    found, exact = norm(operators, rows), exact_norm(norm, rows)
    limit = 4e-6 if dtype is torch.float32 else torch.finfo(dtype).eps
    assert ((found.double() - exact).abs() <= exact.abs() * limit + torch.finfo(dtype).smallest_normal).all()
    assert torch.equal(torch.cat([norm(operators, row[None]) for row in rows]), found)


@pytest.mark.parametrize("count", [1, 9, 40])
def test_gated_products_are_those_of_the_three_matrices(operators: Operators, count: int) -> None:
    gate, up, down = matrix_of(96, 64, 4), matrix_of(96, 64, 8), matrix_of(64, 96, 4)
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    curve = functional.pad(functional.silu(numbers), (0, 1))
    rows = torch.randn(count, 64, generator=torch.Generator().manual_seed(3)).bfloat16()
    bits = product(operators, rows, gate).view(torch.int16).to(torch.int32) & 0xFFFF
    inner = curve[bits] * product(operators, rows, up)
    found = Gated(gate, up, down, curve)(operators, rows)
    assert torch.equal(found, product(operators, inner, down))
