"""The counts of a process on their way to the store, and hits that are to be forgotten."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from diskprefix.store.note_record import note_bytes
from diskprefix.store.savings import (
    RecentHit,
    Savings,
    Tally,
    day_of,
    put_savings,
    read_savings,
    savings_of,
    total_savings,
)
from diskprefix.store.schema import RootRecord
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Store

_MOST_WAITING = 1024
"""Roots whose counts wait to be written. A store that fails for long may not take more and more memory."""


class SavingsLog:
    """The counts of this process that are not in the store yet. `note` and `total` are for any thread; `write` is for
    the writing thread alone."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """Held while counts are on their way to the store: whoever reads would find them in neither place."""
        self._waiting: dict[bytes, tuple[RootRecord, Savings]] = {}
        self.saved_s = 0.0
        """What was saved since the start of this process, in seconds."""

    def note(self, root: bytes, record: RootRecord, counts: Tally, block: bytes | None) -> None:
        """Count a request. `block` is the last full block that it restored, None if it restored none."""
        now = self._store.clock()
        hits = [RecentHit(now, block, counts.restored_tokens)] if block is not None else []
        new = Savings(since=now, days={day_of(now): counts}, hits=hits)
        new.total.add(counts)
        with self._lock:
            self.saved_s += counts.saved_s
            if root in self._waiting:
                self._waiting[root][1].add(new)
            elif len(self._waiting) < _MOST_WAITING:
                self._waiting[root] = record, new

    def total(self) -> Savings:
        """Returns `total_savings` with the counts of this process that are not written yet. Raises `CacheError`."""
        with self._writing, self._store.snapshot() as snapshot:
            total = total_savings(snapshot)
            with self._lock:
                for _, new in self._waiting.values():
                    total.add(new)
        return total

    def write(self) -> None:
        """Add what waits to the store. Raises `CacheError`."""
        if not self._waiting:
            return
        with self._writing:
            with self._lock:
                waiting, self._waiting = self._waiting, {}
            try:
                self._add(waiting)
            except BaseException:
                with self._lock:
                    for root, (record, new) in self._waiting.items():
                        waiting.setdefault(root, (record, Savings(since=new.since)))[1].add(new)
                    self._waiting = waiting
                raise

    def _add(self, waiting: Mapping[bytes, tuple[RootRecord, Savings]]) -> None:
        now = self._store.clock()
        self._store.evictor.make_room(len(waiting) * note_bytes(1 << 13), frozenset())
        with self._store.changes() as changes:
            for root, (record, new) in waiting.items():
                changes.put_root(root, record)
                stored = savings_of(changes, root) or Savings(since=new.since)
                stored.add(new)
                put_savings(changes, root, stored, now)


def forget_hits(store: Store) -> None:
    """Remove the names of blocks that are not stored any more from the last hits. Raises `CacheError`."""
    with store.snapshot() as snapshot:
        roots = [root for root, found in read_savings(snapshot).items() if _stored_hits(snapshot, found) != found.hits]
    for root in roots:
        with store.changes() as changes:
            if (found := savings_of(changes, root)) is not None:
                found.hits = _stored_hits(changes, found)
                put_savings(changes, root, found, store.clock())


def _stored_hits(snapshot: Snapshot, savings: Savings) -> list[RecentHit]:
    return [hit for hit in savings.hits if snapshot.usage(hit.block) is not None]
