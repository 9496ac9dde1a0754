"""The LMDB environment under the store: opening, transactions, readers, and what its errors mean.

Two things about LMDB shape this. A page that was freed can be reused only when no reader is open from before, in any
process. And the memory map of a process does not grow by itself when another process lets the file grow.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

from diskprefix.errors import StoreCorrupt, StoreFull, StoreUnavailable
from diskprefix.settings import format_size

log = logging.getLogger("diskprefix")

_PAGE_BYTES = 4096
_DELETE_BYTES = 16 << 20
"""Room for the B-tree pages that deleting copies, in a file that has outgrown its budget."""
_READER_PATIENCE_S = 5.0
_READER_POLL_S = 0.01


class Environment:
    """One process's view of a store's `data.mdb`. Safe to use from several threads.

    `databases` are the named databases, by name, once `open_databases` was called.
    """

    def __init__(self, path: Path, *, budget_bytes: int, read_only: bool, max_databases: int) -> None:
        """Open, and create unless `read_only`. Raises `StoreUnavailable` or `StoreCorrupt`."""
        self.path = path
        self.read_only = read_only
        self.databases: dict[str, Any] = {}
        self._transactions = 0
        self._idle = threading.Condition()
        if read_only and not (path / "data.mdb").is_file():
            raise StoreUnavailable(f"{path} holds no diskprefix store; give its folder with --kv-cache-dir")
        if not read_only:
            _make_folder(path)
        with _translated(path):
            self._env = lmdb.open(
                str(path),
                map_size=_read_map_size(path) if read_only else _map_size(path, budget_bytes),
                max_dbs=max_databases,
                readonly=read_only,
                create=not read_only,
                # Without write permission there is no lock file to join; a daemon that belongs to somebody else may
                # then overwrite pages under a long read, which the checks of every record turn into a clear error.
                lock=not read_only or os.access(path, os.W_OK),
                mode=0o600,
                meminit=False,
            )

    def open_databases(self, names: Sequence[str]) -> None:
        """Open named databases, creating those that are missing unless the environment is read-only."""
        with _translated(self.path):
            if not self.read_only:
                self._env.reader_check()
            for name in names:
                self.databases[name] = self._env.open_db(name.encode(), create=not self.read_only)

    def close(self) -> None:
        self._env.close()

    @contextmanager
    def transaction(self, *, write: bool = False) -> Iterator[lmdb.Transaction[Any]]:
        """A transaction that commits at the end, or is rolled back by an exception. Reads answer views of the map.

        LMDB's errors, in here too, become `StoreFull` (no page is free), `StoreCorrupt` or `StoreUnavailable`.
        """
        with _translated(self.path):
            txn = self._begin(write)
            try:
                with txn:
                    yield txn
            finally:
                self._count(-1)

    def wait_for_readers(self) -> bool:
        """Wait until nobody reads what was there before; readers of dead processes are cleared. False: somebody does.

        Our own snapshots take milliseconds; another process's reader is given the same patience.
        """
        self._env.reader_check()
        deadline = time.monotonic() + _READER_PATIENCE_S
        while self._has_old_readers():
            if time.monotonic() > deadline:
                return False
            time.sleep(_READER_POLL_S)
        return True

    def _begin(self, write: bool) -> Any:
        """Begin a transaction; if another process has let the file outgrow our map, follow it first."""
        self._count(1)
        try:
            try:
                return self._env.begin(write=True) if write else self._env.begin(buffers=True)
            except lmdb.MapResizedError:
                self._follow_growth()
                return self._env.begin(write=True) if write else self._env.begin(buffers=True)
        except BaseException:
            self._count(-1)
            raise

    def _follow_growth(self) -> None:
        """LMDB forbids moving the map under a transaction of this process, so wait until ours is the only one."""
        with self._idle:
            if self._idle.wait_for(lambda: self._transactions == 1, _READER_PATIENCE_S):
                self._env.set_mapsize(0)

    def _count(self, change: int) -> None:
        with self._idle:
            self._transactions += change
            self._idle.notify_all()

    def _has_old_readers(self) -> bool:
        """Whether a read transaction older than the last commit is open, in any process: LMDB's table of readers."""
        last = self._env.info()["last_txnid"]
        rows = [line.split() for line in self._env.readers().splitlines()[1:]]
        return any(row[-1].isdigit() and int(row[-1]) < last for row in rows if row)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreUnavailable(f"--kv-cache-dir {path}: {error.strerror or error}; choose another folder") from error


def _read_map_size(path: Path) -> int:
    """Room for what a daemon may add while we read; address space only."""
    return 2 * (path / "data.mdb").stat().st_size + 2**30


def _map_size(path: Path, budget_bytes: int) -> int:
    """The budget in whole pages; or, where the file is larger already, its size and some pages to delete with."""
    file = path / "data.mdb"
    file_bytes = file.stat().st_size if file.exists() else 0
    if file_bytes > budget_bytes:
        log.warning(
            "[disk-cache] %s has %s, more than the budget of %s: entries are evicted, the file keeps its size",
            file,
            format_size(file_bytes),
            format_size(budget_bytes),
        )
    wanted = max(budget_bytes, file_bytes + _DELETE_BYTES if file_bytes > budget_bytes else 0)
    return wanted - wanted % _PAGE_BYTES


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """LMDB's and the file system's errors become ours, at this one place."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreFull(f"{path}: the store is full") from error
    except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.PageNotFoundError) as error:
        raise StoreCorrupt(f"{path}/data.mdb is damaged or no store ({error}); move it away to start afresh") from error
    except struct.error as error:
        raise StoreCorrupt(f"{path}: a record has a wrong length ({error})") from error
    except lmdb.Error as error:
        raise StoreUnavailable(f"--kv-cache-dir {path}: {error}; choose another folder") from error
