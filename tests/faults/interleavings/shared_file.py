"""Several simulated processes on one LMDB file.

LMDB may open a file once in a process, and all processes of a history live in one. So they share one environment for
each file (inode), and each has its own view of it: its readers are its own, and closing it closes nothing for others.
Locks of the folder (flock) belong to file descriptions, so they are the kernel's.

A file that was replaced and the one in its place are two. What is not simulated: LMDB's lock file, which forgets the
readers of a killed process, and maps of different sizes.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diskprefix.prefixstore.store.lmdb_engine import open_lmdb
from tests.faults.interleavings import threads
from tests.faults.interleavings.threads import SimulatedLock, scheduler


@dataclass
class _File:
    """The environment of one file. `writing` is in the place of LMDB's lock between writers."""

    env: Any
    writing: SimulatedLock = field(default_factory=SimulatedLock)
    databases: dict[bytes, Any] = field(default_factory=dict)
    opened: dict[bytes, Any] = field(default_factory=dict)
    """The databases that the running write transaction has opened. LMDB closes them again if it is rolled back."""
    num_users: int = 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Takes the lock between writers for the block, which commits a transaction, or raises what rolls it back."""
        self.writing.acquire()
        try:
            yield
            self.databases |= self.opened
        finally:
            self.opened.clear()
            self.writing.release()


_files: dict[tuple[int, int], _File] = {}
_map_bytes = [0]


def reset(map_bytes: int) -> None:
    assert not _files
    _map_bytes[:] = [map_bytes]


def wake_writers() -> None:
    """Has all look again that wait for a writer: the one that was woken may have been killed."""
    for file in _files.values():
        while file.writing._waiting:
            threads.wake_one(file.writing._waiting)


class SharedEnvironment:
    """What a simulated process has in the place of `lmdb.Environment`."""

    def __init__(self, place: tuple[int, int]) -> None:
        self._place, self.file, self.is_closed = place, _files[place], False
        self.file.num_users += 1

    def open_db(self, name: bytes, *, txn: Any, create: bool) -> Any:
        file = self.file
        if name not in file.databases and txn is not None:
            file.opened[name] = file.env.open_db(name, txn=txn, create=create)
            return file.opened[name]
        if name not in file.databases:
            # One that only reads. The Python package begins a write transaction, as this environment is for both: it
            # resets a transaction that reads instead of committing it, and LMDB closes what that has opened.
            with file.changing():
                file.opened[name] = file.env.open_db(name, create=create)
        return file.databases[name]

    def close(self) -> None:
        self.is_closed = True
        self.file.num_users -= 1
        if not self.file.num_users:
            del _files[self._place]
            self.file.env.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file.env, name)


def opened(path: Path, *, readonly: bool, **options: Any) -> Any:
    """In the place of `open_lmdb`."""
    if not threads.is_simulated():
        return open_lmdb(path, readonly=readonly, **options)
    scheduler().point()
    data = path / "data.mdb"
    if not readonly:
        data.touch(0o600)
    place = (data.stat().st_dev, data.stat().st_ino)
    if place not in _files:
        shared = {"map_size": _map_bytes[0], "lock": True}
        _files[place] = _File(open_lmdb(path, **options | shared))
    return SharedEnvironment(place)


def flock(fd: int, operation: int) -> None:
    """In the place of `fcntl.flock`: who waits is a task."""
    while threads.is_simulated():
        scheduler().point()
        try:
            return fcntl.flock(fd, operation | fcntl.LOCK_NB)
        except BlockingIOError:
            if operation & fcntl.LOCK_NB:
                raise
        scheduler().block(0.01)
    return fcntl.flock(fd, operation)
