from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diskprefix.kv.pool import KVPool
from diskprefix.model.load.fit import Fit, ModelNeeds, TokenState, fitted
from diskprefix.model.load.memory import (
    KV_AHEAD_BYTES,
    available_bytes,
    available_ram_bytes,
    kv_ahead,
    large_pages,
    populate_beside,
    trim_heap,
)
from tests.server.daemon_process import wait_until
from tests.synthetic_model import dense_layout

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


DENSE = TokenState(per_token=2 * 2 * 2 * 64 * 2, positions=2048)


def fit_of(state: TokenState) -> Fit:
    return fitted(ModelNeeds(name="x", state=state), 1 << 40)


@pytest.mark.parametrize("num_tokens", [1000, 1 << 20])
def test_a_sequence_gets_the_memory_that_was_made_ahead_for_it(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Callable[[], bool]] = []
    monkeypatch.setattr("diskprefix.kv.transfer.populate", lambda _tensors, is_wanted: asked.append(is_wanted))
    (ahead,) = kv_ahead(fit_of(DENSE), num_tokens)
    populate_beside(ahead)
    wait_until(lambda: bool(asked), "the thread begins")
    assert asked[0]()
    assert ahead.numel() == DENSE.num_bytes(min(num_tokens, 2048))
    layout = dense_layout(layers=2, heads=2, head_dim=64, dtype=torch.bfloat16, vocab_size=16)
    pool = KVPool(
        layout, torch.device("cpu"), limit_bytes=1 << 30, free_bytes=lambda: 1 << 30, max_idle=1, block_size=16
    )
    pool.touch(1 << 30, min(num_tokens, 2048))
    (arena,) = pool._spare
    assert arena.memory[0].tensor.data_ptr() == ahead.data_ptr()
    assert not asked[0](), "its thread leaves the rest to the pool's"


@pytest.mark.parametrize(
    "changed", [{"per_token": KV_AHEAD_BYTES // 1024}, {"windowed": 1024, "window": 64}, {"per_token": 0}]
)
def test_no_memory_is_made_ahead_that_is_too_much_or_not_one_piece(changed: dict[str, Any]) -> None:
    assert kv_ahead(fit_of(replace(DENSE, **changed)), 1024) == []
