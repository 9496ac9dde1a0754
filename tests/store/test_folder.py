from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from diskprefix.errors import StoreUnavailable
from diskprefix.store.folder import (
    LMDB_LOCK,
    LOCK,
    FolderLock,
    FolderUnavailable,
    make_folder,
    reserve_lmdb_lock,
    sync,
)


def test_a_lock_file_that_is_replaced_again_and_again_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_current = FolderLock._is_current

    def replaced(lock: FolderLock, fd: int) -> bool:
        (tmp_path / LOCK).unlink()
        (tmp_path / LOCK).touch()
        return is_current(lock, fd)

    monkeypatch.setattr(FolderLock, "_is_current", replaced)
    with pytest.raises(StoreUnavailable, match="try again"):
        FolderLock(tmp_path, patience_s=0)


def test_a_lock_is_exclusive_only_while_nobody_else_has_it(tmp_path: Path) -> None:
    first = FolderLock(tmp_path, patience_s=0)
    second = FolderLock(tmp_path, patience_s=0)
    assert not first.try_exclusive()
    second.close()
    assert first.try_exclusive()
    with pytest.raises(StoreUnavailable, match="another process is replacing"):
        FolderLock(tmp_path, patience_s=0)
    first.share()
    FolderLock(tmp_path, patience_s=0).close()
    first.close()


@pytest.mark.parametrize(
    ("name", "open_file"),
    [
        (LOCK, lambda folder: FolderLock(folder, patience_s=0)),
        (LMDB_LOCK, lambda folder: reserve_lmdb_lock(folder, create=True)),
    ],
)
def test_a_link_in_the_place_of_a_file_is_not_followed(
    tmp_path: Path, name: str, open_file: Callable[[Path], object]
) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / name).symlink_to(tmp_path / "target")
    with pytest.raises((StoreUnavailable, OSError)):
        open_file(tmp_path / "kv")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    "error", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EIO], ids=errno.errorcode.get
)
def test_a_folder_that_cannot_be_synced_is_made_unless_the_disk_fails(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_fd: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", failing)
    folder = tmp_path / "above" / "kv"
    if error == errno.EIO:
        with pytest.raises(FolderUnavailable):
            make_folder(folder)
    else:
        make_folder(folder)
    assert folder.exists() == (error != errno.EIO)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=os.strerror(error)):
        sync(tmp_path / "file")
