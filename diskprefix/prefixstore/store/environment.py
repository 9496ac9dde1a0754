"""The LMDB environment of a store: opening, transactions, readers, and the translation of LMDB's errors.

Two properties of LMDB matter here. A freed page is reused only when no process has a reader open from before it was
freed. And the memory map of a process does not grow when another process makes the file larger.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lmdb

from diskprefix.errors import ReaderStays, StoreCorrupt, StoreFull, StoreUnavailable
from diskprefix.prefixstore.store.btree_check import is_sound_run, overflow_of, require_survivable
from diskprefix.prefixstore.store.folder import (
    DATA,
    LMDB_LOCK,
    PASSING,
    FolderUnavailable,
    OnWait,
    file_errors,
    lock_for_moment,
    locked_names,
)
from diskprefix.prefixstore.store.lmdb_engine import engine_version, open_lmdb
from diskprefix.prefixstore.store.write_lock import WriteLock
from diskprefix.units import format_size

_DAMAGED = (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, SystemError)
"""Errors of a damaged file. The binding raises `SystemError` for errors of LMDB that it does not expect."""
_PAGE_BYTES = 4096
_DELETE_BYTES = 16 << 20
"""Room for the B-tree pages that a deletion copies, in a file that is larger than its budget."""
_READER_PATIENCE_S = 5.0
_READER_POLL_S = 0.01
_CHECKS = 5
"""Attempts to check a file that other processes write to."""


class Environment:
    """One process's view of a store's `data.mdb`. For any thread. `databases` has the databases that `open_databases`
    opened, by name."""

    def __init__(
        self, path: Path, *, budget_bytes: int, read_only: bool, max_databases: int, on_wait: OnWait | None = None
    ) -> None:
        """Creates the file unless `read_only`. For `on_wait` see `WriteLock`. Raises `OSError`, `StoreUnavailable` or
        `StoreCorrupt`."""
        self.path = path
        self.read_only = read_only
        self.databases: dict[str, Any] = {}
        self.broken: str | None = None
        """The reason why the environment must be opened again before it is used; None if it can be used."""
        self.damage: StoreCorrupt | None = None
        """The error that LMDB reported for a damaged file."""
        self.is_checked = False
        """The file was checked since it was opened; see `StoreFile.try_file`."""
        self.is_ours = False
        """The mark in `diskprefix.lock` names this file."""
        self.has_lock = True
        """LMDB's lock file lists this process's readers. If this process cannot write the lock file, writers do not
        know of its readers, and may overwrite pages that are being read."""
        self._staying: tuple[int, int] | None = None
        """Transaction number and process id of a reader that did not end while `wait_for_readers` waited."""
        self._transactions = 0
        self._own = threading.local()
        """The number of transactions that a thread has open. Such a thread may begin another one while other threads
        must wait."""
        self._closed = self._is_closing = self._is_resizing = False
        self._idle = threading.Condition()
        with self._translated():
            self.has_lock = not read_only or os.access(path / LMDB_LOCK, os.W_OK)
            # For reading: room for the pages that a daemon adds meanwhile. The map takes address space only.
            map_bytes = 2 * (path / DATA).stat().st_size + 2**30 if read_only else _map_size(path, budget_bytes)
            with locked_names(path, change=False, create=not read_only), self._mapping(map_bytes):
                self._env = open_lmdb(
                    path,
                    map_size=map_bytes,
                    max_dbs=max_databases,
                    readonly=read_only,
                    create=not read_only,
                    lock=self.has_lock,
                    mode=0o600,
                    # Otherwise the unused ends of pages would contain old memory of this process, with data of other
                    # tenants.
                    meminit=True,
                )
                # This lock tells a process that replaces the file that it is still open; see `is_held`.
                self._fd = os.open(path / DATA, os.O_RDONLY | os.O_CLOEXEC)
                lock_for_moment(self._fd, fcntl.LOCK_SH, path / DATA)
        self.write_lock = WriteLock(path, self._fd, on_wait)

    def open_databases(self, names: Sequence[str]) -> None:
        """Opens named databases. Creates missing ones unless the environment is read-only."""
        with self._translated():
            if not self.read_only:
                self._env.reader_check()
        for name in names:
            if not self.has_database(name):
                self._open_database(name, create=True)

    def has_database(self, name: str) -> bool:
        """Returns whether the file has a database of this name. If so, opens it."""
        return name in self.databases or self._open_database(name, create=False)

    def _open_database(self, name: str, *, create: bool) -> bool:
        """Opens a database. Returns False if the file has none of this name. The Python package opens a database in a
        write transaction, unless the file is open for reading only."""
        with ExitStack() as opening:
            opening.enter_context(self._translated())
            txn = None if self.read_only else opening.enter_context(self.transaction(write=True))
            try:
                self.databases[name] = self._env.open_db(name.encode(), txn=txn, create=create)
            except (lmdb.NotFoundError, lmdb.ReadonlyError):
                if create:
                    raise
                return False
        return True

    def is_empty(self) -> bool:
        """Returns whether the file has no databases and no records."""
        with self._translated():
            return not self._env.stat()["entries"]

    def close(self, timeout_s: float = _READER_PATIENCE_S) -> bool:
        """Closes the file once no transaction of this process is open. From the beginning of this call, new
        transactions raise `StoreUnavailable`; otherwise overlapping transactions could keep the file open forever.
        Returns False after `timeout_s`, and the file stays open."""
        with self._idle:
            self._is_closing = True
            try:
                self._closed = self._idle.wait_for(lambda: not self._transactions, timeout_s)
            finally:
                self._is_closing = False
        if self._closed:
            self._env.close()
            os.close(self._fd)
        return self._closed

    def is_in_place(self) -> bool:
        """Returns whether the open file is still in the folder. Another process may have removed or replaced it."""
        try:
            return os.path.samestat(os.stat(self.path / DATA), os.fstat(self._fd))
        except OSError:
            return False

    @property
    def inode(self) -> int:
        """The inode of the open file."""
        return os.fstat(self._fd).st_ino

    def require_survivable(self) -> None:
        """Checks the B-trees of the file as of its last commit; see `btree_check.py`. For any thread, also while others
        write. Raises `StoreCorrupt`; without `has_lock` only after several attempts, because a writer may overwrite the
        pages during the check."""
        for attempt in range(_CHECKS):
            try:
                with self.transaction() as txn:
                    if require_survivable(self.path / DATA, self._fd, txn.id()):
                        self.is_checked = True
                        return
            except StoreCorrupt:
                if self.has_lock or attempt == _CHECKS - 1:
                    raise
        raise StoreUnavailable(f"{self.path}: another process writes faster than the file can be checked")

    def require_sound_runs(self, name: bytes) -> None:
        """Checks the headers of the pages of a node's pieces: LMDB relies on them when it deletes the pieces, and
        `require_survivable` does not read them. Raises `StoreCorrupt`."""
        with self.transaction() as txn:
            cursor = txn.cursor(self.databases["payloads"])
            is_at_key = cursor.set_range(name)
            # Bound: each round moves the cursor.
            while is_at_key and bytes(key := cursor.key()).startswith(name):
                run = overflow_of(key)
                if run is not None and not is_sound_run(self._fd, *run):
                    raise self._damaged(f"the header of a piece of node {name.hex()} is wrong")
                is_at_key = cursor.next()

    def resize(self, budget_bytes: int, timeout_s: float = _READER_PATIENCE_S) -> bool:
        """Resizes the map to a budget once no transaction of this process is open. New transactions wait meanwhile.
        Returns False after `timeout_s`, and changes nothing."""
        with self._translated(), self._idle:
            self._is_resizing = True
            try:
                is_idle = self._idle.wait_for(lambda: not self._transactions, timeout_s)
                map_bytes = _map_size(self.path, budget_bytes)
                if is_idle and not self._closed and map_bytes != self._env.info()["map_size"]:
                    with self._mapping(map_bytes):
                        self._env.set_mapsize(map_bytes)
            finally:
                self._is_resizing = False
                self._idle.notify_all()
        return is_idle

    def file_bytes(self) -> int:
        with file_errors(self.path):
            return os.stat(self.path / DATA).st_size

    @contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[lmdb.Transaction[Any]]:
        """Yields a transaction, which is committed at the end of the block and rolled back by an exception. Reads
        return views of the map. LMDB's errors become `StoreFull` (no page is free), `StoreCorrupt` or
        `StoreUnavailable`."""
        with self._translated():
            txn = self._begin_transaction(write)
            try:
                with txn:
                    yield txn
            finally:
                # LMDB's package frees the place among the readers with the object, which an error's frames would keep.
                del txn
                if write:
                    self.write_lock.give_back()
                self._count(-1)

    def wait_for_readers(self) -> None:
        """Waits until no reader from before the last commit is open. Removes readers of processes that have ended.
        Raises `ReaderStays` if a reader stays open for five seconds. Later calls raise it at once until that reader has
        ended."""
        with self._translated():
            self._env.reader_check()
            deadline = time.monotonic() + _READER_PATIENCE_S
            # Bound: the deadline.
            while (reader := self._old_reader()) is not None:
                if reader == self._staying or time.monotonic() > deadline:
                    self._staying = reader
                    cure = "tried again when it has ended" if reader[1] == os.getpid() else "end it if it is suspended"
                    problem = f"an open reader of process {reader[1]} keeps evicted pages from being reused"
                    raise ReaderStays(f"{self.path}: {problem}; {cure}")
                time.sleep(_READER_POLL_S)

    def _old_reader(self) -> tuple[int, int] | None:
        """Returns the transaction number and process id of the oldest reader, or None if it reads the last commit."""
        last = self._env.info()["last_txnid"]
        rows = [line.split() for line in self._env.readers().splitlines()[1:]]
        oldest = min(((int(row[-1]), int(row[0])) for row in rows if row and row[-1].isdigit()), default=(last, 0))
        return oldest if oldest[0] < last else None

    @contextmanager
    def _mapping(self, map_bytes: int) -> Iterator[None]:
        """Translates the error for a map that does not fit into the address space of this process."""
        try:
            yield
        except lmdb.MemoryError as error:
            limit = resource.getrlimit(resource.RLIMIT_AS)[0]
            room, cure = "the system has no address space", "lower --kv-cache-budget"
            if limit != resource.RLIM_INFINITY:
                room = f"this process may have {format_size(limit)} of address space (`ulimit -v`), which is not enough"
                cure = "raise that limit" if self.read_only else f"raise that limit, or {cure}"
            problem = f"{room} for the store's map of {format_size(map_bytes)}; {cure}"
            # A map that cannot be resized is lost.
            self.broken = f"--kv-cache-dir {self.path}: {problem}"
            raise StoreUnavailable(self.broken) from error

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Translates LMDB's errors."""
        try:
            yield
        except lmdb.MapFullError as error:
            raise StoreFull(f"{self.path}: the store is full") from error
        except _DAMAGED as error:
            raise self._damaged(error) from error
        except lmdb.BadTxnError as error:
            # An earlier read of the transaction failed.
            raise StoreCorrupt(f"{self.path / DATA} is damaged: {error}") from error
        except lmdb.VersionMismatchError as error:
            # The version of the data file, or of the lock file of a process that has the store open.
            raise other_lmdb(self.path / DATA, "or its lock file is of another version") from error
        except struct.error as error:
            raise StoreCorrupt(f"{self.path}: a record has a wrong length ({error})") from error
        except lmdb.LockError as error:
            # LMDB locks one byte for each process with a reader: the byte whose number is the pid.
            problem = f"a process of another container has the store open, and the same pid ({os.getpid()}) as this one"
            cure = "LMDB tells readers apart by their pid; let the containers share a pid namespace, or use two folders"
            raise StoreUnavailable(f"--kv-cache-dir {self.path}: {problem}: {cure}") from error
        except lmdb.Error as error:
            problem = f"--kv-cache-dir {self.path}: {error}; repair it or choose another folder"
            if isinstance(error, lmdb.PanicError):
                self.broken = problem
            # LMDB reports EIO for a write that a full disk cut short.
            number = errno.EIO if isinstance(error, lmdb.DiskError) else getattr(error, "code", 0)
            if number in PASSING:
                raise FolderUnavailable(self.path, OSError(number, str(error))) from error
            raise StoreUnavailable(problem) from error

    def _damaged(self, error: Exception | str) -> StoreCorrupt:
        self.broken = f"{self.path / DATA} is damaged: {error}"
        self.damage = StoreCorrupt(self.broken)
        return StoreCorrupt(self.broken)

    def _begin_transaction(self, write: bool) -> Any:
        """Begins a transaction. First enlarges the map if another process has made the file larger than the map."""
        self._count(1)
        try:
            begin = self._begin_writing if write else partial(self._env.begin, buffers=True)
            try:
                return begin()
            except lmdb.MapResizedError:
                self._follow_growth()
                return begin()
        except BaseException:
            self._count(-1)
            raise

    def _begin_writing(self) -> Any:
        return self.write_lock.begin_write(
            partial(self._env.begin, write=True), lambda: int(self._env.info()["last_txnid"])
        )

    def _follow_growth(self) -> None:
        """Enlarges the map while this process has no transaction (LMDB requires that). Waiting threads are not counted;
        otherwise two of them would wait for each other."""
        with self._idle:
            self._transactions -= 1
            self._idle.notify_all()
            try:
                if self._idle.wait_for(lambda: not self._transactions, _READER_PATIENCE_S) and not self._closed:
                    with self._mapping(self.file_bytes()):
                        self._env.set_mapsize(0)
            finally:
                self._transactions += 1
        if self._closed:
            raise StoreUnavailable(f"{self.path}: the store was closed meanwhile")

    def _count(self, change: int) -> None:
        """Counts a transaction that begins (1) or ends (-1)."""
        num_own = getattr(self._own, "number", 0)
        with self._idle:
            if change > 0 and num_own <= 0:
                self._idle.wait_for(lambda: not self._is_resizing, _READER_PATIENCE_S)
            if change > 0 and (self._closed or (self._is_closing and num_own <= 0)):
                raise StoreUnavailable(f"{self.path}: the store was closed meanwhile")
            self._transactions += change
            self._idle.notify_all()
        self._own.number = num_own + change


def is_held(fd: int) -> bool:
    """Returns whether a process has an environment of this file open. Waits a few seconds for such processes: each
    closes the file once it notices that the file was replaced."""
    deadline = time.monotonic() + _READER_PATIENCE_S
    # Bound: the deadline.
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return True
            time.sleep(_READER_POLL_S)
        else:
            return False


def other_lmdb(data: Path, problem: str) -> StoreUnavailable:
    """Returns the error for a sound file that this LMDB cannot use on this machine."""
    return StoreUnavailable(
        f"{data} {problem}, which LMDB {engine_version()} cannot use on this machine; use the Python package lmdb and "
        "the kind of machine that made it, or choose another --kv-cache-dir"
    )


def _map_size(path: Path, budget_bytes: int) -> int:
    """Returns the budget in whole pages, or, if the file is larger, its size with room for deletions."""
    file = path / DATA
    file_bytes = file.stat().st_size if file.exists() else 0
    wanted = max(budget_bytes, file_bytes + _DELETE_BYTES if file_bytes > budget_bytes else 0)
    return wanted - wanted % _PAGE_BYTES
