"""Counts of what the cache did for each model and tenant, in all and by day, and the last hits.

They are kept in the store as a note of each root. The writing thread writes them with the uses of nodes, at least once
a second, so a kill loses no more than that. Several processes may add to one record.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import date
from functools import partial

import msgspec

from diskprefix.errors import StoreCorrupt
from diskprefix.store.changes import Changes, Part
from diskprefix.store.note_record import NoteKind, NoteTimes, decode_note, encode_note, note_bytes, note_key
from diskprefix.store.schema import RootRecord, decode_record, encode_record
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store_file import StoreFile
from diskprefix.store.store_identity import Epoch, epoch_of

_DAYS, _RECENT_HITS = 30, 256
_TTL_S = 400 * 86400
_REMOVED = "removed_savings"
"""The key of the counts of roots that were removed to make room."""


class Tally(msgspec.Struct, kw_only=True):
    """Counts of requests that asked the cache. `saved_s` is the time that computing `restored_tokens` took when they
    were computed, less the time that restoring them took, in seconds."""

    requests: int = 0
    prompt_tokens: int = 0
    restored_tokens: int = 0
    saved_s: float = 0.0

    def add(self, other: Tally) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def restored_share(self) -> float:
        """The part of the prompt tokens that was restored, from 0 to 1."""
        return self.restored_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class RecentHit(msgspec.Struct, array_like=True, frozen=True):
    """A request that restored something: when (seconds since the epoch), the last full block that it restored, and the
    number of tokens."""

    when: float
    block: bytes
    num_tokens: int


class Savings(msgspec.Struct, kw_only=True):
    """The counts of one root. `days` has them by the ordinal of the local date (`datetime.date.toordinal`). `hits` are
    the last ones, oldest first."""

    since: float
    total: Tally = msgspec.field(default_factory=Tally)
    days: dict[int, Tally] = msgspec.field(default_factory=dict)
    hits: list[RecentHit] = msgspec.field(default_factory=list)

    def today(self, now: float) -> Tally:
        return self.days.get(day_of(now), Tally())

    def add(self, other: Savings) -> None:
        self.since = min(self.since, other.since)
        self.total.add(other.total)
        for day, tally in other.days.items():
            self.days.setdefault(day, Tally()).add(tally)
        self.days = dict(sorted(self.days.items())[-_DAYS:])
        self.hits = sorted([*self.hits, *other.hits], key=lambda hit: hit.when)[-_RECENT_HITS:]


def read_savings(snapshot: Snapshot) -> dict[bytes, Savings]:
    """Returns the counts of each root as far as they are in the store. A damaged record is left out."""
    return {root: found for root in snapshot.keys("roots") if (found := savings_of(snapshot, root)) is not None}


def keep_counts(changes: Changes, roots: Iterable[bytes]) -> None:
    """Adds what the cache did for roots, which are about to be removed, to the counts of those that were removed
    before."""
    total = _read_removed(changes)
    for root in roots:
        if (one := savings_of(changes, root)) is not None:
            total.add(one)
    total.hits = []
    changes.put_meta(_REMOVED, encode_record(_REMOVED.encode(), total))


def _read_removed(snapshot: Snapshot) -> Savings:
    try:
        return decode_record(Savings, _REMOVED.encode(), snapshot.meta(_REMOVED) or b"")
    except StoreCorrupt:
        return Savings(since=float("inf"))


def put_savings(changes: Changes, root: bytes, savings: Savings, now: float) -> None:
    """Stores the counts of a root, replacing those before."""
    key = _key(root)
    changes.put_note(key, encode_note(key, msgspec.msgpack.encode(savings), NoteTimes(now, now, _TTL_S)))


def total_savings(snapshot: Snapshot) -> Savings:
    """Returns the counts of all roots together, also of those that were removed to make room. `since` is infinite if
    there are none."""
    total = _read_removed(snapshot)
    for one in read_savings(snapshot).values():
        total.add(one)
    return total


def savings_of(snapshot: Snapshot, root: bytes) -> Savings | None:
    """Returns the counts of a root, None if there are none or they are damaged."""
    value = snapshot.record("notes", _key(root))
    try:
        return None if value is None else msgspec.msgpack.decode(decode_note(_key(root), value)[1], type=Savings)
    except (StoreCorrupt, msgspec.DecodeError):
        return None


def _key(root: bytes) -> bytes:
    return note_key(root, NoteKind.SAVINGS, "")


def day_of(now: float) -> int:
    """Returns the ordinal of the local date at a time in seconds since the epoch."""
    return date.fromtimestamp(now).toordinal()


_MAX_WAITING = 1024
"""Roots whose counts wait to be written. A store that fails for long may not take more and more memory."""


class SavingsLog:
    """The counts of this process that are not in the store yet. `record` and `total` are for any thread, the others for
    the writing thread alone."""

    def __init__(self, store: StoreFile) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """Held while counts are on their way to the store. A reader would find them in neither place."""
        self._waiting: dict[tuple[Epoch, bytes], tuple[RootRecord, Savings]] = {}
        """By the epoch in which the requests began, and the root."""
        self.saved_s = 0.0
        """Seconds of computing that restores saved since the start of this process."""

    def record(self, epoch: Epoch, root: bytes, record: RootRecord, counts: Tally, block: bytes | None) -> None:
        """Counts a request that began in `epoch`. `block` is the last full block that it restored, None if it restored
        none."""
        now = self._store.clock()
        hits = [RecentHit(now, block, counts.restored_tokens)] if block is not None else []
        with self._lock:
            self.saved_s += counts.saved_s
            if (epoch, root) in self._waiting or len(self._waiting) < _MAX_WAITING:
                _, waiting = self._waiting.setdefault((epoch, root), (record, Savings(since=now)))
                waiting.add(Savings(since=now, total=counts, days={day_of(now): counts}, hits=hits))

    def total(self) -> Savings:
        """Returns `total_savings` with the counts of this process that are not written yet. Raises `CacheError`."""
        with ExitStack() as reading:
            with self._writing, self._lock:
                snapshot = reading.enter_context(self._store.snapshot())
                waiting = [msgspec.msgpack.encode(new) for _, new in self._waiting.values()]
            # The writer does not wait for the sum.
            total = total_savings(snapshot)
        for new in waiting:
            total.add(msgspec.msgpack.decode(new, type=Savings))
        return total

    @contextmanager
    def writing(self) -> Iterator[Part | None]:
        """Yields the waiting counts, to be put into the store; None if there are none. With an error they wait on."""
        if not self._waiting:
            yield None
            return
        with self._writing:
            with self._lock:
                waiting, self._waiting = self._waiting, {}
            try:
                yield Part(len(waiting) * note_bytes(1 << 13), partial(self._add, waiting))
            except BaseException:
                with self._lock:
                    for key, (record, new) in self._waiting.items():
                        waiting.setdefault(key, (record, Savings(since=new.since)))[1].add(new)
                    self._waiting = waiting
                raise

    def _add(self, waiting: Mapping[tuple[Epoch, bytes], tuple[RootRecord, Savings]], changes: Changes) -> None:
        now = epoch_of(changes, self._store.names)
        for (epoch, root), (record, new) in waiting.items():
            if epoch != now:
                if not changes.has_record("roots", root):
                    # All of this root was purged.
                    continue
                new.hits = []
            changes.put_root(root, record)
            stored = savings_of(changes, root) or Savings(since=new.since)
            stored.add(new)
            put_savings(changes, root, stored, changes.now)


def forget_hits(store: StoreFile) -> None:
    """Removes the names of blocks that are not stored any more from the last hits. Raises `CacheError`."""
    with store.snapshot() as snapshot:
        roots = [root for root, found in read_savings(snapshot).items() if _stored_hits(snapshot, found) != found.hits]
    for root in roots:
        with store.changes() as changes:
            if (found := savings_of(changes, root)) is not None:
                found.hits = _stored_hits(changes, found)
                put_savings(changes, root, found, store.clock())


def _stored_hits(snapshot: Snapshot, savings: Savings) -> list[RecentHit]:
    return [hit for hit in savings.hits if snapshot.usage(hit.block) is not None]
