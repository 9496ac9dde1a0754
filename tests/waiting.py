"""Waiting for another thread."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
