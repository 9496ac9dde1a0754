"""Compaction: writing a new file with the stored records alone.

LMDB never gives a page back to the disk, and its pages keep the bytes of deleted records. So compaction copies record
by record; LMDB's own copy takes whole pages. The copy is written beside the file, made durable and renamed over it. A
kill at any moment leaves the old file or the new one.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import lmdb
from msgspec import Struct

from diskprefix.errors import CacheError, StoreUnavailable
from diskprefix.prefixstore.store.btree_check import require_sound_meta
from diskprefix.prefixstore.store.codec.codec import populate
from diskprefix.prefixstore.store.environment import Environment, is_held
from diskprefix.prefixstore.store.folder import (
    DATA,
    REPLACEMENT,
    FolderLock,
    check_folder,
    file_errors,
    folder_made,
    put_in_place,
)
from diskprefix.prefixstore.store.lmdb_engine import open_lmdb
from diskprefix.prefixstore.store.schema import DATABASES, piece_index, piece_key
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.tree import PrefixTree
from diskprefix.tokens import HASH_BYTES
from diskprefix.units import format_size

_SPARE_BYTES = 1 << 20
"""Room for the records that another process adds before the copy begins."""
_BATCH_BYTES = 64 << 20
"""The bytes that one transaction copies, which LMDB holds in memory until the commit."""


class Compacted(Struct, frozen=True):
    """Sizes of the file and of its copy."""

    before_bytes: int
    after_bytes: int


def compacted_bytes(path: Path) -> int:
    """Returns the size in bytes of a compacted copy of the store in folder `path`. Raises `StoreCorrupt`, or
    `StoreUnavailable` if there is no store."""
    with file_errors(path), _reading(path) as snapshot:
        return snapshot.used_bytes()


def compact_folder(path: Path, advance: Callable[[int], None] = lambda _num_bytes: None) -> Compacted:
    """Replaces the store's file in folder `path` by a compacted copy. `advance` is called with the bytes just written.

    The caller must have no environment open there. Raises `StoreUnavailable` if another process has the store open, or
    the disk fails or has no room for both files, and `StoreCorrupt` if the file is damaged. Then the old file stays.
    """
    alternative = ", or write a compacted copy with `diskprefix backup FOLDER`"
    with _unused(path, alternative), _reading(path) as snapshot:
        return _write_copy(snapshot, path, path, advance)


def rewrite_folder(path: Path, advance: Callable[[int], None] = lambda _num_bytes: None) -> bool:
    """Replaces the store's file in folder `path` by a compacted copy, also while other processes have the store open.
    They open the new file within seconds, and write nothing to the old one.

    Returns whether no process has the old file open any more: until then its bytes stay on the disk. The caller must
    have no environment open there. Raises the errors of `compact_folder`, except the one for a store that another
    process has open.
    """
    check_folder(path)
    with closing(FolderLock(path)), file_errors(path):
        require_sound_meta(path / DATA)
        old = os.open(path / DATA, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with closing(Environment(path, budget_bytes=0, read_only=False, max_databases=len(DATABASES))) as env:
                env.require_survivable()
                env.open_databases(DATABASES)
                # The transaction keeps others from writing until the new file is in place.
                with env.transaction(write=True) as txn:
                    if not env.is_in_place():
                        raise StoreUnavailable(f"{path}: another process has just replaced the store's file; try again")
                    _write_copy(Snapshot(env.databases, txn), path, path, advance)
            return not is_held(old)
        finally:
            os.close(old)


def copy_store(path: Path, target: Path, advance: Callable[[int], None] = lambda _num_bytes: None) -> Compacted:
    """Writes a compacted copy of the store in folder `path` into `target`, which is created and must hold no store. If
    that fails, nothing is left there.

    A daemon may have the store open, but the pages that it frees meanwhile are not reused before the copy ends. Raises
    the errors of `compact_folder`.
    """
    check_folder(path)
    with closing(FolderLock(path, create=False)), file_errors(target), folder_made(target):
        if os.path.lexists(target / DATA):
            raise StoreUnavailable(f"{target} holds a store already; choose another folder for the copy")
        with _reading(path) as snapshot:
            return _write_copy(snapshot, path, target, advance)


def require_unused(path: Path) -> None:
    """Raises `StoreUnavailable` if another process has the store in folder `path` open."""
    with _unused(path):
        pass


@contextmanager
def _unused(path: Path, alternative: str = " first") -> Iterator[None]:
    """Keeps others from opening the store in folder `path`. Raises `StoreUnavailable` if another process has it open,
    with `alternative` at the end of the message."""
    check_folder(path)
    with closing(FolderLock(path)) as lock, file_errors(path):
        if not lock.try_exclusive("replacing the store's file"):
            raise StoreUnavailable(f"{path}: a daemon or another command has the store open; stop it{alternative}")
        yield


def replace_store(source: Path, path: Path, advance: Callable[[int], None] = lambda _num_bytes: None) -> Compacted:
    """Replaces the store in folder `path`, which is created, by a copy of the store in folder `source`. `before_bytes`
    is the size of the file in `source`. Raises the errors of `compact_folder`; then the old file stays."""
    check_folder(source)
    if path.resolve() == source.resolve():
        raise StoreUnavailable(f"{source} is the folder of the store itself; give that of a backup")
    with folder_made(path), _unused(path), _reading(source) as snapshot:
        return _write_copy(snapshot, source, path, advance)


@contextmanager
def _reading(source: Path) -> Iterator[Snapshot]:
    """Yields a snapshot of the store in folder `source`. Raises `StoreCorrupt`, or `StoreUnavailable` if there is no
    store."""
    missing = StoreUnavailable(f"{source} holds no diskprefix store; give its folder with --kv-cache-dir")
    if not (source / DATA).is_file() or not (source / DATA).stat().st_size:
        raise missing
    require_sound_meta(source / DATA)
    with closing(Environment(source, budget_bytes=0, read_only=True, max_databases=len(DATABASES))) as env:
        env.require_survivable()
        if not env.has_database("meta"):
            raise missing
        env.open_databases(DATABASES)
        with env.transaction() as txn:
            yield Snapshot(env.databases, txn)


def _write_copy(snapshot: Snapshot, source: Path, target: Path, advance: Callable[[int], None]) -> Compacted:
    """Writes a copy of a snapshot of the store in `source` into a folder inside `target`, then moves the new file into
    `target`."""
    num_bytes = snapshot.used_bytes()
    before_bytes = (source / DATA).stat().st_size
    work = target / REPLACEMENT
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700)
    try:
        _require_room(target, work, num_bytes)
        _copy(snapshot, work, num_bytes, advance)
        _require_usable(target, work, snapshot)
        put_in_place(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return Compacted(before_bytes, (target / DATA).stat().st_size)


def _require_usable(path: Path, work: Path, snapshot: Snapshot) -> None:
    """Opens the copy of a snapshot in folder `work` as the next process will open it, and checks its B-trees. Raises
    `StoreUnavailable`, which names `path`, if that process would refuse the copy, or if the copy lacks records."""
    try:
        with _reading(work) as copy:
            is_whole = all(copy.num_records(database) == snapshot.num_records(database) for database in DATABASES)
    except CacheError as error:
        raise StoreUnavailable(f"{path}: the copy is not used, because it cannot be opened: {error}") from error
    if not is_whole:
        raise StoreUnavailable(f"{path}: the copy is not used, because it lacks records; `diskprefix verify` says why")


def _require_room(path: Path, work: Path, num_bytes: int) -> None:
    """Raises `StoreUnavailable`, which names `path`, if the disk of `work` has no room for `num_bytes`."""
    disk = os.statvfs(work)
    free_bytes = disk.f_bavail * disk.f_frsize
    missing_bytes = num_bytes + _SPARE_BYTES - free_bytes
    if missing_bytes > 0:
        raise StoreUnavailable(
            f"{path}: the copy takes {format_size(num_bytes)} and the disk has {format_size(free_bytes)}: "
            f"{format_size(missing_bytes)} are missing; free them, or write the copy elsewhere with `diskprefix backup`"
        )


def _copy(snapshot: Snapshot, folder: Path, num_bytes: int, advance: Callable[[int], None]) -> None:
    """Copies all records of a snapshot into a new file, which is not durable yet."""
    with _new_file(folder, num_bytes) as (copy, databases):
        records, done_bytes = _records(snapshot), _BATCH_BYTES
        # Bound: each round copies other records, and a batch that is not full is the last one.
        while done_bytes >= _BATCH_BYTES:
            done_bytes = 0
            with copy.begin(write=True) as changes:
                for database, key, value in records:
                    changes.put(key, value, db=databases[database])
                    done_bytes += len(key) + len(value)
                    if done_bytes >= _BATCH_BYTES:
                        break
            advance(done_bytes)


@contextmanager
def _new_file(folder: Path, num_bytes: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yields an environment in an empty folder for about `num_bytes`, and its databases. Raises `OSError`."""
    # The map takes address space only. The next process that opens the file sets its own size.
    map_bytes = (2 * num_bytes + 2**30) // mmap.PAGESIZE * mmap.PAGESIZE
    try:
        with open_lmdb(folder, map_size=map_bytes, max_dbs=len(DATABASES), sync=False, lock=False, mode=0o600) as env:
            yield env, {name: env.open_db(name.encode()) for name in DATABASES}
    except lmdb.Error as error:
        # LMDB reports EIO for a disk that fills up in the middle of a write.
        raise OSError(errno.EIO, f"the disk is full or fails ({error})") from error


def _records(snapshot: Snapshot) -> Iterator[tuple[str, bytes, bytes | memoryview]]:
    """Yields database, key and value of every record, the payloads in the order in which prompts read them."""
    for database in DATABASES:
        if database != "payloads":
            yield from ((database, key, value) for key, value in snapshot.records(database))
    copied = set()
    for name in PrefixTree(snapshot).depth_first():
        copied.add(name)
        for index, piece in snapshot.pieces(name):
            populate(piece)
            yield "payloads", piece_key(name, index), piece
    # A copy does not judge: it also contains pieces that belong to no node.
    for key, value in snapshot.records("payloads"):
        if key[:HASH_BYTES] not in copied or piece_index(key, key[:HASH_BYTES]) is None:
            populate(memoryview(value))
            yield "payloads", key, value
