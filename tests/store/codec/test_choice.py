from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.store.codec.choice import Speeds, choose, measure
from diskprefix.store.codec.codec import Codec

GB = 1_000_000_000
GIB = 1 << 30


def speeds(*, disk: float | None, raw: float = 16, planes: float = 5, ratio: float = 1.5) -> Speeds:
    """In GB/s."""
    return Speeds(
        disk_bytes_per_s=None if disk is None else disk * GB,
        raw_bytes_per_s=raw * GB,
        planes_bytes_per_s=planes * GB,
        planes_ratio=ratio,
    )


def chosen(measured: Speeds, *, budget: int, memory: int) -> Codec:
    return choose(measured, budget_bytes=budget * GIB, available_memory_bytes=memory * GIB).codec


def test_a_store_that_fits_into_the_page_cache_is_raw() -> None:
    assert chosen(speeds(disk=0.5), budget=4, memory=8) == Codec.RAW


def test_a_store_that_is_read_from_a_slow_disk_is_in_planes() -> None:
    assert chosen(speeds(disk=2), budget=400, memory=8) == Codec.PLANES


def test_a_disk_that_is_faster_than_the_decoder_gets_a_raw_store() -> None:
    assert chosen(speeds(disk=7), budget=400, memory=8) == Codec.RAW


def test_planes_that_save_nothing_are_not_taken() -> None:
    assert chosen(speeds(disk=2, ratio=1.0), budget=400, memory=8) == Codec.RAW


def test_a_disk_that_cannot_be_measured_leaves_the_store_raw() -> None:
    record = choose(speeds(disk=None), budget_bytes=400 * GIB, available_memory_bytes=GIB)
    assert record.codec == Codec.RAW
    assert "takes no file" in record.reason


def test_only_half_of_the_memory_counts_as_page_cache() -> None:
    """With all of it, the store would fit and be raw."""
    assert chosen(speeds(disk=0.5), budget=8, memory=8) == Codec.PLANES


def test_the_reason_is_one_line_with_the_figures() -> None:
    reason = choose(speeds(disk=2), budget_bytes=16 * GIB, available_memory_bytes=8 * GIB).reason
    # Raw: 1/4 / 16 + 3/4 / 2 = 0.390625 ns a byte. Planes: 1/4 / 5 + 3/4 / 3 = 0.3 ns a byte.
    assert reason == (
        "a restore is expected to run at 2.6 GB/s raw and 3.3 GB/s in planes: 25% of the budget fit into the page "
        "cache, the disk reads 2.0 GB/s, raw restores at 16.0 GB/s, planes at 5.0 GB/s and 1.50 times smaller"
    )


@given(
    st.floats(0.01, 100),
    st.floats(0.1, 100),
    st.floats(0.1, 100),
    st.floats(0.9, 3),
    st.integers(1, 1000),
    st.integers(0, 1000),
)
def test_more_memory_never_turns_a_raw_store_into_planes_where_raw_restores_faster_from_memory(
    disk: float, raw: float, planes: float, ratio: float, budget: int, memory: int
) -> None:
    measured = speeds(disk=disk, raw=max(raw, planes), planes=planes, ratio=ratio)
    if chosen(measured, budget=budget, memory=memory) == Codec.RAW:
        assert chosen(measured, budget=budget, memory=2 * memory + 1) == Codec.RAW


def test_speeds_can_be_kept_in_a_record() -> None:
    measured = speeds(disk=None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(measured), type=Speeds) == measured


def test_measuring_gives_every_figure_and_leaves_nothing_behind(tmp_path: Path) -> None:
    measured = measure(tmp_path)
    assert measured.disk_bytes_per_s is not None
    assert measured.disk_bytes_per_s > 0
    assert measured.raw_bytes_per_s > 0
    assert measured.planes_bytes_per_s > 0
    assert 1.4 < measured.planes_ratio < 1.6
    assert list(tmp_path.iterdir()) == []
    record = choose(measured, budget_bytes=GIB, available_memory_bytes=4 * GIB)
    assert record.codec in (Codec.RAW, Codec.PLANES)
    assert "\n" not in record.reason


def test_the_disk_is_read_past_the_page_cache_where_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, flags = os.open, []

    def spied(path: Any, mode: int, *args: Any, **kwargs: Any) -> int:
        flags.append(mode)
        return real_open(path, mode, *args, **kwargs)

    monkeypatch.setattr(os, "open", spied)
    assert measure(tmp_path).disk_bytes_per_s
    assert any(mode & os.O_DIRECT for mode in flags)


def test_a_file_system_that_cannot_do_without_the_page_cache_is_measured_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refusing(path: Any, mode: int, *args: Any, **kwargs: Any) -> int:
        if mode & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, mode, *args, **kwargs)

    monkeypatch.setattr(os, "open", refusing)
    assert measure(tmp_path).disk_bytes_per_s
    assert list(tmp_path.iterdir()) == []


def fail_with(number: int) -> Callable[..., int]:
    def fail(*_args: Any, **_kwargs: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("open", errno.EROFS),
        ("write", errno.ENOSPC),
        ("write", errno.EDQUOT),
        ("fsync", errno.EIO),
        ("preadv", errno.EIO),
    ],
)
def test_a_disk_that_fails_is_left_unmeasured_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    monkeypatch.setattr(os, name, fail_with(number))
    measured = measure(tmp_path)
    assert measured.disk_bytes_per_s is None
    assert measured.planes_ratio > 1.4
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_left_unmeasured(tmp_path: Path) -> None:
    assert measure(tmp_path / "nothing").disk_bytes_per_s is None


def test_a_disk_that_is_nearly_full_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = (100 << 20) // real.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(fields))
    monkeypatch.setattr("tempfile.mkstemp", lambda **_: pytest.fail("a file was made"))
    assert measure(tmp_path).disk_bytes_per_s is None
