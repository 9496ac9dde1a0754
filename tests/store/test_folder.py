from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.errors import StoreUnavailable
from diskprefix.store.folder import LOCK, FolderLock


def test_a_lock_file_that_is_replaced_again_and_again_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(_fd: int) -> None:
        (tmp_path / LOCK).unlink()
        (tmp_path / LOCK).touch()

    is_current = FolderLock._is_current
    monkeypatch.setattr(FolderLock, "_is_current", lambda self, fd: replace(fd) or is_current(self, fd))
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
