"""From a folder to an open environment: the lock, the check of the file, and what happens to an unusable file.

A process that is alone with the folder may move aside a file that is damaged or has another format. A process that
comes second finds this done.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from diskprefix.errors import StoreCorrupt, StoreFormatError, StoreUnavailable
from diskprefix.store.environment import Environment
from diskprefix.store.filecheck import check_file
from diskprefix.store.folder import (
    DATA,
    LMDB_LOCK,
    REPLACEMENT,
    FolderLock,
    FolderUnavailable,
    check_folder,
    file_errors,
    make_folder,
    reserve_lmdb_lock,
)
from diskprefix.store.schema import DATABASES

log = logging.getLogger("diskprefix")

DAMAGED = "damaged.mdb"
"""The name of an unusable file once it is moved aside. It replaces the one that was moved aside before."""
_LOCK_PATIENCE_S = 10.0


def open_environment(path: Path, *, budget_bytes: int, read_only: bool) -> tuple[Environment, FolderLock]:
    """Open the environment in folder `path`, created unless read-only, and the lock that goes with it.

    For reading, no file is created. Raises `StoreUnavailable` (`FolderUnavailable` where the problem may end by
    itself), or `StoreCorrupt`.
    """
    if read_only and not os.path.lexists(path / DATA):
        raise StoreUnavailable(f"{path} holds no diskprefix store; give its folder with --kv-cache-dir")
    if read_only:
        check_folder(path)
    else:
        make_folder(path)
    lock = FolderLock(path, _LOCK_PATIENCE_S, create=not read_only)
    try:
        with file_errors(path):
            if not read_only and lock.try_exclusive():
                # A process that was killed while it wrote a replacement left it behind. The old file is in place.
                shutil.rmtree(path / REPLACEMENT, ignore_errors=True)
            _require_sound(path)
            if os.access(path, os.W_OK):
                reserve_lmdb_lock(path, create=not read_only)
            env = Environment(path, budget_bytes=budget_bytes, read_only=read_only, max_databases=len(DATABASES))
            lock.share()
    except BaseException:
        lock.close()
        raise
    return env, lock


def set_aside(path: Path, error: StoreCorrupt | StoreFormatError) -> None:
    """Move a file that is damaged or has another format out of the way, so that a new one can be created.

    Does nothing if another process has the folder open: that process may have moved the file already.
    """
    lock = FolderLock(path, _LOCK_PATIENCE_S)
    try:
        if not lock.try_exclusive():
            return
        (path / DATA).replace(path / DAMAGED)
        (path / LMDB_LOCK).unlink(missing_ok=True)
    except FileNotFoundError:
        return
    except OSError as failure:
        raise FolderUnavailable(path, failure) from failure
    finally:
        lock.close()
    log.error(
        "[disk-cache] starting with an empty store; the old file was moved to %s and can be deleted: %s",
        path / DAMAGED,
        error,
    )


def _require_sound(path: Path) -> None:
    """Raises `StoreCorrupt` for a damaged file, `StoreUnavailable` for the file of another program."""
    entries = check_file(path / DATA).entries
    if any(entries.values()) and not entries.get(b"meta"):
        raise foreign_file(path)


def foreign_file(path: Path) -> StoreUnavailable:
    """The error for a `data.mdb` that another program made: a store neither adds to it nor moves it."""
    return StoreUnavailable(f"{path / DATA} belongs to another program; choose another --kv-cache-dir")
