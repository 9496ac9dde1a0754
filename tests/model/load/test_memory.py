from __future__ import annotations

import ctypes
import resource
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from diskprefix.model.load.memory import (
    available_bytes,
    available_ram_bytes,
    large_pages,
    trim_heap,
)

MIB = 1024**2


def write(folder: Path, files: Mapping[str, object]) -> Path:
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return folder


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(
    ("own", "groups", "free"),
    [
        # A machine without limits.
        ("0::/", {}, 8 * MIB),
        # The tightest group counts, and page cache is free.
        (
            "0::/a/b",
            {
                "a/b/memory.max": "max",
                "a/b/memory.current": MIB,
                "a/memory.max": 4 * MIB,
                "a/memory.current": 3 * MIB,
                "a/memory.stat": f"anon 1\ninactive_file {MIB}",
                "memory.max": 6 * MIB,
                "memory.current": 3 * MIB,
            },
            2 * MIB,
        ),
        # A group that is over its limit.
        ("0::/", {"memory.max": MIB, "memory.current": 2 * MIB}, 0),
        # The first version of control groups.
        (
            "5:cpu,cpuacct:/x\n4:memory:/docker/x",
            {
                "memory/memory.limit_in_bytes": 2 * MIB,
                "memory/memory.usage_in_bytes": MIB,
                "memory/memory.stat": f"total_inactive_file {MIB // 2}",
            },
            3 * MIB // 2,
        ),
    ],
)
def test_free_is_what_the_machine_and_the_control_groups_leave(
    own: str, groups: dict[str, object], free: int, tmp_path: Path
) -> None:
    proc = {"meminfo": "MemTotal: 9999 kB\nMemAvailable: 8192 kB", "self/cgroup": own}
    assert available_ram_bytes(write(tmp_path / "proc", proc), write(tmp_path / "cgroup", groups)) == free


def test_without_proc_the_machines_memory_is_taken(tmp_path: Path) -> None:
    assert available_ram_bytes(tmp_path / "none", tmp_path / "none") >= available_bytes(torch.device("cpu")) > 0


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library cannot")
def test_free_memory_of_the_heap_goes_back() -> None:
    pieces = [torch.ones(1000) for _ in range(20_000)]
    kept, before = pieces[-1], resident_bytes()
    pieces.clear()
    trim_heap()
    assert kept.sum() == 1000
    assert resident_bytes() < before - 50 * 1000**2


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the kernel does not tell")
def test_large_pages_are_asked_for() -> None:
    memory = large_pages(1 << 22)
    address, is_inside, flags = memory.data_ptr(), False, ""
    assert address % (1 << 21) == 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, end = (int(part, 16) for part in head.split("-"))
            is_inside = first <= address < end
        elif is_inside and head == "VmFlags:":
            flags = line
    assert " hg" in flags
