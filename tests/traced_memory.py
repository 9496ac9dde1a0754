"""The memory that a piece of work takes, as Python and numpy allocate it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable


def traced_peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
