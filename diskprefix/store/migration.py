"""From format 1 to format 2: the store is written anew, and takes the old one's place when it is complete.

A damaged node is left out, with all that continues it; so is what else cannot be read.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import lmdb

from diskprefix.errors import StoreCorrupt, StoreUnavailable
from diskprefix.settings import format_size
from diskprefix.store.changes import Changes, NewNode
from diskprefix.store.codec.codec import Codec
from diskprefix.store.folder import DATA, LMDB_LOCK, REPLACEMENT, FolderUnavailable, put_in_place
from diskprefix.store.format_1 import Format1Store, OldUsage, is_format_1, open_format_1
from diskprefix.store.schema import (
    DATABASES,
    FORMAT_VERSION,
    Kind,
    encode_prompt,
    encode_usage,
    history_key,
    identity_checksum,
)
from diskprefix.tokens import TokenIds

log = logging.getLogger("diskprefix")

_U32, _U64, _F64 = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<d")
_BATCH_BYTES = 16 << 20
"""Payload in one transaction, which LMDB holds in memory until it is committed."""
_PROGRESS_S = 5.0


def needs_migration(path: Path) -> bool:
    """Whether folder `path` holds a store of format 1. Raises `StoreCorrupt`, `StoreUnavailable`.

    This process may not have it open. What is in a file of another format is not looked at.
    """
    file = path / DATA
    if not file.exists() or not file.stat().st_size:
        return False
    return is_format_1(path)


def migrate(path: Path) -> None:
    """Replace the store of format 1 in folder `path` by one of format 2 that holds the same.

    For whoever has the folder's lock exclusively. The old file stays as it is until the new one is complete and on
    disk: a migration that is killed has changed nothing, or all. Raises `OSError`, `StoreCorrupt`, `StoreUnavailable`;
    `FolderUnavailable` when the disk has no room for both.
    """
    started = time.monotonic()
    with _keep_format_1_out(path), open_format_1(path) as old:
        _require_room(path, old.new_bytes)
        log.info(
            "[disk-cache] migrating %s to format %d: %s in %d blocks; the old file stays until this is done",
            path,
            FORMAT_VERSION,
            format_size(old.payload_bytes),
            old.count("nodes"),
        )
        shutil.rmtree(path / REPLACEMENT, ignore_errors=True)
        (path / REPLACEMENT).mkdir(mode=0o700)
        try:
            copied = _write_replacement(path, old)
            if old.count("nodes") and not copied["blocks"][0]:
                raise StoreCorrupt(f"{path}: no block of it is sound; move its {DATA} away to start afresh")
            put_in_place(path)
        finally:
            shutil.rmtree(path / REPLACEMENT, ignore_errors=True)
    log.info(
        "[disk-cache] migrated %s in %.1f s: %s",
        path,
        time.monotonic() - started,
        ", ".join(f"{number} {what}" for what, (number, _) in copied.items()),
    )
    damaged = [f"{there - number} of {there} {what}" for what, (number, there) in copied.items() if number < there]
    if damaged:
        log.warning("[disk-cache] not migrated, as damaged or continuing what is damaged: %s", ", ".join(damaged))


class _Replacement:
    """The new file while it is filled. Nobody sees it, so that it need not be safe on disk before the end."""

    def __init__(self, folder: Path, old: Format1Store) -> None:
        self._old = old
        self._env = lmdb.open(
            str(folder),
            # Address space only: whoever opens it sets its own.
            map_size=(2 * old.new_bytes + 2**30) // mmap.PAGESIZE * mmap.PAGESIZE,
            max_dbs=len(DATABASES),
            sync=False,
            lock=False,
            mode=0o600,
        )
        self._databases = {name: self._env.open_db(name.encode()) for name in DATABASES}
        self._last_used: dict[bytes, float] = {}
        """When something under a root was last used."""

    def close(self) -> None:
        self._env.close()

    def put_identity(self) -> None:
        old = self._old
        seal = identity_checksum(FORMAT_VERSION, old.store_id, old.secret, old.created_at)
        with self._changes() as changes:
            changes.put_meta("format", _U32.pack(FORMAT_VERSION))
            changes.put_meta("store_id", old.store_id)
            changes.put_meta("secret", _U64.pack(old.secret))
            changes.put_meta("created_at", _F64.pack(old.created_at))
            changes.put_meta("checksum", _U64.pack(seal))

    def copy_roots(self) -> int:
        with self._changes() as changes:
            for root, record in self._old.roots.items():
                changes.put_root(root, record)
        return len(self._old.roots)

    def copy_nodes(self) -> int:
        """Copy every node that is sound and continues one that is. Answers how many.

        Depth first, so that the blocks of a prompt come to lie behind each other in the file.
        """
        old, copied, progress = self._old, 0, _Progress(self._old.payload_bytes)
        todo = [(name, root, 0, root) for root in old.roots for name in old.continuations.get(root, ())]
        while todo:
            batch_bytes = 0
            with self._changes() as changes:
                while todo and batch_bytes < _BATCH_BYTES:
                    name, parent, position, root = todo.pop()
                    try:
                        node = old.node(name, parent, position, root)
                    except StoreCorrupt as error:
                        log.debug("[disk-cache] migration: block %s: %s", name.hex(), error)
                        continue
                    self._put_node(changes, root, node)
                    if node.kind == Kind.BLOCK:
                        end = position + len(node.token_ids)
                        todo += [(child, name, end, root) for child in old.continuations.get(name, ())]
                    copied += 1
                    batch_bytes += len(node.payload)
                    progress.add(len(node.payload))
        return copied

    def copy_entries(self) -> int:
        """Copy the entries of the nodes that are there, if they speak of them. Answers how many."""
        copied = 0
        with self._changes() as changes:
            for name in self._old.entries():
                entry, node = self._old.entry(name), changes.node(name)
                if entry is not None and node is not None and (entry.root, entry.num_tokens) == (node.root, node.end):
                    changes.put_entry(name, entry)
                    copied += 1
        return copied

    def copy_history(self) -> int:
        """Copy the remembered prompts. Answers how many.

        Format 1 only counted them. The newest of a root is taken to be from the root's last use, as it was at most.
        """
        copied = 0
        with self._changes() as changes:
            for root, record in self._old.roots.items():
                prompts = self._old.prompts(root)
                newest = int(max(record.created_at, self._last_used.get(root, 0.0)) * 1e6)
                for sequence, prompt in enumerate(prompts, start=max(0, newest + 1 - len(prompts))):
                    changes.put_prompt(root, sequence, prompt)
                copied += len(prompts)
        return copied

    def _put_node(self, changes: _Copies, root: bytes, node: NewNode) -> None:
        used, entry = self._old.usage(node.name, root), self._old.entry(node.name)
        changes.put_node(root, node, Codec.RAW)
        changes.set_use(node.name, used, used.last_used if entry is None else min(entry.created_at, used.last_used))
        self._last_used[root] = max(self._last_used.get(root, 0.0), used.last_used)

    @contextmanager
    def _changes(self) -> Iterator[_Copies]:
        with self._env.begin(write=True) as txn:
            yield _Copies(self._databases, txn, 0.0)


class _Copies(Changes):
    """A write transaction that also sets what otherwise comes with time."""

    def set_use(self, name: bytes, used: OldUsage, created_at: float) -> None:
        usage = self.usage(name)
        assert usage is not None, "the node was just put"
        usage = replace(usage, last_used=used.last_used, hits=float(used.hits), created_at=created_at)
        self._put("usage", name, encode_usage(usage))

    def put_prompt(self, root: bytes, sequence: int, prompt: TokenIds) -> None:
        key = history_key(root, sequence)
        self._put("history", key, encode_prompt(key, prompt))


class _Progress:
    """A line every few seconds."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._next = time.monotonic() + _PROGRESS_S

    def add(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS_S
            done, total = format_size(self._done_bytes), format_size(self._total_bytes)
            log.info("[disk-cache] migrating: %s of %s", done, total)


def _write_replacement(path: Path, old: Format1Store) -> dict[str, tuple[int, int]]:
    """Answers, by what it is, how many were copied and how many there were."""
    try:
        with closing(_Replacement(path / REPLACEMENT, old)) as new:
            new.put_identity()
            return {
                "roots": (new.copy_roots(), old.count("roots")),
                "blocks": (new.copy_nodes(), old.count("nodes")),
                "entries": (new.copy_entries(), old.count("entries")),
                "prompts": (new.copy_history(), old.count("history")),
            }
    except lmdb.Error as error:
        # LMDB has no better word than EIO for a disk that fills up in the middle of a write.
        raise FolderUnavailable(path, OSError(errno.EIO, f"the disk is full or fails ({error})")) from error


def _require_room(path: Path, need: int) -> None:
    disk = os.statvfs(path)
    missing = need - disk.f_bavail * disk.f_frsize
    if missing > 0:
        advice = (
            f"migrating the store to format {FORMAT_VERSION} needs {format_size(need)} of free disk, "
            f"{format_size(missing)} more than there is (or delete {DATA} to start afresh)"
        )
        raise FolderUnavailable(path, OSError(errno.ENOSPC, advice))


@contextmanager
def _keep_format_1_out(path: Path) -> Iterator[None]:
    """Lock what a process of format 1 locks for as long as it has the store open; one that comes later waits.

    That is LMDB's own lock, shared, on the first byte of `lock.mdb`. Raises `StoreUnavailable` if there is such a
    process.
    """
    fd = os.open(path / LMDB_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not _lock_alone(fd):
            raise StoreUnavailable(
                f"{path} was written by an older diskprefix, which still has it open: stop it, and it is migrated at "
                "the next start"
            )
        yield
    finally:
        os.close(fd)


def _lock_alone(fd: int) -> bool:
    """Lock the first byte as LMDB does to see whether it is alone; False if somebody else has it locked."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
    except (BlockingIOError, PermissionError):
        return False
    return True
