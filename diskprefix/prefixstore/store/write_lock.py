"""Reports which process writes to the store, and how long a write of this process has waited for that process.

LMDB lets one process write at a time, with a lock that has no time limit and names no process: a process that is
suspended inside a write transaction stops all others. So while its transaction lasts, a writer marks the file with a
shared lock on one byte, which keeps no process out. The kernel knows the process that holds this lock, and releases the
lock when the process ends.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from diskprefix.prefixstore.store.folder import OnWait
from diskprefix.prefixstore.store.processes import described, is_suspended
from diskprefix.thread_pool import start_helper

log = logging.getLogger("diskprefix")

_COMMAND_PATIENCE_S = 2.0
"""A command, and a daemon that starts, report a wait after this time."""
_WRITE_S = 30.0
"""A write of this process takes seconds, even on a slow disk. A write that takes longer than this hangs in the disk."""
_POLL_S = 0.01
# struct flock: l_type, l_whence, l_start, l_len, l_pid, where type and whence come last on macOS.
_IS_MAC = sys.platform == "darwin"
_FLOCK = struct.Struct("qqihh" if _IS_MAC else "hhqqi4x")

_Begun = TypeVar("_Begun")


class WriteLock:
    """LMDB's lock between writers, for one environment. For any thread.

    `patience_s` is the time after which a wait is reported: once in the log, to `on_wait`, and by `stalled`.
    """

    def __init__(self, path: Path, fd: int, on_wait: OnWait | None) -> None:
        """`fd` is the open data file of the store in folder `path`."""
        self.patience_s = _COMMAND_PATIENCE_S
        self.on_wait = on_wait
        self._path, self._fd = path, fd
        self._writing_since: float | None = None
        """When the open transaction of this process began."""
        self._waiting: dict[int, float] = {}
        """The ids of the waiting threads, and the times at which their waits began."""

    @property
    def waited_s(self) -> float:
        """The seconds that the longest-waiting write of this process has waited; 0 if none waits."""
        began_at = min(list(self._waiting.values()), default=None)
        return 0.0 if began_at is None else time.monotonic() - began_at

    @property
    def writing_s(self) -> float:
        """The seconds since the open transaction of this process began; 0 if none is open."""
        since = self._writing_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def stalled(self) -> str | None:
        """The reason why nothing is written, if a write has waited for `patience_s`, or if the disk does not finish
        one."""
        if (seconds := self.writing_s) > _WRITE_S:
            return f"--kv-cache-dir {self._path}: the disk has not finished a write for {seconds:.0f} s"
        return None if self.waited_s < self.patience_s else self._message()

    def begin_write(self, begin: Callable[[], _Begun], last_commit: Callable[[], int]) -> _Begun:
        """Returns the transaction of `begin`, which waits for LMDB's lock. `last_commit` returns the number of the
        file's last commit.

        While another process writes, the main thread waits here and not in LMDB, where Ctrl+C would have no effect. But
        once that process has committed, the main thread waits in LMDB; otherwise a process that writes again and again
        could keep it waiting forever.
        """
        thread = threading.get_ident()
        self._waiting[thread] = time.monotonic()
        try:
            if self._writing_since is None and self._holder() is None:
                begun = begin()
            else:
                with self._reported():
                    if threading.current_thread() is threading.main_thread():
                        self._wait_for_commit(last_commit)
                    begun = begin()
        finally:
            del self._waiting[thread]
        self._writing_since = time.monotonic()
        # Some file systems have no locks. Then no process is named.
        with suppress(OSError):
            fcntl.lockf(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)
        return begun

    def give_back(self) -> None:
        """Removes the mark. Call it when the transaction has ended."""
        self._writing_since = None
        with suppress(OSError):
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1)

    def _wait_for_commit(self, last_commit: Callable[[], int]) -> None:
        before = last_commit()
        # Bound: the other process's write, which the caller reports and the user may end.
        while (self._writing_since is not None or self._holder() is not None) and last_commit() == before:
            time.sleep(_POLL_S)

    def _holder(self) -> int | None:
        """Returns the id of the other process that writes, 0 if it is in another container, None if no writer is
        known."""
        wanted = fcntl.F_WRLCK, os.SEEK_SET
        asked = (0, 1, 0, *wanted) if _IS_MAC else (*wanted, 0, 1, 0)
        try:
            answer = _FLOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_GETLK, _FLOCK.pack(*asked)))
        except OSError:
            return None
        kind, pid = (answer[3], answer[2]) if _IS_MAC else (answer[0], answer[4])
        # On macOS, -1 stands for a lock of `flock`, which every process has that opened the file.
        return None if kind == fcntl.F_UNLCK or pid < 0 else int(pid)

    def _message(self) -> str:
        """Returns the message that says what a write waits for."""
        is_own = self._writing_since is not None
        holder = 0 if is_own else self._holder() or 0
        if is_own:
            who = "another write of this process does not end"
        else:
            who = f"{described(holder)} writes to it and does not end"
        cure = f"; end that process, or resume it (kill -CONT {holder})" if is_suspended(holder) else ""
        return f"--kv-cache-dir {self._path}: nothing can be saved, because {who}{cure}"

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Reports the wait if the block takes long."""
        has_ended = threading.Event()
        start_helper(partial(self._report, has_ended, self.patience_s), "write-wait")
        try:
            yield
        finally:
            has_ended.set()

    def _report(self, has_ended: threading.Event, patience_s: float) -> None:
        began_at = time.monotonic()
        if has_ended.wait(patience_s):
            return
        message = self._message()
        log.warning("[disk-cache] a write has waited %.0f s: %s", patience_s, message)
        if self.on_wait is not None:
            self.on_wait(message)
        has_ended.wait()
        log.info("[disk-cache] writing again after %.0f s", time.monotonic() - began_at)
