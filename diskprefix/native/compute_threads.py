"""The number of threads that the operators compute with."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_chosen = 0


def num_threads() -> int:
    """Returns what `use_threads` has set, else OMP_NUM_THREADS, else the number of cores."""
    return _chosen or _usual()


def use_threads(count: int) -> None:
    """Sets the number of threads of this process, 0 for the usual one."""
    global _chosen
    _chosen = count


@cache
def _usual() -> int:
    with suppress(KeyError, ValueError):
        return max(1, int(os.environ["OMP_NUM_THREADS"].partition(",")[0]))
    return num_cores()


def num_cores(folder: Path = _CPUS) -> int:
    """Returns the number of cores that this process may run on. The CPUs of one core share its vector units, so they
    count once, where the kernel tells which they are."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_core_of(folder, cpu) for cpu in os.sched_getaffinity(0)})


def _core_of(folder: Path, cpu: int) -> str:
    with suppress(OSError):
        return (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(encoding="ascii")
    return str(cpu)
