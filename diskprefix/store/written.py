"""The bytes that a store's file has cost its disk: in all, and in the last 24 hours.

LMDB writes its pages in system calls, and Linux counts their bytes for each thread (`wchar` in `/proc/thread-self/io`).
`write_bytes` there is no measure: it grows by whole folios, which may be several times as large as the pages in
them. Where the count cannot be read (on other systems), stored records are counted in whole pages.

A process adds its counts to the record of the store with each publication.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from diskprefix.errors import CacheError
from diskprefix.store.schema import decode_record
from diskprefix.store.snapshot import Snapshot

WRITTEN = "written"
"""The key of the record in `meta`."""
_HOUR_S = 3600
_HOURS = 24
_KEPT_HOURS = 2 * (_HOURS + 1)
"""Hours in the record. More than count, as some may be those of a clock that was wrong."""
_IO = Path("/proc/thread-self/io")


class WrittenBytes(msgspec.Struct, kw_only=True):
    """Bytes that were written: in all, and in each of the last hours, by hours since the epoch, oldest first.

    `budget_bytes` is `--kv-cache-write-budget` of the last daemon, 0 for none. `recorder` is the process that added to
    the record last, and `recorded_bytes` what it has added in all.
    """

    total: int = 0
    hours: dict[int, int] = msgspec.field(default_factory=dict)
    budget_bytes: int = 0
    recorder: str = ""
    recorded_bytes: int = 0

    def add(self, num_bytes: int, now: float) -> None:
        hour = int(now // _HOUR_S)
        self.total += num_bytes
        self.hours[hour] = self.hours.get(hour, 0) + num_bytes
        # Not by the clock: if it is wrong once, nothing may be forgotten.
        self.hours = dict(list(self.hours.items())[-_KEPT_HOURS:])

    def last_day(self, now: float) -> int:
        """Returns the bytes of the last 24 hours and of the beginning of the hour before them, so that no 24 hours have
        more than the budget. Hours in the future are those of a clock that was wrong; they count for as long."""
        hour = int(now // _HOUR_S)
        return sum(n for at, n in self.hours.items() if abs(at - hour) <= _HOURS)


def read_written(snapshot: Snapshot) -> WrittenBytes:
    """Returns the record of a store. A damaged one counts as none."""
    try:
        return decode_record(WrittenBytes, WRITTEN.encode(), snapshot.meta(WRITTEN) or b"")
    except CacheError:
        return WrittenBytes()


class WriteMeter:
    """The bytes that this process has written (`total_bytes`), and how many of them are known to be recorded
    (`recorded_bytes`). For any thread.

    `budget_bytes`: see `WrittenBytes`; None in a tool, which has no budget of its own.
    """

    def __init__(self) -> None:
        self.budget_bytes: int | None = None
        self.total_bytes = self.recorded_bytes = 0
        self._name = secrets.token_hex(8)
        self._lock = threading.Lock()

    def count(self, num_bytes: int) -> None:
        with self._lock:
            self.total_bytes += num_bytes

    @contextmanager
    def measure(self, otherwise: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """Counts what this thread writes inside the block. If what the kernel counts cannot be read, counts what
        `otherwise` returns at the end, unless the block fails."""
        before, if_unread = _written_by_thread(), 0
        try:
            yield
            if_unread = otherwise()
        finally:
            after = _written_by_thread()
            self.count(if_unread if before is None or after is None else after - before)

    def add_to(self, written: WrittenBytes, now: float, recorded_bytes: int) -> WrittenBytes:
        """Adds to a store's record what it lacks of this process, and the budget. Returns the record. Pass this meter's
        `recorded_bytes` as it was *before* the record was read: otherwise bytes recorded in between count twice."""
        # The record may be committed already, and this meter not told yet.
        known = written.recorded_bytes if written.recorder == self._name else recorded_bytes
        in_all = max(known, self.total_bytes)
        written.add(in_all - known, now)
        written.recorder, written.recorded_bytes = self._name, in_all
        if self.budget_bytes is not None:
            written.budget_bytes = self.budget_bytes
        return written


def _written_by_thread() -> int | None:
    """Returns the bytes that this thread has handed to the kernel, None where that cannot be read."""
    try:
        text = _IO.read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("wchar:")), None)
