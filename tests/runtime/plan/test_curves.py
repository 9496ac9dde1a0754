"""The tables of functions are those that torch computes in bfloat16."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from diskprefix.runtime.plan.curves import curve, limited_curve
from tests.arrays import tensor_of

NUMBERS = tensor_of(np.arange(1 << 16, dtype=np.uint16))
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "squared_relu": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
    "expm1_excess": lambda x: torch.where(x > 0, 0.0, torch.expm1(x.float().clamp(max=-1e-6)) - x.float()).bfloat16(),
}


@pytest.mark.parametrize("factor", [1.0, 30.0])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_curve_is_that_of_torch(name: str, factor: float) -> None:
    expected = FUNCTIONS[name](NUMBERS) if factor == 1 else FUNCTIONS[name](NUMBERS / factor) * factor
    require_equal(tensor_of(curve(name, factor))[:-1], expected)


@pytest.mark.parametrize(("slope", "limit"), [(1.702, 7.0), (1.0, 10.0)])
def test_a_curve_within_a_limit_is_too(slope: float, limit: float) -> None:
    numbers = NUMBERS.clamp(max=limit)
    require_equal(tensor_of(limited_curve("limited_silu", slope, limit))[:-1], numbers * torch.sigmoid(numbers * slope))
    require_equal(tensor_of(limited_curve("limited_and_one", slope, limit))[:-1], NUMBERS.clamp(-limit, limit) + 1)


def require_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    is_usual = (NUMBERS.abs() > 1e-36) & (NUMBERS.abs() < 1e38)
    differ = found[is_usual] != expected[is_usual]
    # torch rounds its tanh and erf otherwise, which shows where 1 + tanh(x) or 1 + erf(x) is nearly 0.
    assert int(differ.sum()) <= 24
    assert torch.allclose(found[is_usual].float(), expected[is_usual].float(), rtol=2**-6, atol=1e-5)
