"""The bytes that were written to a store's file: in all, and in the last 24 hours.

LMDB writes its pages in system calls, and Linux counts their bytes for each thread (`wchar` in `/proc/thread-self/io`).
`write_bytes` there is not suitable: it grows by whole folios, which may be several times as large as the written pages.
If the count cannot be read (on other systems), stored records are counted in whole pages.

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
from diskprefix.prefixstore.store.schema import decode_record
from diskprefix.prefixstore.store.snapshot import Snapshot

WRITTEN = "written"
"""The key of the record in `meta`."""
_HOUR_S = 3600
_HOURS = 24
_KEPT_HOURS = 2 * (_HOURS + 1)
"""Hours in the record. These are more than the hours that count, because some may come from a clock that was wrong."""
_IO = Path("/proc/thread-self/io")


class WrittenBytes(msgspec.Struct, kw_only=True):
    """Bytes that were written: in all (`total`), and by hour (`hours`; the keys are hours since the epoch), in the
    order of their first write.

    `budget_bytes` is `--kv-cache-write-budget` of the last daemon, 0 for none. `recorder` is the process that added to
    the record last, and `recorded_bytes` the bytes that this process has added in all.
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
        # Drops the hours that were added first, not the earliest ones: a clock that is wrong once must not delete the
        # others.
        self.hours = dict(list(self.hours.items())[-_KEPT_HOURS:])

    def last_day(self, now: float) -> int:
        """Returns the bytes of the last 24 hours and of the beginning of the hour before them, so that no 24 hours
        exceed the budget. Hours in the future come from a clock that was wrong; they count for the same time."""
        hour = int(now // _HOUR_S)
        return sum(n for at, n in self.hours.items() if abs(at - hour) <= _HOURS)


def read_written(snapshot: Snapshot) -> WrittenBytes:
    """Returns the record of a store; an empty record if it is damaged."""
    try:
        return decode_record(WrittenBytes, WRITTEN.encode(), snapshot.meta(WRITTEN) or b"")
    except CacheError:
        return WrittenBytes()


class WriteMeter:
    """Counts the bytes that this process has written (`total_bytes`), and how many of them are recorded for certain
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
        """Counts the bytes that this thread writes inside the block. If the kernel's count cannot be read, adds the
        result of `otherwise` at the end instead, unless the block fails."""
        before, if_unread = _written_by_thread(), 0
        try:
            yield
            if_unread = otherwise()
        finally:
            after = _written_by_thread()
            self.count(if_unread if before is None or after is None else after - before)

    def add_to(self, written: WrittenBytes, now: float, recorded_bytes: int) -> WrittenBytes:
        """Adds to a store's record the bytes of this process that it does not include yet, and the budget. Returns the
        record. Pass this meter's `recorded_bytes` as it was *before* the record was read: otherwise bytes recorded in
        between count twice."""
        # The record may be committed already while this meter does not know it yet.
        known = written.recorded_bytes if written.recorder == self._name else recorded_bytes
        in_all = max(known, self.total_bytes)
        written.add(in_all - known, now)
        written.recorder, written.recorded_bytes = self._name, in_all
        if self.budget_bytes is not None:
            written.budget_bytes = self.budget_bytes
        return written


def _written_by_thread() -> int | None:
    """Returns the bytes that this thread has passed to the kernel, None if the count cannot be read."""
    try:
        text = _IO.read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("wchar:")), None)
