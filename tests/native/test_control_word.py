"""Operators compute with denormal numbers, whatever a library has set for the thread that calls them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from diskprefix.native.attention_operator import attention_to_all
from diskprefix.native.compute_threads import use_threads
from tests.native.variants import chosen, of_this_cpu

DENORMAL = np.float32(1e-40)
SHAPE = 64, 32, 32
"""Enough heads for the helpers to get some."""


def attended(variant: str, num_threads: int) -> tuple[np.ndarray, bool]:
    """Returns the average of denormal numbers, computed while this thread flushes them to zero, and whether it did so
    before and after."""
    operators = chosen(variant)
    states, values = np.zeros(SHAPE, np.float32), np.full(SHAPE, DENORMAL)
    small = torch.tensor([1e-20])
    use_threads(num_threads)
    assert torch.set_flush_denormal(True)
    try:
        flushes = float(small * small) == 0
        found = attention_to_all(operators, states, states, values, 1.0)
        return found, flushes and float(small * small) == 0
    finally:
        torch.set_flush_denormal(False)
        use_threads(0)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("variant", of_this_cpu())
def test_a_thread_that_flushes_denormal_numbers_computes_with_them(variant: str, num_threads: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        # A new thread has no helpers yet: they would flush as it does.
        found, flushed = pool.submit(attended, variant, num_threads).result()
    assert flushed
    assert np.allclose(found, DENORMAL, rtol=1e-4, atol=0)
    assert found.all()
