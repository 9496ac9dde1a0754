"""Functions of one number as tables of all bfloat16 numbers.

They are computed in float32, with functions that are rounded once: so the tables are the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from diskprefix.prefixstore.kv.numbers import converted


def _once(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function of float32 numbers that is computed in float64."""
    return lambda x: np.asarray(function(x.astype(np.float64)), np.float32)


_exp, _tanh, _erf = _once(np.exp), _once(np.tanh), _once(np.vectorize(math.erf, otypes=[float]))
_expm1 = _once(np.expm1)
_log_of_one_and_exp = _once(lambda x: np.log1p(np.exp(x)))


def _relu(x: np.ndarray) -> np.ndarray:
    return np.where(x < 0, np.float32(0), x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + _exp(-x))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * (x * x * x))
    values: np.ndarray = np.float32(0.5) * x * (1 + _tanh(inner))
    return values


def _expm1_excess(x: np.ndarray) -> np.ndarray:
    """Returns by how much exp(x) - 1 exceeds x, for numbers below zero; 0 for others. The part of xIELU."""
    return np.where(x > 0, np.float32(0), _expm1(np.minimum(x, np.float32(-1e-6))) - x)


_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda x: x,
    "silu": lambda x: x / (1 + _exp(-x)),
    "gelu": lambda x: x * np.float32(0.5) * (1 + _erf(x * np.float32(math.sqrt(0.5)))),
    "gelu_tanh": _gelu_tanh,
    "relu": _relu,
    "squared_relu": lambda x: _relu(x) ** 2,
    "sigmoid": _sigmoid,
    "expm1_excess": _expm1_excess,
    "tanh": _tanh,
    "softplus": lambda x: np.where(x > 20, x, _log_of_one_and_exp(x)),
}
"""By the names of `native.calls.FUNCTIONS`."""


@cache
@np.errstate(all="ignore")
def limited_curve(function: str, slope: float, limit: float) -> np.ndarray:
    """Returns the curve of silu with a slope, or of x + 1, of numbers within a limit."""
    numbers, most = _all_numbers(), _rounded(np.array(limit, np.float32))
    if function == "limited_silu":
        numbers = np.minimum(numbers, most)
        return _table(numbers * _rounded(_sigmoid(_rounded(numbers * np.float32(slope)))))
    return _table(np.clip(numbers, -most, most) + 1)


@cache
@np.errstate(all="ignore")
def curve(function: str, factor: float = 1.0) -> np.ndarray:
    """Returns factor × function(x / factor) of all bfloat16 numbers by their bits, and one number more, as the bits of
    bfloat16 numbers, uint16 [65 537]."""
    numbers = _all_numbers()
    if factor == 1:
        return _table(_FUNCTIONS[function](numbers))
    return _table(_rounded(_FUNCTIONS[function](_rounded(numbers / np.float32(factor)))) * np.float32(factor))


def _all_numbers() -> np.ndarray:
    return converted(np.arange(1 << 16, dtype=np.uint16), "float32")


def _rounded(values: np.ndarray) -> np.ndarray:
    """Returns float32 numbers that bfloat16 has."""
    return converted(converted(values, "bfloat16"), "float32")


def _table(values: np.ndarray) -> np.ndarray:
    return np.append(converted(values, "bfloat16"), np.uint16(0))
