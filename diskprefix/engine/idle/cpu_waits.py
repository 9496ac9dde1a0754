"""Measures whether other programs want the CPUs on which this process computes ahead."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from diskprefix.control_groups import num_cpus

_TASKS = Path("/proc/self/task")
_LONG = 0.2
"""The share of their time for which this process's threads may wait for a CPU."""
_MEASURED_NS = 1_000_000_000
"""The time, in nanoseconds of all threads, after which the share is looked at."""


class CpuWaits:
    """Measures how long this process's threads wait for a CPU while they could run. On Linux the kernel counts this for
    each thread. Elsewhere the load average says how many threads of all programs want a CPU. Windows says nothing."""

    def __init__(self) -> None:
        self._last = 0, 0

    def begin(self) -> None:
        """Forgets the time before this call."""
        self._last = _times()

    def are_long(self) -> bool:
        """Returns whether threads waited for more than a fifth of the time since the last answer. After less than a
        second of it, returns False and goes on measuring."""
        if sys.platform != "linux":
            return _is_loaded()
        ran, waited = (now - before for now, before in zip(_times(), self._last, strict=True))
        if ran + waited < _MEASURED_NS:
            return False
        self.begin()
        return waited > _LONG * (ran + waited)


def _times() -> tuple[int, int]:
    """Returns how long the threads of this process ran, and how long they waited for a CPU, in nanoseconds."""
    times = [*_thread_times()]
    return sum(ran for ran, _ in times), sum(waited for _, waited in times)


def _thread_times() -> Iterator[tuple[int, int]]:
    for task in _TASKS.glob("*/schedstat"):
        # A thread may end meanwhile, and a kernel may not count.
        with suppress(OSError, ValueError):
            ran, waited, _ = task.read_text().split()
            yield int(ran), int(waited)


def _is_loaded() -> bool:
    """Returns whether more threads want a CPU than there are CPUs, this process's threads among them."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > num_cpus() + 1
