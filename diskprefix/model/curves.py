"""Functions of one number as tables of all bfloat16 numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch.nn import functional

_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda x: x,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "squared_relu": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": functional.softplus,
}
"""By the names of `native.calls.FUNCTIONS`."""


@cache
def limited_curve(function: str, slope: float, limit: float) -> np.ndarray:
    """Returns the curve of silu with a slope, or of x + 1, of numbers within a limit."""
    numbers = _all_numbers()
    if function == "limited_silu":
        numbers = numbers.clamp(max=limit)
        return _table(numbers * torch.sigmoid(numbers * slope))
    return _table(numbers.clamp(-limit, limit) + 1)


@cache
def curve(function: str, factor: float = 1.0) -> np.ndarray:
    """Returns factor × function(x / factor) of all bfloat16 numbers by their bits, and one number more, as the bits of
    bfloat16 numbers, uint16 [65 537]."""
    numbers = _all_numbers()
    values = _FUNCTIONS[function](numbers if factor == 1 else numbers / factor)
    return _table(values if factor == 1 else values * factor)


def _all_numbers() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


def _table(values: torch.Tensor) -> np.ndarray:
    return np.append(values.view(torch.uint16).numpy(), np.uint16(0))
