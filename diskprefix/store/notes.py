"""Notes while a process uses them: they are visible at once, and the writing thread writes them soon after.

A note that cannot be written stays in memory and is tried again, within a bound. `put` and `get` never fail. A kill
loses the notes of the last moments. For the format see `note_record`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from diskprefix.errors import CacheError, StoreCorrupt
from diskprefix.store.changes import RECORDS_AT_ONCE, Changes, Part, batches
from diskprefix.store.note_record import (
    MAX_NOTE_BYTES,
    NO_PROMPT,
    SHORT_TTL_S,
    NoteKind,
    NotePrompt,
    NoteTimes,
    decode_note,
    encode_note,
    note_bytes,
    note_key,
    note_limit,
    root_limit,
    sizes_by_root,
    surplus_notes,
)
from diskprefix.store.schema import RootRecord
from diskprefix.store.store import Store
from diskprefix.tokens import HASH_BYTES, TokenIds, prompt_digest

log = logging.getLogger("diskprefix")

_MAX_WAITING_BYTES = 32 << 20


class Notes:
    """All notes of a store. `put`, `get` and `delete` are for any thread, and do not raise. `put` compresses, and does
    not wait for the disk; the others may wait for it, so they are not for an event loop or the engine's thread.
    `write`, `writing` and `make_fit` are for the writing thread alone."""

    def __init__(self, store: Store, wake: Callable[[], None]) -> None:
        """`wake` is called when there is something to write."""
        self._store = store
        self._wake = wake
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._waiting: dict[bytes, bytes | None] = {}
        """Encoded notes that are not in the store yet; None for one that is to be deleted."""
        self.waiting_bytes = 0
        """The size of the notes that are not in the store yet."""
        self._roots: dict[bytes, RootRecord] = {}
        """The root records of the notes that wait."""
        self._used: dict[bytes, float] = {}
        """Times of the last use of notes by this process, by key."""
        self._to_record: set[bytes] = set()
        """Keys of notes whose recorded last use is outdated; see `NoteTimes.is_outdated`."""
        self._is_new = self._is_being_written = False
        self._not_counted: dict[bytes, int] = {}
        """What notes take that were written since the last `make_fit`, by key."""
        self._sizes: Counter[bytes] = Counter()
        """About what the notes of each root take, since they were last counted."""
        self.dropped = 0

    @property
    def is_waiting(self) -> bool:
        """Returns whether some note has not been tried to be written yet, or is being written."""
        return self._is_new or self._is_being_written

    def put(
        self,
        root: bytes,
        record: RootRecord,
        kind: NoteKind,
        id_: str,
        content: bytes,
        ttl_s: float,
        prompt: TokenIds | None = None,
    ) -> bool:
        """Keeps a note, replacing one with the same kind and id. It is deleted with the `prompt` that it came from.
        Returns False if it is too large, or if the store fails and too much waits already."""
        key, now = note_key(root, kind, id_), self._store.clock()
        times = NoteTimes(now, now, max(1, min(round(ttl_s), 2**31 - 1)))
        came_from = NO_PROMPT
        if prompt is not None:
            came_from = NotePrompt(len(prompt), prompt_digest(self._store.secret, root, prompt))
        value = encode_note(key, content, times, came_from) if len(content) <= MAX_NOTE_BYTES else b""
        fits = bool(value) and note_bytes(len(value)) <= note_limit(self._store.budget_bytes)
        self._store.evictor.may_have_own_ttls |= times.ttl_s < SHORT_TTL_S
        with self._lock:
            if not fits or self.waiting_bytes + len(value) > _MAX_WAITING_BYTES:
                self.dropped += 1
                return False
            self._roots[root] = record
            self._replace(key, value)
        self._wake()
        return True

    def get(self, root: bytes, kind: int, id_: str) -> bytes | None:
        """Returns the content of a note and counts as a use of it. None if there is none, or if it cannot be read."""
        key, now = note_key(root, kind, id_), self._store.clock()
        try:
            value = self._value(key)
            if value is None:
                return None
            times, content = decode_note(key, value)
        except StoreCorrupt as error:
            log.warning("[disk-cache] a note is damaged and goes: %s", error)
            self._delete(key)
            return None
        except CacheError:
            return None
        if times.is_expired(now):
            return None
        with self._lock:
            self._used[key] = now
            if times.is_outdated(now):
                self._to_record.add(key)
        return content

    def delete(self, root: bytes, kind: NoteKind, id_: str) -> bool:
        """Removes a note. Returns whether there was one that could be read."""
        if self.get(root, kind, id_) is None:
            return False
        self._delete(note_key(root, kind, id_))
        return True

    def settle(self, root: bytes, kind: NoteKind, id_: str, timeout_s: float) -> bool:
        """Waits until what became of a note is on the disk. Returns False if the time runs out first."""
        key = note_key(root, kind, id_)
        with self._written:
            return self._written.wait_for(lambda: key not in self._waiting, timeout_s)

    def write(self) -> None:
        """Writes what waits in one transaction, then makes the notes fit their shares. Raises `CacheError`."""
        self._store.write_from(self.writing)
        self.make_fit()

    @contextmanager
    def writing(self) -> Iterator[Part | None]:
        """Yields what waits, to be put into the store; None if nothing does. With an error it waits on."""
        with self._lock:
            waiting, roots, self._is_new = dict(self._waiting), dict(self._roots), False
            used = {key: self._used[key] for key in self._to_record - waiting.keys()}
            self._to_record = set()
            self._is_being_written = bool(waiting or used)
        sizes = {key: note_bytes(len(value)) for key, value in waiting.items() if value is not None}

        def put(changes: Changes) -> None:
            for root, record in roots.items():
                changes.put_root(root, record)
            for key, value in waiting.items():
                changes.put_note(key, value)
            for key, when in used.items():
                changes.use_note(key, when)

        try:
            yield Part(sum(sizes.values()), put) if self._is_being_written else None
            self._forget(waiting)
            self._not_counted |= sizes
        finally:
            self._is_being_written = False

    def _value(self, key: bytes) -> bytes | None:
        with self._lock:
            if key in self._waiting:
                return self._waiting[key]
        # What was written meanwhile is in a snapshot that is taken now.
        with self._store.snapshot() as snapshot:
            value = snapshot.record("notes", key)
            return None if value is None else bytes(value)

    def _delete(self, key: bytes) -> None:
        with self._lock:
            self._replace(key, None)
        self._wake()

    def _replace(self, key: bytes, value: bytes | None) -> None:
        """The caller holds the lock."""
        if key in self._waiting:
            self.waiting_bytes -= _waiting_size(self._waiting[key])
        self._waiting[key] = value
        self._is_new = True
        self.waiting_bytes += _waiting_size(value)

    def _forget(self, written: dict[bytes, bytes | None]) -> None:
        """Drops what was written from what waits, unless it was replaced meanwhile."""
        with self._lock:
            for key, value in written.items():
                if self._waiting.get(key, b"") is value:
                    self.waiting_bytes -= _waiting_size(self._waiting.pop(key))
            roots = {key[:HASH_BYTES] for key in self._waiting}
            self._roots = {root: record for root, record in self._roots.items() if root in roots}
            self._written.notify_all()

    def make_fit(self) -> None:
        """Removes what exceeds a share. Notes are counted when a root's first one is written, and when a count of this
        process exceeds its share: then those of other processes and those that went meanwhile count too. Raises
        `CacheError`."""
        written, self._not_counted = self._not_counted, {}
        limit = root_limit(self._store.budget_bytes)
        for key, size in written.items():
            self._sizes[key[:HASH_BYTES]] = self._sizes.get(key[:HASH_BYTES], limit) + size
        if not any(self._sizes[key[:HASH_BYTES]] > limit for key in written):
            return
        with self._store.snapshot() as snapshot:
            stored = {note.key: note for note in snapshot.notes()}
        with self._lock:
            self._used = {key: when for key, when in self._used.items() if key in stored}
            notes = [note.used(self._used.get(note.key, 0.0)) for note in stored.values()]
        gone = surplus_notes(notes, self._store.budget_bytes)
        for some in batches(gone, RECORDS_AT_ONCE):
            with self._store.changes() as changes:
                changes.forget_notes(some)
        lost = set(gone)
        self._sizes = sizes_by_root(note for note in notes if note.key not in lost)


def _waiting_size(value: bytes | None) -> int:
    """A deletion waits too."""
    return 1 if value is None else len(value)


@dataclass(frozen=True)
class TenantNotes:
    """The notes of one tenant. See `Notes` for the methods, and for the threads that may call them."""

    notes: Notes
    root: bytes
    record: RootRecord
    ttl_s: float
    """Time to live of the notes that are put, after their last use, in seconds."""

    def put(self, kind: NoteKind, id_: str, content: bytes, prompt: TokenIds | None = None) -> bool:
        return self.notes.put(self.root, self.record, kind, id_, content, self.ttl_s, prompt)

    def get(self, kind: NoteKind, id_: str) -> bytes | None:
        return self.notes.get(self.root, kind, id_)

    def delete(self, kind: NoteKind, id_: str) -> bool:
        return self.notes.delete(self.root, kind, id_)

    def settle(self, kind: NoteKind, id_: str, timeout_s: float) -> bool:
        return self.notes.settle(self.root, kind, id_, timeout_s)
