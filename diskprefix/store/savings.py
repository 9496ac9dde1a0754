"""What the cache did for each model and tenant: counts of all time and of each day, and the last hits.

They are kept in the store as a note of each root. The writing thread writes them with the uses of nodes, at least once
a second: a kill loses no more than that. Several processes may add to one record.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date

import msgspec

from diskprefix.errors import StoreCorrupt
from diskprefix.store.changes import Changes
from diskprefix.store.note_record import NoteKind, NoteTimes, decode_note, encode_note, note_key
from diskprefix.store.schema import decode_record, encode_record
from diskprefix.store.snapshot import Snapshot

_DAYS, _RECENT_HITS = 30, 256
_TTL_S = 400 * 86400
_REMOVED = "removed_savings"
"""The key of the counts of roots that were removed to make room."""


class Tally(msgspec.Struct, kw_only=True):
    """Counts of requests that asked the cache. `saved_s` is the time that computing `restored_tokens` took when they
    were computed, less the time that restoring them took, in seconds."""

    requests: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    restored_tokens: int = 0
    saved_s: float = 0.0

    def add(self, other: Tally) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def hit_rate(self) -> float:
        """The part of the requests that restored something, from 0 to 1."""
        return self.hits / self.requests if self.requests else 0.0


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
    """Add what the cache did for roots, which are about to be removed, to the counts of those that were removed
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
    """Store the counts of a root in the place of those before."""
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
