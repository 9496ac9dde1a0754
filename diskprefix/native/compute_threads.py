"""The number of threads that the operators compute with."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from pathlib import Path

from diskprefix.control_groups import cpu_quota

_CPUS = Path("/sys/devices/system/cpu")
_chosen = 0


def num_threads() -> int:
    """Returns the number set by `use_threads`, or else OMP_NUM_THREADS, or else `num_cores`."""
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
    """Returns the number of cores that this process may keep busy: the cores that it may run on, or the quota of its
    control groups if that is less. The CPUs of one core share its vector units, so they count once, if the kernel says
    which CPUs share a core."""
    cores = _allowed_cores(folder)
    return min(cores, cpu_quota() or cores)


def limit_libraries() -> None:
    """Makes other libraries compute with no more threads than a quota of the control groups allows: torch and BLAS,
    tokenizers, and programs that this process starts. Call it before they are imported. Variables that are already set
    are not changed."""
    quota = cpu_quota()
    if quota is None or quota >= _allowed_cores(_CPUS):
        return
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(name, str(quota))


def _allowed_cores(folder: Path) -> int:
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    return len({_core_of(folder, cpu) for cpu in os.sched_getaffinity(0)})


def _core_of(folder: Path, cpu: int) -> str:
    with suppress(OSError):
        return (folder / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text(encoding="ascii")
    return str(cpu)
