"""The numbers that all variants compute alike: multiply-and-add rounds once, and functions are those of double
precision, rounded to float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

from diskprefix.native.library import Operators
from tests.native.one_operation import angles, gate, head_products

GREATEST, LEAST_EXPONENT = Fraction(torch.finfo(torch.float32).max), -149
INFINITY, NONE = float("inf"), float("nan")


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(exact: Fraction) -> float:
    """Returns the closest number of float32; of two as close the one whose last bit is 0."""
    if not exact:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, LEAST_EXPONENT)
    closest = round(exact / unit) * unit
    return math.copysign(INFINITY, closest) if abs(closest) > GREATEST else float(closest)


def sums_of(operators: Operators, added: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns added[i] + left[i] × right[j]: the products of rows of two numbers, the first of them with 1."""
    rows, matrix = torch.stack([added, left], dim=1), torch.stack([torch.ones_like(right), right])
    out = torch.empty(1, len(rows), len(right))
    head_products(operators, rows[None], matrix[None], out, is_transposed=False)
    return out[0]


def near_a_half() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, and products of about half the unit of their last bit: exactly, or a little more or less."""
    bits = torch.arange(-3.0, 4.0) * 2.0**-23
    halves = torch.cat([(1 + bits) * 2.0**-24, -(1 + bits) * 2.0**-25, (3 + 4 * bits) * 2.0**-24])
    added = torch.cat([1 + bits.abs(), 2 - bits.abs()])
    added, left = (torch.cartesian_prod(added, halves)[:, i].contiguous() for i in range(2))
    return added, left, torch.cat([1 + bits, -1 - bits, torch.tensor([1 + 2.0**-12, 2.0**-22, 2.0**-40])])


def scaled(exponents: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random numbers of sizes around powers of two."""
    added, left, right = (random(64, seed=seed).to(dtype).float() for seed in range(3))
    spread = 2.0 ** torch.arange(64.0).remainder(32).sub(16)
    return added * spread * 2.0 ** exponents[0], left * 2.0 ** exponents[1], right * 2.0 ** exponents[2]


SETS: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {
    "near a half": near_a_half(),
    "usual": scaled((0, 0, 0), torch.float32),
    "of bfloat16": scaled((0, 0, 0), torch.bfloat16),
    "without normal results": scaled((-135, -70, -66), torch.float32),
    "around the least normal number": scaled((-126, -63, -64), torch.float32),
    "as large as float32 has": scaled((108, 64, 63), torch.float32),
}


@pytest.mark.cases(5)
@pytest.mark.parametrize("numbers", SETS)
def test_multiply_and_add_rounds_once(operators: Operators, numbers: str) -> None:
    added, left, right = SETS[numbers]
    found = sums_of(operators, added, left, right)
    exact = [
        [rounded(Fraction(a) + Fraction(b) * Fraction(c)) for c in right.tolist()]
        for a, b in zip(added.tolist(), left.tolist(), strict=True)
    ]
    assert torch.equal(found, torch.tensor(exact))


def test_multiply_and_add_knows_infinity_and_nan(operators: Operators) -> None:
    added = torch.tensor([INFINITY, -INFINITY, 1.0, NONE, 2.0, 3e38])
    left = torch.tensor([1.0, 3e38, INFINITY, 1.0, NONE, 3e38])
    found = sums_of(operators, added, left, torch.tensor([3e38, -2.0, 0.0]))
    expected = [[INFINITY] * 3, [-INFINITY] * 3, [INFINITY, -INFINITY, NONE], [NONE] * 3, [NONE] * 3]
    expected += [[INFINITY, -3e38, 3e38]]
    assert torch.equal(found.nan_to_num(7.0, 8.0, 9.0), torch.tensor(expected).nan_to_num(7.0, 8.0, 9.0))


def _exp(x: torch.Tensor) -> torch.Tensor:
    return x.double().exp().float()


def _tanh(x: torch.Tensor) -> torch.Tensor:
    return x.double().tanh().float()


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x / (1 + _exp(-x)),
    "sigmoid": lambda x: 1 / (1 + _exp(-x)),
    "tanh": _tanh,
    "gelu": lambda x: 0.5 * x * (1 + (x * torch.tensor(0.70710678)).double().erf().float()),
    "gelu_tanh": lambda x: 0.5 * x * (1 + _tanh(0.79788456 * (x + 0.044715 * x * x * x))),
    "softplus": lambda x: torch.where(x > 20, x, _exp(x).double().log1p().float()),
    "expm1_excess": lambda x: torch.where(x > 0, 0, x.clamp(max=-1e-6).double().expm1().float() - x),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_are_those_of_double_precision_rounded(operators: Operators, function: str) -> None:
    of_all_sizes = random(20_000, seed=1) * 2.0 ** torch.arange(20_000.0).remainder(40).sub(34)
    numbers = torch.cat([of_all_sizes, torch.tensor([0.0, 1e-45, -1e-38, 88.0, 89.0, -104.0, 3e38, -3e38])])
    found, expected = gate(operators, numbers, function), FUNCTIONS[function](numbers)
    # Where torch's function is a unit of double precision off, it may round to another number.
    assert int((found != expected).sum()) <= 1
    assert torch.allclose(found, expected, rtol=1e-6, atol=0)
    for one in (INFINITY, -INFINITY, NONE):
        of_one = torch.tensor([one])
        expected = FUNCTIONS[function](of_one)
        assert torch.equal(gate(operators, of_one, function).nan_to_num(7.0), expected.nan_to_num(7.0))


def test_angles_are_those_of_double_precision_rounded(operators: Operators) -> None:
    frequencies = torch.cat([1e4 ** -(torch.arange(100.0) / 100), -torch.ones(1), torch.tensor([math.pi / 2, 0.0])])
    positions = torch.tensor([0, 1, 2, 3, 1000, 131_071, 1_000_003, 10_000_019])
    of_rows = (positions.float()[:, None] * frequencies).double()
    for found, expected in zip(angles(operators, positions, frequencies), (of_rows.cos(), of_rows.sin()), strict=True):
        assert torch.equal(found, expected.float())
    # Beyond what float32 has fractions of, and beyond what can be reduced.
    for found in angles(operators, torch.tensor([1]), torch.tensor([1e9, 1e20, -3e38])):
        assert float(found.abs().max()) <= 1
    assert all(bool(found.isnan().all()) for found in angles(operators, torch.tensor([1]), torch.tensor([INFINITY])))
