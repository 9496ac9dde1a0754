"""Counts of restored tokens and saved time for each model and tenant, in all and by day, and of tokens that were
computed again.

A note of each root keeps the counts. The writing thread writes them with the uses of nodes, at least once a second, so
a kill loses no more. Several processes may add to one note.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import date
from functools import partial

import msgspec

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.changes import Changes, SmallWrite
from diskprefix.prefixstore.store.epochs import Epoch, epochs_of
from diskprefix.prefixstore.store.note_record import NoteKind, NoteTimes, decode_note, encode_note, note_bytes, note_key
from diskprefix.prefixstore.store.schema import RootRecord, decode_record, encode_record
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics.lost_tokens import LostTokens, joined
from diskprefix.prefixstore.store.store_file import StoreFile

_DAYS = 30
_MAX_WAITING = 1024
"""Limit for the roots whose counts wait while the store fails."""
_TTL_S = 400 * 86400
_REMOVED = "removed_savings"
"""The key in `meta` of the counts of roots that were removed to make room."""


class Tally(msgspec.Struct, kw_only=True):
    """Counts of requests that asked the cache. `saved_s`: the seconds that computing `restored_tokens` took once, less
    the seconds that restoring them took."""

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


class Savings(msgspec.Struct, kw_only=True):
    """The counts of one root. The keys of `days` are ordinals of local dates (`datetime.date.toordinal`). `lost` are
    the tokens of the last day that were computed again."""

    since: float
    total: Tally = msgspec.field(default_factory=Tally)
    days: dict[int, Tally] = msgspec.field(default_factory=dict)
    lost: list[LostTokens] = msgspec.field(default_factory=list)

    def today(self, now: float) -> Tally:
        return self.days.get(day_of(now), Tally())

    def add(self, other: Savings) -> None:
        self.since = min(self.since, other.since)
        self.total.add(other.total)
        for day, tally in other.days.items():
            self.days.setdefault(day, Tally()).add(tally)
        self.days = dict(sorted(self.days.items())[-_DAYS:])
        self.lost = joined([*self.lost, *other.lost])


def read_savings(snapshot: Snapshot) -> dict[bytes, Savings]:
    """Returns the counts of each root in the store. Leaves out damaged records."""
    return dict(_each_savings(snapshot))


def _each_savings(snapshot: Snapshot) -> Iterator[tuple[bytes, Savings]]:
    for root in snapshot.keys("roots"):
        if (savings := savings_of(snapshot, root)) is not None:
            yield root, savings


def keep_counts(changes: Changes, roots: Iterable[bytes]) -> None:
    """Adds the counts of roots that are about to be removed to the counts of the roots that were removed before."""
    total = _read_removed(changes)
    for root in roots:
        if (savings := savings_of(changes, root)) is not None:
            total.add(savings)
    total.lost = []
    changes.put_meta(_REMOVED, encode_record(_REMOVED.encode(), total))


def _read_removed(snapshot: Snapshot) -> Savings:
    try:
        return decode_record(Savings, _REMOVED.encode(), snapshot.meta(_REMOVED) or b"")
    except StoreCorrupt:
        return Savings(since=float("inf"))


def put_savings(changes: Changes, root: bytes, savings: Savings, now: float) -> None:
    """Stores the counts of a root. Replaces earlier counts."""
    key = _key(root)
    changes.put_note(key, encode_note(key, msgspec.msgpack.encode(savings), NoteTimes(now, now, _TTL_S)))


def total_savings(snapshot: Snapshot) -> Savings:
    """Returns the sum of the counts of all roots, including roots that were removed to make room. `since` is infinite
    if there are no counts."""
    total = _read_removed(snapshot)
    for _, savings in _each_savings(snapshot):
        total.add(savings)
    return total


def savings_of(snapshot: Snapshot, root: bytes) -> Savings | None:
    """Returns the counts of a root, None if there are none or they are damaged."""
    key = _key(root)
    try:
        value = snapshot.get_record("notes", key)
        return None if value is None else msgspec.msgpack.decode(decode_note(key, value)[1], type=Savings)
    except (StoreCorrupt, msgspec.DecodeError):
        return None


def _key(root: bytes) -> bytes:
    return note_key(root, NoteKind.SAVINGS, "")


def day_of(now: float) -> int:
    """Returns the ordinal of the local date at a time in seconds since the epoch."""
    return date.fromtimestamp(now).toordinal()


class SavingsLog:
    """The counts of this process that are not in the store yet. `record_request` and `total` are for any thread,
    `writing` is for the writing thread alone."""

    def __init__(self, store: StoreFile) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """Held while counts move from memory to the store; a reader would miss them then."""
        self._waiting: dict[tuple[Epoch, bytes], tuple[RootRecord, Savings]] = {}
        """By the epoch in which the requests began, and the root."""
        self.saved_s = 0.0
        """Seconds of computing that restores have saved since the start of this process."""

    def record_request(
        self, epoch: Epoch, root: bytes, record: RootRecord, counts: Tally, lost: Sequence[LostTokens] = ()
    ) -> None:
        """Counts a request that began in `epoch`, and the tokens that it computed again."""
        assert epoch.tenant == record.tenant, "the epoch is that of another tenant"
        now = self._store.clock()
        with self._lock:
            self.saved_s += counts.saved_s
            if (epoch, root) in self._waiting or len(self._waiting) < _MAX_WAITING:
                _, waiting = self._waiting.setdefault((epoch, root), (record, Savings(since=now)))
                days = {day_of(now): counts}
                waiting.add(Savings(since=now, total=counts, days=days, lost=[*lost]))

    def total(self) -> Savings:
        """Returns `total_savings` with the counts of this process that are not written yet. Raises `CacheError`."""
        with ExitStack() as reading:
            with self._writing:
                # `record_request` does not wait for the disk. Counts that it adds meanwhile are not in the snapshot.
                snapshot = reading.enter_context(self._store.reads.snapshot())
                with self._lock:
                    waiting = [msgspec.msgpack.encode(new) for _, new in self._waiting.values()]
            # The locks are released here, so that the writer does not wait for the sum.
            total = total_savings(snapshot)
        for new in waiting:
            total.add(msgspec.msgpack.decode(new, type=Savings))
        return total

    @contextmanager
    def writing(self) -> Iterator[SmallWrite | None]:
        """Yields the write of the waiting counts, None if there are none. If the block raises, the counts continue to
        wait."""
        if not self._waiting:
            yield None
            return
        with self._writing:
            with self._lock:
                waiting, self._waiting = self._waiting, {}
            try:
                yield SmallWrite(len(waiting) * note_bytes(1 << 13), partial(self._add_waiting, waiting))
            except BaseException:
                with self._lock:
                    for key, (record, new) in self._waiting.items():
                        waiting.setdefault(key, (record, Savings(since=new.since)))[1].add(new)
                    self._waiting = waiting
                raise

    def _add_waiting(self, waiting: Mapping[tuple[Epoch, bytes], tuple[RootRecord, Savings]], changes: Changes) -> None:
        epochs = epochs_of(changes, self._store.names)
        for (epoch, root), (record, new) in waiting.items():
            if epochs.is_over(epoch):
                if not changes.has_record("roots", root):
                    # Everything under this root was purged.
                    continue
                new.lost = []
            changes.put_root(root, record)
            stored = savings_of(changes, root) or Savings(since=new.since)
            stored.add(new)
            put_savings(changes, root, stored, changes.now)


def forget_lines(store: StoreFile, of_roots: Container[bytes]) -> None:
    """Removes the lines of prompts under these roots, for a purge. Raises `CacheError`."""
    with store.reads.snapshot() as snapshot:
        roots = [root for root, savings in _each_savings(snapshot) if any(row.line for row in savings.lost)]
    roots = [root for root in roots if root in of_roots]
    for root in roots:
        with store.changes() as changes:
            if (savings := savings_of(changes, root)) is not None:
                savings.lost = [row for row in savings.lost if not row.line]
                put_savings(changes, root, savings, store.clock())
