"""e to the power of numbers, with the same bits on every CPU: numpy's own `exp` differs by the instructions that it
finds."""

from __future__ import annotations

from decimal import Decimal

import numpy as np

from diskprefix.tokens import Logits

_AT_ONCE = 16384
"""Numbers that stay in the cache from one operation to the next."""
_LEAST = np.float32(-87.0)
"""Below it the result is 0."""
_LOG2_E, _LN2_HIGH, _LN2_LOW = map(np.float32, (1.44269504088896341, 0.693359375, -2.12194440e-4))
"""k × the high part is exact for each k that occurs."""
_SERIES = tuple(
    map(np.float32, (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5))
)
"""Cephes, `expf.c`: (e^x - 1 - x) / x² for |x| ≤ ln(2) / 2, the highest power first."""


def exponential(numbers: Logits) -> Logits:
    """Returns e to the power of numbers that are at most 0, float32 of the same shape [count], within 2 units in the
    last place; 0 for numbers below -87 and for -inf. Each operation rounds once, on every CPU alike."""
    powers = np.empty_like(numbers)
    for begin in range(0, len(numbers), _AT_ONCE):
        given = numbers[begin : begin + _AT_ONCE]
        rest = np.maximum(given, _LEAST)
        doublings = np.rint(rest * _LOG2_E)
        rest -= doublings * _LN2_HIGH
        rest -= doublings * _LN2_LOW
        power = rest * _SERIES[0]
        for factor in _SERIES[1:]:
            power += factor
            power *= rest
        power *= rest
        power += rest
        power += np.float32(1)
        scale = doublings.astype(np.int32)
        scale += 127
        scale <<= 23
        power *= scale.view(np.float32)
        power *= given >= _LEAST
        powers[begin : begin + _AT_ONCE] = power
    return powers


def natural_logarithm(number: float) -> float:
    """Returns the natural logarithm of a positive number, rounded once: C libraries differ in the last bit."""
    return float(Decimal(number).ln())
