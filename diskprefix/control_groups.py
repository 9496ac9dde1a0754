"""The limits that Linux control groups set for this process. Containers, services and Kubernetes use them.

This module imports the standard library only: `native/build.py` runs it while the package is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

PROC, MOUNTED = Path("/proc"), Path("/sys/fs/cgroup")


def control_groups(controller: str, proc: Path = PROC, mounted: Path = MOUNTED) -> Iterator[Path]:
    """Yields the folders of this process's control groups that may limit what `controller` counts (`cpu`, `memory`),
    each before its parent, of version 2 and of version 1. Folders may be missing: a container sees its own group as the
    root, whatever its name is outside."""
    for line in read(proc / "self" / "cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            roots = [mounted]
        elif controller in controllers.split(","):
            roots = [mounted / name for name in dict.fromkeys((controllers, controller))]
        else:
            continue
        inner = Path(os.path.normpath(f"/{path.lstrip('/')}")).relative_to("/")
        for root in roots:
            group = root / inner
            yield group
            while group != root:
                group = group.parent
                yield group


def cpu_quota(proc: Path = PROC, mounted: Path = MOUNTED) -> int | None:
    """Returns how many CPUs this process may keep busy by the quotas of its control groups, rounded up; None without
    one. If more threads run, Linux stops all of them for the rest of each period."""
    limits = []
    for group in control_groups("cpu", proc, mounted):
        of_version_2 = read(group / "cpu.max").split()
        of_version_1 = [read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        for numbers in (of_version_2, of_version_1):
            # Without a limit the quota is "max" or -1.
            if len(numbers) == 2 and all(number.isdecimal() and int(number) for number in numbers):
                quota, period = map(int, numbers)
                limits.append(-(-quota // period))
    return min(limits, default=None)


def num_cpus(proc: Path = PROC, mounted: Path = MOUNTED) -> int:
    """Returns how many CPUs this process may keep busy, by its affinity and its control groups: at least 1."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(affinity, cpu_quota(proc, mounted) or affinity)


def read(file: Path) -> str:
    """Returns the content of a file of the kernel, "" if there is none."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
