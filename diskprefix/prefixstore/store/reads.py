"""The reads of a store: each read has a time limit, and together they show whether the disk answers.

A read of LMDB's map waits for the disk without a limit, and nothing can interrupt it. So a daemon opens its read
transactions here alone, in one of two ways:

* `Reads.snapshot`, on a thread that may hang because all callers that wait for it have their own limits: the thread of
  the writer, and the threads of fetches and of `ask`.
* `Reads.ask`, on any other thread. A thread of this module reads, and the caller waits as long as its `Patience` lasts.

A read that has read nothing for `STALL_S` hangs: the disk does not answer. Until that read goes on, `ask` fails at
once and fetches begin no read, so few threads hang. Commands without a daemon may wait: they use `StoreFile.snapshot`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from diskprefix.errors import DiskStalled
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.thread_pool import ThreadPool

log = logging.getLogger("diskprefix")

T = TypeVar("T")

STALL_S = 10.0
"""A read that has read nothing for this many seconds hangs. A disk that wakes up may take nearly as long."""
LIMIT_S = 8.0
"""Seconds that a request waits for the disk, in all. With the time between its reads, that is less than ten seconds."""
_LOOK_S = 1.0
"""Seconds between two checks whether the disk answers."""
_THREADS = 16
"""The threads of `ask`, which only wait."""


class Patience:
    """The seconds that a request may still wait for the disk. All its reads share them. For any thread."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._left_s = limit_s
        self._lock = threading.Lock()

    @property
    def left_s(self) -> float:
        return max(0.0, self._left_s)

    def spend(self, seconds: float) -> None:
        with self._lock:
            self._left_s -= seconds

    def from_now(self, work: Callable[[], T]) -> Callable[[], T]:
        """Returns `work` for a thread that others need too, and that may wait for the disk with them: the time until
        it begins is spent."""
        asked_at = time.monotonic()

        def begin() -> T:
            self.spend(time.monotonic() - asked_at)
            return work()

        return begin


class _Read:
    """A read transaction that is open or about to be opened."""

    def __init__(self) -> None:
        self._began_at = time.monotonic()
        self.snapshot: Snapshot | None = None
        self.has_hung = False

    @property
    def moved_at(self) -> float:
        return self._began_at if self.snapshot is None else max(self._began_at, self.snapshot.read_at)


class Reads:
    """The read transactions of one process. `open_snapshot` opens one. For any thread."""

    def __init__(self, path: Path, open_snapshot: Callable[[], AbstractContextManager[Snapshot]]) -> None:
        self._path, self._open_snapshot = path, open_snapshot
        self._lock = threading.Lock()
        self._open: set[_Read] = set()
        self._threads = ThreadPool(_THREADS, "disk-reader")
        self._is_stalled = False
        self.num_stalled = 0
        """The number of reads that have hung."""

    @contextmanager
    def snapshot(self) -> Iterator[Snapshot]:
        """Yields a read transaction; see `StoreFile.snapshot`. May wait forever, so it is for threads that nobody waits
        for without a limit."""
        read = _Read()
        with self._lock:
            self._open.add(read)
        try:
            with self._open_snapshot() as read.snapshot:
                yield read.snapshot
        finally:
            # This also counts a read that hung while nobody checked.
            self._look()
            with self._lock:
                self._open.discard(read)
            if self._is_stalled:
                self._look()

    def ask(self, read: Callable[[], T], patience: Patience | None = None) -> T:
        """Runs `read`, which opens snapshots, on a thread that may hang, and returns its result. Waits as long as the
        `patience` of a request allows; without one, as long as the disk answers.

        Raises what `read` raises, and `DiskStalled`; then the read may still run, and its result is lost.
        """
        began, answer = time.monotonic(), self._submit_read(read, patience)
        try:
            # Bound: ends when the patience ends, or once a read has not moved for `STALL_S`.
            while wait([answer], _LOOK_S if patience is None else patience.left_s).not_done:
                if patience is not None or self.stalled is not None:
                    answer.cancel()
                    if patience is not None:
                        # By the clock, a timed wait may end a moment early: nothing may wait for that moment.
                        patience.spend(patience.left_s)
                    raise self._too_slow()
            return answer.result()
        finally:
            if patience is not None:
                patience.spend(time.monotonic() - began)

    def _submit_read(self, read: Callable[[], T], patience: Patience | None) -> Future[T]:
        if (stalled := self.stalled) is not None:
            raise DiskStalled(stalled)
        if patience is not None and not patience.left_s:
            raise self._too_slow()
        return self._threads.submit(read)

    @property
    def stalled(self) -> str | None:
        """The error text while the disk does not answer, None if it does. Logs each change."""
        waited_s = self._look()
        if not waited_s:
            return None
        return (
            f"the disk of --kv-cache-dir {self._path} has not answered for {waited_s:.0f} s: "
            "prompts are computed, and nothing is read until it answers"
        )

    def close(self) -> None:
        """Accepts no more reads of `ask`. Does not wait for reads that hang."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> float:
        """Returns the seconds since the longest-hanging read last moved; 0 if none hangs."""
        now = time.monotonic()
        with self._lock:
            hanging = [read for read in self._open if now - read.moved_at > STALL_S]
            self.num_stalled += sum(not read.has_hung for read in hanging)
            for read in hanging:
                read.has_hung = True
            has_changed, self._is_stalled = bool(hanging) != self._is_stalled, bool(hanging)
        waited_s = max((now - read.moved_at for read in hanging), default=0.0)
        if has_changed and hanging:
            log.error("[disk-cache] the disk of %s has not answered for %.0f s: nothing is read", self._path, waited_s)
        elif has_changed:
            log.info("[disk-cache] the disk answers again")
        return waited_s

    def _too_slow(self) -> DiskStalled:
        return DiskStalled(f"the disk of --kv-cache-dir {self._path} did not answer in time; try again")
