"""The speed of a disk is measured past the page cache, and leaves nothing behind."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diskprefix.extras.setup.doctor_machine import disk_speed


def test_the_disk_is_read_past_the_page_cache_where_the_file_system_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, flags = os.open, []

    def spied(path: Any, mode: int, *args: Any, **kwargs: Any) -> int:
        flags.append(mode)
        return real_open(path, mode, *args, **kwargs)

    monkeypatch.setattr(os, "open", spied)
    assert disk_speed(tmp_path)
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
    assert disk_speed(tmp_path)
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
    assert disk_speed(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_left_unmeasured(tmp_path: Path) -> None:
    assert disk_speed(tmp_path / "nothing") is None


def test_a_disk_that_is_nearly_full_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = (100 << 20) // real.f_frsize
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result(fields))
    monkeypatch.setattr("tempfile.mkstemp", lambda **_: pytest.fail("a file was made"))
    assert disk_speed(tmp_path) is None
