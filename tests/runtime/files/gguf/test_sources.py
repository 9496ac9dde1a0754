"""What the tensors of a file become."""

from __future__ import annotations

import math

import numpy as np

from diskprefix.runtime.files.gguf.sources import log_of_negative


def test_logarithms_are_rounded_once() -> None:
    numbers = -np.exp(np.linspace(-12, 6, 5000)).astype(np.float32)
    found = log_of_negative(None, numbers)
    assert found.dtype == np.float32
    assert np.array_equal(found, np.array([math.log(-number) for number in numbers.tolist()], np.float32))
