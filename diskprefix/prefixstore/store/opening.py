"""Opens the file of a store, and moves a file aside that is damaged or has another format.

A process moves a file aside only while no other process has the folder open.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import shutil
import struct
import time
from contextlib import suppress
from pathlib import Path

from diskprefix.errors import CacheError, StoreUnavailable
from diskprefix.prefixstore.store.btree_check import mend_runs, require_sound_meta
from diskprefix.prefixstore.store.environment import Environment, other_lmdb
from diskprefix.prefixstore.store.folder import (
    CRASH,
    DATA,
    LMDB_LOCK,
    REPLACEMENT,
    FolderLock,
    FolderUnavailable,
    OnWait,
    check_folder,
    file_errors,
    make_folder,
    read_crash,
    reserve_lmdb_lock,
    sync,
)
from diskprefix.prefixstore.store.schema import DATABASES
from diskprefix.units import format_size

log = logging.getLogger("diskprefix")

DAMAGED = "damaged.mdb"
"""The name of the file that was moved aside last."""
_LARGE_BYTES = 1 << 30
"""Checks of files of at least this size are logged."""
_FIRST_BYTES = 2 * mmap.PAGESIZE
"""The size of a new file: LMDB's two meta pages."""


def open_environment(
    path: Path,
    *,
    budget_bytes: int,
    read_only: bool,
    checks: bool,
    on_wait: OnWait | None,
) -> tuple[Environment, FolderLock]:
    """Opens the environment in folder `path`, and its lock. Creates the file unless `read_only`.

    Checks the file if the mark in the lock file demands it, and always with `checks`. Calls `on_wait` with the reason
    before a long check. For a process that replaces the file see `FolderLock`.

    Raises `StoreUnavailable` (`FolderUnavailable` if the problem may end by itself), or `StoreCorrupt`.
    """
    if read_only and not os.path.lexists(path / DATA):
        raise StoreUnavailable(f"{path} holds no diskprefix store; give its folder with --kv-cache-dir")
    if read_only:
        check_folder(path)
    else:
        make_folder(path)
    lock, env = FolderLock(path, on_wait, create=not read_only), None
    try:
        with file_errors(path):
            is_alone = not read_only and lock.try_exclusive("opening the store")
            if is_alone:
                # A process that was killed before it replaced the file left the new one here.
                shutil.rmtree(path / REPLACEMENT, ignore_errors=True)
                _empty_unfinished(path / DATA)
            _require_own_layout(path)
            require_sound_meta(path / DATA)
            if os.access(path, os.W_OK):
                reserve_lmdb_lock(path, create=not read_only)
            env = Environment(
                path, budget_bytes=budget_bytes, read_only=read_only, max_databases=len(DATABASES), on_wait=on_wait
            )
            env.is_ours = lock.mark.file == env.inode
            if not read_only:
                _make_durable(path / DATA, may_write=is_alone)
                # LMDB does not sync the name of a new file. Without it, a power failure loses the file.
                sync(path)
            crash = read_crash(path)
            if checks or crash or lock.mark.needs_check(env.inode):
                _check_file(env, lock, on_wait, crash)
            if not read_only:
                # If another process has replaced the file meanwhile, the mark is that of the new one.
                lock.record_opening(env.inode, is_checked=env.is_checked and env.is_in_place())
                if crash:
                    os.truncate(path / CRASH, 0)
    except BaseException:
        if env is not None:
            # An open environment would keep the caller from opening the folder for reading.
            env.close()
        lock.close()
        raise
    return env, lock


def _check_file(env: Environment, lock: FolderLock, on_wait: OnWait | None, crash: str) -> None:
    """Checks the file. Logs the `crash` that a daemon left, and the check of a large file. Raises `StoreCorrupt`."""
    reason = "because a signal ended a daemon" if crash else "for the first time since the machine was started"
    doing = f"checking the store's file, {reason}"
    if crash:
        log.warning("[disk-cache] a signal ended a daemon that had the store open. Its threads were here:\n%s", crash)
    lock.say(doing)
    began_at, is_large = time.monotonic(), env.file_bytes() >= _LARGE_BYTES
    if is_large:
        log.info("[disk-cache] %s", doing)
    if is_large and on_wait is not None:
        on_wait(doing)
    env.require_survivable()
    if is_large:
        log.info("[disk-cache] checked %s in %.1f s", format_size(env.file_bytes()), time.monotonic() - began_at)


def _empty_unfinished(file: Path) -> None:
    """Empties a file with one meta page of two, which LMDB did not finish because the disk was full."""
    with suppress(FileNotFoundError), file.open("r+b", buffering=0) as opened:
        start = opened.read(_FIRST_BYTES)
        if _META_AT + _META.size <= len(start) < _FIRST_BYTES and _META.unpack_from(start, _META_AT)[0] == _MAGIC:
            opened.truncate(0)


def _make_durable(file: Path, *, may_write: bool) -> None:
    """Makes the pages durable that LMDB relies on, before anything is written. Raises `OSError`.

    If the fsync after LMDB's first write of a new file failed, the kernel regards the pages as written, and a power
    failure would lose them. So the pages of a file without a commit are written again. If writing the meta page of a
    commit fails, LMDB writes the previous one back without fsync: the disk may still have the new one, whose pages the
    next commit overwrites.
    """
    with file.open("r+b", buffering=0) as opened:
        first = opened.read(_FIRST_BYTES + 1)
        if may_write and len(first) == _FIRST_BYTES:
            opened.seek(0)
            opened.write(first)
        os.fsync(opened.fileno())


def set_aside(path: Path, inode: int, error: CacheError, on_wait: OnWait | None = None, *, mends: bool = False) -> None:
    """Moves a file aside that is damaged or has another format. With `mends`, a file stays if only headers of payloads
    are damaged in it; these are written again.

    Does nothing if the file has another inode by now, or if another process has the folder open: that process may have
    moved the file already. For `on_wait` see `FolderLock`.
    """
    lock = FolderLock(path, on_wait)
    try:
        if not lock.try_exclusive("moving a damaged file aside") or inode_of(path) != inode:
            return
        if mends and mend_runs(path / DATA):
            log.warning("[disk-cache] headers of payloads were damaged, and are written again: %s", error)
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


def inode_of(path: Path) -> int:
    """Returns the inode of the store's file in folder `path`, 0 if there is none."""
    try:
        return (path / DATA).stat().st_ino
    except OSError:
        return 0


_META = struct.Struct("<II16xI")
"""Magic number, data version and page size, after the header of a meta page."""
_MAGIC, _META_AT, _LATER_META_AT = 0xBEEFC0DE, 16, 24
"""The header of a page of LMDB 0.9 has 16 bytes, that of later data versions 24."""
_PAGE_BYTES = tuple(1 << n for n in range(12, 16))


def _require_own_layout(path: Path) -> None:
    """Raises `StoreUnavailable` if both meta pages have the place that they have in another data version of LMDB, or
    another page size than this machine: such a file is not damaged. The number of the version alone may be."""
    try:
        with (path / DATA).open("rb") as file:
            start = file.read(_PAGE_BYTES[-1] + _LATER_META_AT + _META.size)
    except FileNotFoundError:
        return
    for header, page_bytes in itertools.product((_META_AT, _LATER_META_AT), _PAGE_BYTES):
        if len(start) < page_bytes + header + _META.size:
            continue
        magic, version, stated_bytes = first = _META.unpack_from(start, header)
        if magic != _MAGIC or first != _META.unpack_from(start, page_bytes + header):
            continue
        if header == _LATER_META_AT:
            raise other_lmdb(path / DATA, f"has LMDB's data version {version}")
        if stated_bytes == page_bytes != min(mmap.PAGESIZE, _PAGE_BYTES[-1]):
            raise other_lmdb(path / DATA, f"has pages of {page_bytes} bytes")
