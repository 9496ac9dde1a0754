"""The file of a store: opens it and checks its identity, moves an unusable file aside, opens it again after a problem.

A process that is alone with the folder may move aside a file that is damaged or has another format. A process that
comes second finds this done.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import secrets
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias

from diskprefix.errors import CacheError, StoreCorrupt, StoreFormatError, StoreUnavailable
from diskprefix.namespace_key import NamespaceKey
from diskprefix.settings import MAX_BUDGET, MIN_BUDGET
from diskprefix.store.changes import Changes
from diskprefix.store.compact import compact_folder
from diskprefix.store.environment import Environment, other_lmdb
from diskprefix.store.folder import (
    DATA,
    LMDB_LOCK,
    REPLACEMENT,
    FolderLock,
    FolderUnavailable,
    check_folder,
    disk_full,
    file_errors,
    make_folder,
    reserve_lmdb_lock,
    sync,
)
from diskprefix.store.schema import (
    DATABASES,
    FORMAT,
    FORMAT_VERSION,
    NAMES,
    NamesRecord,
    decode_record,
    encode_record,
)
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.survival import require_survivable
from diskprefix.store.written import WriteMeter
from diskprefix.tokens import HASH_BYTES

log = logging.getLogger("diskprefix")

OnCorruption: TypeAlias = Literal["quarantine", "refuse"]

DAMAGED = "damaged.mdb"
"""The name of an unusable file once it is moved aside. It replaces the one that was moved aside before."""
_LOCK_PATIENCE_S = 10.0
_FIRST_BYTES = 2 * mmap.PAGESIZE
"""The size of a new file: LMDB's two meta pages."""


def open_environment(path: Path, *, budget_bytes: int, read_only: bool) -> tuple[Environment, FolderLock]:
    """Opens the environment in folder `path`, created unless read-only, and the lock that goes with it. Raises
    `StoreUnavailable` (`FolderUnavailable` where the problem may end by itself), or `StoreCorrupt`."""
    if read_only and not os.path.lexists(path / DATA):
        raise StoreUnavailable(f"{path} holds no diskprefix store; give its folder with --kv-cache-dir")
    if read_only:
        check_folder(path)
    else:
        make_folder(path)
    lock, env, is_marked = FolderLock(path, _LOCK_PATIENCE_S, create=not read_only), None, False
    try:
        with file_errors(path):
            is_alone = not read_only and lock.try_exclusive()
            if is_alone:
                # A process that was killed while it wrote a replacement left it behind. The old file is in place.
                shutil.rmtree(path / REPLACEMENT, ignore_errors=True)
            _require_own_layout(path)
            if is_alone and lock.is_marked:
                require_survivable(path, is_alone=True)
            if not read_only:
                lock.mark(True)
                is_marked = True
            if os.access(path, os.W_OK):
                reserve_lmdb_lock(path, create=not read_only)
            env = Environment(path, budget_bytes=budget_bytes, read_only=read_only, max_databases=len(DATABASES))
            if not read_only:
                _make_durable(path / DATA, may_write=is_alone)
                # LMDB syncs what is in a new file, but not its name. Without it, a power failure loses the file.
                sync(path)
            lock.share()
    except BaseException:
        if env is not None:
            # Otherwise the folder cannot be opened for reading either.
            env.close()
        if is_marked:
            with suppress(OSError):
                lock.mark(False)
        lock.close()
        raise
    return env, lock


def _make_durable(file: Path, *, may_write: bool) -> None:
    """Makes what LMDB relies on durable, before anything is written. Raises `OSError`.

    LMDB writes the first pages once, when it makes the file, and changes parts of them later. If the barrier behind
    that fails, the kernel takes them for written, and the next power failure would lose them. So those of a file
    without a commit are written again. And if the write of a commit's meta page fails, LMDB writes the one before back
    without a barrier: the disk may have the new one, whose pages the next commit overwrites.
    """
    with file.open("r+b", buffering=0) as opened:
        first = opened.read(_FIRST_BYTES + 1)
        if may_write and len(first) == _FIRST_BYTES:
            opened.seek(0)
            opened.write(first)
        os.fsync(opened.fileno())


def set_aside(path: Path, error: StoreCorrupt | StoreFormatError) -> None:
    """Moves a file that is damaged or has another format out of the way, so that a new one can be created.

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


_META = struct.Struct("<II16xI")
"""Magic number, data version and page size, behind the header of a meta page."""
_MAGIC, _DATA_VERSION, _PAGE_HEADER_BYTES = 0xBEEFC0DE, 1, (16, 24)
"""Of LMDB 0.9, but the second header is that of later data versions."""
_PAGE_BYTES = tuple(1 << n for n in range(12, 16))


def _require_own_layout(path: Path) -> None:
    """Raises `StoreUnavailable` for a file of another data version of LMDB, or from a machine with other pages, which
    is not damaged. Both meta pages must say so. Raises `StoreCorrupt` if one of them says something else."""
    try:
        with (path / DATA).open("rb") as file:
            start = file.read(_PAGE_BYTES[-1] + _PAGE_HEADER_BYTES[-1] + _META.size)
    except FileNotFoundError:
        return
    for header, page_bytes in itertools.product(_PAGE_HEADER_BYTES, _PAGE_BYTES):
        if len(start) < page_bytes + header + _META.size:
            continue
        magic, version, stated_bytes = first = _META.unpack_from(start, header)
        if magic != _MAGIC or first != _META.unpack_from(start, page_bytes + header):
            continue
        if version != _DATA_VERSION:
            raise other_lmdb(path / DATA, f"has LMDB's data version {version}")
        if stated_bytes == page_bytes != min(mmap.PAGESIZE, _PAGE_BYTES[-1]):
            raise other_lmdb(path / DATA, f"has pages of {page_bytes} bytes")
    second = _PAGE_HEADER_BYTES[0] + min(mmap.PAGESIZE, _PAGE_BYTES[-1])
    has_both = len(start) >= second + _META.size
    if has_both and _META.unpack_from(start, second) != _META.unpack_from(start, _PAGE_HEADER_BYTES[0]):
        raise StoreCorrupt(f"{path / DATA} is damaged: its meta pages differ")


def foreign_file(path: Path) -> StoreUnavailable:
    """The error for a `data.mdb` that another program made: a store neither adds to it nor moves it."""
    return StoreUnavailable(f"{path / DATA} belongs to another program; choose another --kv-cache-dir")


_U32 = struct.Struct("<I")


def identify(path: Path, env: Environment, now: float, namespace: NamespaceKey | None) -> NamesRecord:
    """Reads a store's identity, or writes it into a new store at time `now`, then opens all databases. `namespace`
    seeds the names of a new store; without it they are seeded with a secret of its own.

    Nothing else in the file is used before its format is known. Raises `StoreFormatError` if the store has another
    format, `StoreCorrupt` if its identity is damaged, and `StoreUnavailable` if the file is not a store.
    """
    if not env.has_database("meta"):
        if not env.is_empty():
            require_survivable(path)
            raise foreign_file(path)
        if env.read_only:
            raise StoreCorrupt(f"{path} holds no diskprefix store")
    env.open_databases(["meta"])
    with env.transaction() as txn:
        is_new = not any(Snapshot(env.databases, txn).keys("meta"))
    if is_new and env.read_only:
        raise StoreCorrupt(f"{path} holds no diskprefix store")
    if is_new:
        with env.transaction(write=True) as txn:
            # Another process may have written its identity meanwhile.
            if not any(Snapshot(env.databases, txn).keys("meta")):
                _create(Changes(env.databases, txn, now), now, namespace)
    with env.transaction() as txn:
        names = _read(path, env, txn)
    env.open_databases(DATABASES)
    return names


def require_namespace(path: Path, names: NamesRecord, namespace: NamespaceKey | None) -> None:
    """Raises `StoreUnavailable` unless the names of the store in folder `path` are seeded as `namespace` says."""
    if names.namespace == (namespace.digest if namespace else b""):
        return
    if not names.namespace:
        problem = "its names are not made with a namespace key; leave --namespace-key-file out"
    elif namespace is None:
        problem = "its names are made with a namespace key; give the file with --namespace-key-file"
    else:
        problem = "its names are made with another namespace key; give that one with --namespace-key-file"
    raise StoreUnavailable(f"{path / DATA}: {problem}, or choose another --kv-cache-dir")


def _create(changes: Changes, now: float, namespace: NamespaceKey | None) -> None:
    names = NamesRecord(
        store_id=secrets.token_bytes(HASH_BYTES),
        secret=namespace.names_seed if namespace else secrets.randbits(64),
        created_at=now,
        namespace=namespace.digest if namespace else b"",
    )
    changes.put_meta(FORMAT, _U32.pack(FORMAT_VERSION))
    changes.put_meta(NAMES, encode_record(NAMES.encode(), names))


def names_of(snapshot: Snapshot) -> NamesRecord:
    """Returns what the names of an open store are made with. Raises `StoreCorrupt`."""
    return decode_record(NamesRecord, NAMES.encode(), snapshot.meta(NAMES) or b"")


def _read(path: Path, env: Environment, txn: Any) -> NamesRecord:
    """Returns a store's identity."""
    snapshot = Snapshot(env.databases, txn)
    version, names = snapshot.meta(FORMAT), snapshot.meta(NAMES)
    if version is None and names is None:
        raise foreign_file(path)
    try:
        (found,) = _U32.unpack(version or b"")
        if found != FORMAT_VERSION:
            raise StoreFormatError(
                f"{path / DATA} has format {found}, and this version of diskprefix reads format {FORMAT_VERSION}: "
                "move the file away to start afresh, or choose another --kv-cache-dir"
            )
        return names_of(snapshot)
    except (struct.error, StoreCorrupt) as error:
        raise StoreCorrupt(
            f"{path / DATA}: the identity of the store is damaged; move the file away to start afresh"
        ) from error


_U64 = struct.Struct("<Q")
_RETRY_S = 2.0
"""The time between attempts to open a folder that could not be opened."""


class StoreFile:
    """The environment and the lock of a store's folder. One thread at a time may open, close or reopen it.

    `names` is replaced as a whole when another store is opened. `budget_bytes` is the daemon's budget; a tool that gave
    none uses the one of the last daemon. `mapped` holds the names of nodes whose pages this process has read since the
    file was opened. `meter` counts the bytes that
    this process writes to the file. `clock` returns the time in seconds since the epoch.
    """

    def __init__(
        self,
        path: Path,
        budget_bytes: int,
        read_only: bool,
        on_corruption: OnCorruption,
        serving: bool,
        clock: Callable[[], float],
        namespace: NamespaceKey | None,
        min_free_bytes: int,
    ) -> None:
        """Opens the folder; for the arguments and errors see `Store`."""
        self.path = path
        self.min_free_bytes = min_free_bytes
        self.budget_bytes = budget_bytes
        self.clock = clock
        self.names = NamesRecord(store_id=b"", secret=0, created_at=0.0)
        self.meter = WriteMeter()
        self._has_budget = budget_bytes > 0
        self._is_reader = read_only
        self._is_serving = serving
        self._namespace = namespace
        self._on_corruption = on_corruption
        self._env: Environment | None = None
        self._lock: FolderLock | None = None
        self._problem: str | None = None
        self._retry_at = 0.0
        try:
            self._attach()
        except FolderUnavailable as error:
            if not (serving and error.passing):
                raise
            self._only_read(error)

    @property
    def problem(self) -> str | None:
        """The reason why the store cannot be written, or not even read; None if it can."""
        env = self._env
        return self._problem or (env.broken if env is not None else None)

    @property
    def environment(self) -> Environment:
        """The open environment. Raises `StoreUnavailable` if there is none."""
        env = self._env
        if env is None:
            raise StoreUnavailable(self._problem or f"{self.path}: the store is closed")
        return env

    def told(self, error: CacheError) -> str:
        """Returns the message of an error. That of a full disk also says what is to stay free."""
        is_full = isinstance(error, FolderUnavailable) and error.is_full
        return disk_full(self.path, self.min_free_bytes) if is_full else str(error)

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """A read transaction. Pages that are freed meanwhile cannot be reused before it ends."""
        env = self.environment
        with env.transaction() as txn:
            yield Snapshot(env.databases, txn, copy_payloads=not env.has_lock)

    @contextmanager
    def changes(self) -> Iterator[Changes]:
        """A write transaction: committed at the end, rolled back by an exception. One at a time in all processes.

        Raises `StoreUnavailable` if the file was replaced: what is written to the old one would be lost.
        """
        env = self.environment
        if env.read_only:
            raise StoreUnavailable(f"--kv-cache-dir {self.path}: opened for reading only; nothing is saved")
        changes: Changes | None = None
        with self.meter.measured(lambda: changes.num_bytes if changes else 0), env.transaction(write=True) as txn:
            if not env.is_in_place():
                raise StoreUnavailable(f"{self.path} was removed or replaced")
            changes = Changes(env.databases, txn, self.clock())
            yield changes

    def _attach(self) -> None:
        """Opens the folder. With "quarantine", an unusable file is moved aside first. Raises `CacheError`."""
        try:
            self._open(read_only=self._is_reader)
        except (StoreCorrupt, StoreFormatError) as error:
            if self._on_corruption == "refuse":
                raise
            set_aside(self.path, error)
            self._open(read_only=self._is_reader)
        self._problem = None

    def try_file(self) -> None:
        """Lets a child process go through the file, because a record in it was found damaged. If that fails, `reopen`
        moves the file aside. Once for each time that the file is opened, because it takes long."""
        env = self.environment
        if not env.is_tried:
            env.is_tried = True
            try:
                require_survivable(self.path)
            except StoreCorrupt as error:
                env.broken, env.damage = str(error), error

    def close(self) -> None:
        """Closes the folder. Raises `StoreUnavailable` if a transaction of this process does not end."""
        env, self._env = self._env, None
        if env is not None and not env.close():
            self._env = env
            raise StoreUnavailable(f"{self.path}: a reader of this process does not end")
        if self._lock is not None:
            if env is not None and not env.read_only and env.damage is None:
                with suppress(OSError):
                    self._lock.mark(False)
            self._lock.close()
            self._lock = None

    def reopen(self) -> bool:
        """Opens the folder again if its file was removed, replaced or damaged, or can be written again. A damaged file
        is moved aside first. Returns whether it was opened for reading and writing. Never raises."""
        if not self._is_due():
            return False
        self._retry_at = time.monotonic() + _RETRY_S
        damage = self._env.damage if self._env is not None else None
        try:
            self.close()
            if damage is not None and self._on_corruption == "quarantine":
                set_aside(self.path, damage)
            self._attach()
        except FolderUnavailable as error:
            self._only_read(error)
        except CacheError as error:
            self._problem = str(error)
        else:
            return True
        return False

    def compact(self) -> None:
        """Replaces the file by a compacted copy, unless another process has it open. Errors are logged. If it cannot be
        opened afterwards, `reopen` tries again."""
        self.close()
        try:
            compact_folder(self.path)
        except CacheError as error:
            log.warning("[disk-cache] the file keeps its size: %s", error)
        self._retry_at = 0.0
        self.reopen()

    def _is_due(self) -> bool:
        """Returns whether the folder should be opened again and the last attempt is not too recent."""
        env = self._env
        if env is not None and (env.broken or not env.is_in_place()):
            self._problem = env.broken or f"{self.path} was removed or replaced"
            return True
        may_be_writable = env is None or (env.read_only and os.access(self.path, os.W_OK))
        return may_be_writable and time.monotonic() >= self._retry_at

    def _open(self, *, read_only: bool) -> None:
        env, lock = open_environment(self.path, budget_bytes=self.budget_bytes, read_only=read_only)
        try:
            names = identify(self.path, env, self.clock(), self._namespace)
            if self._is_serving:
                require_namespace(self.path, names, self._namespace)
            self._agree_on_budget(env)
        except BaseException:
            env.close()
            lock.close()
            raise
        self.names, self._env, self._lock = names, env, lock

    def _agree_on_budget(self, env: Environment) -> None:
        """Stores a daemon's budget in the file; for a tool, which has none, uses the one in the file."""
        with env.transaction() as txn:
            stored = Snapshot(env.databases, txn).meta("budget") or b""
        if not self._has_budget:
            budget = _U64.unpack(stored)[0] if len(stored) == _U64.size else 0
            self.budget_bytes = budget if MIN_BUDGET <= budget <= MAX_BUDGET else env.file_bytes()
            if not env.read_only:
                env.let_grow_to(self.budget_bytes)
        elif stored != _U64.pack(self.budget_bytes) and not env.read_only:
            with env.transaction(write=True) as txn:
                Changes(env.databases, txn, self.clock()).put_meta("budget", _U64.pack(self.budget_bytes))

    def _only_read(self, error: FolderUnavailable) -> None:
        """Opens the store for reading, if there is one; `error` says why it cannot be written."""
        try:
            self._open(read_only=True)
        except CacheError:
            log.debug("[disk-cache] nothing to read in %s", self.path, exc_info=True)
        self._problem = self.told(error)
