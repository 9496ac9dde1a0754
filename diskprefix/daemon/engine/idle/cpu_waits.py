"""Measures whether other programs want the CPUs on which this process computes ahead."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

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
        self._last: dict[str, _Times] = {}

    def begin(self) -> None:
        """Forgets the time before this call."""
        self._last = dict(_times_of_threads())

    def are_long(self) -> bool:
        """Returns whether threads waited for more than a fifth of the time since the last answer. After less than a
        second of it, returns False and goes on measuring. Threads that have ended since do not count."""
        if sys.platform != "linux":
            return _is_loaded()
        since = [times.since(self._last.get(thread, _Times())) for thread, times in _times_of_threads()]
        ran_ns, waited_ns = sum(times.ran_ns for times in since), sum(times.waited_ns for times in since)
        if ran_ns + waited_ns < _MEASURED_NS:
            return False
        self.begin()
        return waited_ns > _LONG * (ran_ns + waited_ns)


class _Times(NamedTuple):
    """The times that a thread ran, and waited for a CPU, in nanoseconds."""

    ran_ns: int = 0
    waited_ns: int = 0

    def since(self, earlier: _Times) -> _Times:
        """Returns the times since `earlier`, which are those of an ended thread with the same number if they are
        longer."""
        if earlier.ran_ns > self.ran_ns or earlier.waited_ns > self.waited_ns:
            return self
        return _Times(self.ran_ns - earlier.ran_ns, self.waited_ns - earlier.waited_ns)


def _times_of_threads() -> Iterator[tuple[str, _Times]]:
    """Yields the number and the times of each thread of this process."""
    for task in _TASKS.glob("*/schedstat"):
        # A thread may end meanwhile, and a kernel may not count.
        with suppress(OSError, ValueError):
            ran, waited, _ = task.read_text().split()
            yield task.parent.name, _Times(int(ran), int(waited))


def _is_loaded() -> bool:
    """Returns whether more threads want a CPU than there are CPUs, this process's threads among them."""
    return hasattr(os, "getloadavg") and os.getloadavg()[0] > num_cpus() + 1
