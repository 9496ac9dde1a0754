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


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return write(tmp_path / "proc", {"meminfo": "MemTotal: 9999 kB\nMemAvailable: 8192 kB", "self/cgroup": "0::/"})


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_machine_without_limits_offers_what_is_available(proc: Path, tmp_path: Path) -> None:
    assert available_ram_bytes(proc, tmp_path / "none") == 8192 * 1024


def test_the_tightest_control_group_counts_and_page_cache_is_free(proc: Path, tmp_path: Path) -> None:
    write(proc, {"self/cgroup": "0::/a/b"})
    groups = {
        "a/b/memory.max": "max",
        "a/b/memory.current": MIB,
        "a/memory.max": 4 * MIB,
        "a/memory.current": 3 * MIB,
        "a/memory.stat": f"anon 1\ninactive_file {MIB}",
        "memory.max": 6 * MIB,
        "memory.current": 3 * MIB,
    }
    assert available_ram_bytes(proc, write(tmp_path / "cgroup", groups)) == 2 * MIB


def test_a_group_that_is_over_its_limit_offers_nothing(proc: Path, tmp_path: Path) -> None:
    groups = {"memory.max": MIB, "memory.current": 2 * MIB}
    assert available_ram_bytes(proc, write(tmp_path / "cgroup", groups)) == 0


def test_control_groups_of_the_first_version_count(proc: Path, tmp_path: Path) -> None:
    write(proc, {"self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/x"})
    groups = {
        "memory/memory.limit_in_bytes": 2 * MIB,
        "memory/memory.usage_in_bytes": MIB,
        "memory/memory.stat": f"total_inactive_file {MIB // 2}",
    }
    assert available_ram_bytes(proc, write(tmp_path / "cgroup", groups)) == 3 * MIB // 2


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
