"""An error is told from that of a driver by its causes."""

from __future__ import annotations

import pytest

from diskprefix.daemon.engine.device import _follows_from_driver


def test_errors_that_name_each_other_as_causes_are_looked_at_once() -> None:
    one, other = RuntimeError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not _follows_from_driver(one)


@pytest.mark.parametrize("depth", [0, 3])
def test_an_error_of_the_driver_is_found_behind_others(depth: int) -> None:
    error: BaseException = RuntimeError("CUDA error: an illegal memory access was encountered")
    for number in range(depth):
        outer = RuntimeError(f"around it: {number}")
        outer.__cause__ = error
        error = outer
    assert _follows_from_driver(error)
