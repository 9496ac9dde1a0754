"""The bytes that a store's file has cost its disk: in all, and in the last 24 hours.

What a thread's write transactions dirty is what Linux counts of it (`write_bytes` in `/proc/thread-self/io`): whole
pages, with copies of B-tree pages and LMDB's meta page, and the zeros of a wipe. Where that is not counted (other
systems, file systems in memory), records are counted in whole pages. The journal of the file system and what the drive
itself writes more are not known here.

The counts of a process go to the store with its publications, so all processes of a store add to one record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from diskprefix.errors import CacheError
from diskprefix.store.schema import decode_record, encode_record
from diskprefix.store.snapshot import Snapshot

WRITTEN = "written"
"""The key of the record in `meta`."""
_HOUR_S = 3600
_HOURS = 24
_IO = Path("/proc/thread-self/io")


class WrittenBytes(msgspec.Struct, kw_only=True):
    """Bytes that were written: all of them, and those of the last hours by the number of the hour since the epoch.
    `budget_bytes` is `--kv-cache-write-budget` of the last daemon, 0 for none."""

    total: int = 0
    hours: dict[int, int] = msgspec.field(default_factory=dict)
    budget_bytes: int = 0

    def add(self, num_bytes: int, now: float) -> None:
        hour = int(now // _HOUR_S)
        self.total += num_bytes
        self.hours = {at: n for at, n in self.hours.items() if abs(at - hour) <= _HOURS}
        self.hours[hour] = self.hours.get(hour, 0) + num_bytes

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


def encode_written(written: WrittenBytes) -> bytes:
    """Returns the record as it is stored."""
    return encode_record(WRITTEN.encode(), written)


class WriteMeter:
    """The bytes that this process has written and not recorded yet (`waiting_bytes`). For any thread.

    `budget_bytes`: see `WrittenBytes`; None in a tool, which has no budget of its own.
    """

    def __init__(self) -> None:
        self.budget_bytes: int | None = None
        self.waiting_bytes = 0
        self._lock = threading.Lock()

    def count(self, num_bytes: int) -> None:
        with self._lock:
            self.waiting_bytes += num_bytes

    @contextmanager
    def measured(self, otherwise: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """Counts what this thread writes inside the block. If the kernel counts nothing, counts what `otherwise`
        returns at the end."""
        before = _written_by_thread()
        try:
            yield
        finally:
            self.count(_written_by_thread() - before or otherwise())

    def added_to(self, written: WrittenBytes, waiting_bytes: int, now: float) -> WrittenBytes:
        """Adds to a store's record what waits to be recorded, and the budget. Returns the record."""
        written.add(waiting_bytes, now)
        if self.budget_bytes is not None:
            written.budget_bytes = self.budget_bytes
        return written


def _written_by_thread() -> int:
    """Returns the bytes that this thread has written, as the kernel counts them; 0 where it does not."""
    try:
        text = _IO.read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("write_bytes:")), 0)
