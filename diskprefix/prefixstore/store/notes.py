"""Notes while a process uses them: they are visible at once, and the writing thread writes them soon after.

A note that cannot be written stays in memory, within a limit, and is tried again. A kill loses the notes that were put
just before it. For the format see `note_record`.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import CacheError, DiskStalled, StoreCorrupt
from diskprefix.fair_cache import FairCache
from diskprefix.identity import identity_of_tenant
from diskprefix.prefixstore.store.changes import RECORDS_AT_ONCE, Changes, SmallWrite, batches
from diskprefix.prefixstore.store.epochs import Epoch, epochs_of
from diskprefix.prefixstore.store.note_record import (
    MAX_NOTE_BYTES,
    SHORT_TTL_S,
    NoteKind,
    NoteTimes,
    StoredNote,
    decode_note,
    encode_note,
    kind_of,
    note_bytes,
    note_key,
    note_limit,
    note_prompt,
    root_limit,
    share_of,
    sizes_by_root,
    surplus_notes,
    total_limit,
)
from diskprefix.prefixstore.store.reads import Patience
from diskprefix.prefixstore.store.schema import ModelRecord, RootRecord
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics.savings import keep_counts
from diskprefix.prefixstore.store.store import Store
from diskprefix.tokens import HASH_BYTES, NO_PROMPT, PromptDigest, TokenIds, root_hash

log = logging.getLogger("diskprefix")

_MAX_WAITING_BYTES = 32 << 20
_WAITING_BYTES = 256
"""The memory of a waiting note besides its content, or of a waiting deletion."""
_MAX_USED, _MAX_ROOTS = 1 << 14, 1 << 12
"""Limits for the remembered uses of notes and sizes of roots. Others are read again."""
_MAX_RECENT, _MAX_RECENT_BYTES = 1 << 14, 16 << 20
"""Limits for the turns that stay in memory after they were put or read."""


class Notes:
    """All notes of a store. `put` and `recent` are for any thread, do not wait for the disk and never raise; `put`
    compresses. `get` and `delete` wait for the disk, as long as the `patience` of a request allows, so they must not be
    called on an event loop or the engine's thread. `write`, `writing` and `make_fit` are for the writing thread alone.

    Turns of conversations that were put or read recently stay in memory: an agent asks for all its turns with each
    request. Other notes do not stay, because another process may delete them one by one."""

    def __init__(self, store: Store, wake: Callable[[], None]) -> None:
        """`wake` is called when there is something to write."""
        self._store = store
        self._wake = wake
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._waiting: dict[bytes, _Waiting] = {}
        """The notes that are not in the store yet, by key."""
        self.waiting_bytes = 0
        self._roots: dict[bytes, RootRecord] = {}
        """The root records of the waiting notes."""
        self._used: OrderedDict[bytes, float] = OrderedDict()
        """The time of the last use of each note by this process, the latest last."""
        self._recent = FairCache[bytes, tuple[Epoch, bytes]](_MAX_RECENT_BYTES)
        """Encoded turns by key, each with the epoch in which it was put or read."""
        self._to_record: set[bytes] = set()
        """The keys of notes whose recorded last use is outdated; see `NoteTimes.is_outdated`."""
        self._is_new = self._is_being_written = False
        self._not_counted: dict[bytes, int] = {}
        """The sizes of the notes that were written since the last `make_fit`, by key."""
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        """The approximate size of all notes of each root that this process wrote to, the latest last."""
        self.dropped = 0
        self.removed = 0
        """The number of notes that had no room."""

    @property
    def is_waiting(self) -> bool:
        """Returns whether a note is being written, or no attempt was made yet."""
        return self._is_new or self._is_being_written

    def put(
        self,
        epoch: Epoch,
        root: bytes,
        record: RootRecord,
        kind: NoteKind,
        id_: str,
        content: bytes,
        ttl_s: float,
        prompt: TokenIds | None = None,
        share: str = "",
    ) -> bool:
        """Queues a note of a `share`, which replaces any note with the same kind and id. The note is deleted with the
        `prompt` that it came from. It is stored only until `epoch`, the epoch of its request, is over. Returns False if
        it is over now, if the note is too large, or if the store fails and too many notes wait already."""
        assert epoch.tenant == record.tenant, "the epoch is that of another tenant"
        key, now = note_key(root, kind, id_), self._store.clock()
        times = NoteTimes(now, now, max(1, min(round(ttl_s), 2**31 - 1)))
        came_from = NO_PROMPT if prompt is None else PromptDigest.of(epoch.secret, prompt)
        value = encode_note(key, content, times, came_from, share) if len(content) <= MAX_NOTE_BYTES else b""
        fits = bool(value) and note_bytes(len(value)) <= note_limit(self._store.budget_bytes)
        self._store.evictor.may_have_own_ttls |= times.ttl_s < SHORT_TTL_S
        with self._lock:
            fits = fits and self.waiting_bytes + len(value) <= _MAX_WAITING_BYTES
            if not fits or self._store.epochs.is_over(epoch):
                self.dropped += 1
                return False
            self._roots[root] = record
            self._replace(key, _Waiting(epoch, value))
            self._remember(key, value, epoch)
        self._wake()
        return True

    def recent(self, root: bytes, kind: int, id_: str) -> tuple[bool, bytes | None]:
        """Returns whether memory knows the answer, and the note's content (None: there is no such note). Counts a use
        of the note."""
        key = note_key(root, kind, id_)
        with self._lock:
            is_known, value = self._in_memory(key)
        return is_known, self._content(key, value) if is_known else None

    def get(self, root: bytes, tenant: str, kind: int, id_: str, patience: Patience | None = None) -> bytes | None:
        """Returns the content of a note of a root, and counts a use of it. `tenant` is the text of the root's tenant.
        Returns None if there is no such note or it is damaged. `patience` as for `Reads.ask`. Raises `DiskStalled`;
        None if the store fails in another way."""
        return self.get_all(root, tenant, kind, [id_], patience)[id_]

    def get_all(
        self, root: bytes, tenant: str, kind: int, ids: Sequence[str], patience: Patience | None = None
    ) -> dict[str, bytes | None]:
        """Returns the contents of several notes by their ids, as `get` does, with one read of the store."""
        keys = {id_: note_key(root, kind, id_) for id_ in ids}
        with self._lock:
            epoch = self._store.epochs.of(tenant)
            in_memory = {id_: self._in_memory(key) for id_, key in keys.items()}
        values = {id_: value for id_, (is_known, value) in in_memory.items() if is_known}
        if missing := {id_: key for id_, key in keys.items() if id_ not in values}:
            try:
                values |= self._store.reads.ask(partial(self._read_notes, missing), patience)
            except DiskStalled:
                raise
            except CacheError:
                return dict.fromkeys(ids)
            with self._lock:
                for id_, key in missing.items():
                    if (value := values[id_]) is not None and self._recent.get(key) is None:
                        self._remember(key, value, epoch)
        return {id_: self._content(key, values[id_]) for id_, key in keys.items()}

    def _read_notes(self, keys: Mapping[str, bytes]) -> dict[str, bytes | None]:
        # A snapshot that is taken now has the notes that were written meanwhile.
        with self._store.reads.snapshot() as snapshot:
            values = {id_: snapshot.get_record("notes", key) for id_, key in keys.items()}
            return {id_: None if value is None else bytes(value) for id_, value in values.items()}

    def _content(self, key: bytes, value: bytes | None) -> bytes | None:
        """Returns the content of an encoded note (`value`), None if it has expired or is damaged. Counts a use of
        it."""
        if value is None:
            return None
        now = self._store.clock()
        try:
            times, content = decode_note(key, value)
        except StoreCorrupt as error:
            log.warning("[disk-cache] a damaged note is removed: %s", error)
            self._delete(key)
            return None
        with self._lock:
            # A value in memory does not include the uses since it was read.
            if times.used(self._used.get(key, 0.0)).is_expired(now):
                return None
            self._used[key] = now
            self._used.move_to_end(key)
            if len(self._used) > _MAX_USED:
                self._to_record.discard(self._used.popitem(last=False)[0])
            if times.is_outdated(now):
                self._to_record.add(key)
        return content

    def delete(self, root: bytes, tenant: str, kind: NoteKind, id_: str, patience: Patience | None = None) -> bool:
        """Removes a note. Returns whether it existed and could be read. Raises `DiskStalled`."""
        if self.get(root, tenant, kind, id_, patience) is None:
            return False
        self._delete(note_key(root, kind, id_))
        return True

    def settle(self, root: bytes, kind: NoteKind, id_: str, patience: Patience | None = None) -> bool:
        """Waits until the last change of a note is written. Returns False if the time runs out first."""
        key = note_key(root, kind, id_)
        with self._written:
            return self._written.wait_for(lambda: key not in self._waiting, (patience or Patience()).left_s)

    def newest(self, kind: NoteKind, roots: Iterable[bytes], *, before: float, at_most: int) -> list[FoundNote]:
        """Returns the notes of a kind under these roots, the latest first: `at_most` of each share, put before a time
        in seconds since the epoch. Leaves out notes that expired, that are damaged, or that are not written yet. Does
        not count a use. Raises `CacheError`."""
        now, latest, num_of = self._store.clock(), list[FoundNote](), Counter[str]()
        with self._store.reads.snapshot() as snapshot:
            stored = (note for root in roots for note in snapshot.notes_of(root, kind))
            wanted = (note for note in stored if note.times.created_at < before and not note.times.is_expired(now))
            for note in sorted(wanted, key=lambda note: note.times.created_at, reverse=True):
                num_of[note.share] += 1
                if num_of[note.share] <= at_most:
                    with suppress(StoreCorrupt):
                        value = snapshot.get_record("notes", note.key)
                        content = decode_note(note.key, value)[1]
                        latest.append(FoundNote(note.root, note.share, content, note_prompt(value)))
        return latest

    def models(self, patience: Patience | None = None) -> list[ModelRecord]:
        """Returns the models that the store was served with. Raises `CacheError`."""
        return self._store.reads.ask(self._read_models, patience)

    def _read_models(self) -> list[ModelRecord]:
        with self._store.reads.snapshot() as snapshot:
            return [record for _, record in snapshot.models()]

    def write(self) -> None:
        """Writes all waiting notes in one transaction, then makes the notes fit their shares. Raises `CacheError`."""
        self._store.write_from(self.writing)
        self.make_fit()

    @contextmanager
    def writing(self) -> Iterator[SmallWrite | None]:
        """Yields the write of all waiting notes, None if none waits. If the block raises, the notes continue to
        wait."""
        with self._lock:
            waiting, roots, self._is_new = dict(self._waiting), dict(self._roots), False
            used = {key: self._used[key] for key in self._to_record - waiting.keys()}
            self._to_record = set()
            self._is_being_written = bool(waiting or used)
        sizes = {key: note_bytes(len(note.value)) for key, note in waiting.items() if note.value is not None}

        def put_notes(changes: Changes) -> None:
            epochs = epochs_of(changes, self._store.names)
            changes.forget_notes([key for key, note in waiting.items() if note.value is None])
            for key, note in waiting.items():
                if note.value is not None and not epochs.is_over(note.epoch):
                    changes.put_root(key[:HASH_BYTES], roots[key[:HASH_BYTES]])
                    changes.put_note(key, note.value)
            for key, when in used.items():
                changes.use_note(key, when)

        try:
            yield SmallWrite(sum(sizes.values()), put_notes) if self._is_being_written else None
            self._forget_waiting(waiting)
            self._not_counted |= sizes
        finally:
            self._is_being_written = False

    def _in_memory(self, key: bytes) -> tuple[bool, bytes | None]:
        """Returns whether memory knows the answer, and the note's value (None: it is deleted). The caller holds the
        lock."""
        if (note := self._waiting.get(key)) is not None and not (note.value and self._store.epochs.is_over(note.epoch)):
            return True, note.value
        epoch, value = self._recent.get(key) or (None, None)
        if epoch is not None and self._store.epochs.is_over(epoch):
            self._recent.remove(key)
            return False, None
        return value is not None, value

    def _remember(self, key: bytes, value: bytes, epoch: Epoch) -> None:
        """Keeps an encoded turn in memory, which was put or read in `epoch`. Ignores other notes. The caller holds the
        lock."""
        if key[HASH_BYTES] != NoteKind.TURN or self._store.epochs.is_over(epoch):
            return
        self._recent.put(key, (epoch, value), share_of(value), max(len(value), _MAX_RECENT_BYTES // _MAX_RECENT))

    def _delete(self, key: bytes) -> None:
        with self._lock:
            self._replace(key, _Waiting(Epoch(), None))
            self._recent.remove(key)
        self._wake()

    def drop_outdated(self) -> None:
        """Drops the notes in memory whose epoch is over. For any thread."""
        with self._lock:
            is_over = self._store.epochs.is_over
            outdated = {key: note for key, note in self._waiting.items() if note.value and is_over(note.epoch)}
            self.dropped += len(outdated)
            self._recent.remove_if(lambda _, turn: is_over(turn[0]))
        self._forget_waiting(outdated)

    def _replace(self, key: bytes, note: _Waiting) -> None:
        """Adds a note to the waiting ones, in place of an earlier one with this key. The caller holds the lock."""
        if key in self._waiting:
            self.waiting_bytes -= self._waiting[key].num_bytes
        self._waiting[key] = note
        self._is_new = True
        self.waiting_bytes += note.num_bytes

    def _forget_waiting(self, notes: Mapping[bytes, _Waiting]) -> None:
        """Removes notes from the waiting ones, unless they were replaced meanwhile."""
        with self._lock:
            for key, note in notes.items():
                if self._waiting.get(key) is note:
                    self.waiting_bytes -= self._waiting.pop(key).num_bytes
            roots = {key[:HASH_BYTES] for key in self._waiting}
            self._roots = {root: record for root, record in self._roots.items() if root in roots}
            self._written.notify_all()

    def make_fit(self) -> None:
        """Removes the notes that exceed a share. Counts the notes of a root when this process writes one of them and
        does not know their size. The size of all notes is the size of their pages. Raises `CacheError`."""
        if self._store.problem is not None:
            return
        written, self._not_counted = self._not_counted, {}
        budget_bytes, limit = self._store.budget_bytes, root_limit(self._store.budget_bytes)
        grown: Counter[bytes] = Counter()
        for key, size in written.items():
            grown[key[:HASH_BYTES]] += size
        with self._store.reads.snapshot() as snapshot:
            stored_bytes = snapshot.bytes_in("notes")
            for root, size in grown.items():
                known = self._sizes.pop(root, None)
                counted = sizes_by_root(snapshot.notes_of(root))[root] if known is None else known + size
                self._sizes[root] = counted
            full = [root for root, size in self._sizes.items() if size > limit]
            is_full = stored_bytes > total_limit(budget_bytes)
            surplus = self._surplus(snapshot, None if is_full else full, stored_bytes) if full or is_full else []
        if surplus:
            self.removed += len(surplus)
            few = "%d stored responses and other notes are removed for room, of those who have most of them"
            log.info(f"[disk-cache] {few}", len(surplus))
        for some in batches(surplus, RECORDS_AT_ONCE):
            with self._store.changes() as changes:
                keep_counts(changes, {key[:HASH_BYTES] for key in some if kind_of(key) == NoteKind.SAVINGS})
                changes.forget_notes(some)
        for root in list(self._sizes) if is_full else full:
            # The next write counts the notes of this root again.
            self._sizes.pop(root, None)
        while len(self._sizes) > _MAX_ROOTS:
            self._sizes.popitem(last=False)

    def _surplus(self, snapshot: Snapshot, roots: list[bytes] | None, stored_bytes: int) -> list[bytes]:
        """Returns the keys of the notes of these roots that exceed their shares; None stands for all roots, whose notes
        have `stored_bytes`."""
        with self._lock:
            used = dict(self._used)

        def stored_notes() -> Iterator[StoredNote]:
            stored = snapshot.notes() if roots is None else (note for root in roots for note in snapshot.notes_of(root))
            for note in stored:
                yield note.used(used[note.key]) if note.key in used else note

        return surplus_notes(stored_notes, self._store.budget_bytes, stored_bytes if roots is None else 0)


class _Waiting(NamedTuple):
    """An encoded note that waits to be written, with the epoch of its request. With the value None, the deletion of the
    note waits, in whatever epoch."""

    epoch: Epoch
    value: bytes | None

    @property
    def num_bytes(self) -> int:
        return _WAITING_BYTES + len(self.value or b"")


class FoundNote(NamedTuple):
    """A note that was found by its kind."""

    root: bytes
    share: str
    content: bytes
    prompt: PromptDigest
    """The prompt that it came from."""


class TenantNotes(Struct, frozen=True):
    """The notes of one tenant. See `Notes` for the methods, and for the threads that may call them."""

    notes: Notes
    epoch: Epoch
    """The epoch in which the request began."""
    root: bytes
    record: RootRecord
    ttl_s: float
    """The time to live of new notes after their last use, in seconds."""

    patience: Patience | None = None
    """The time that the request may still wait for the disk. With None, reads wait as long as the disk answers, and
    `settle` waits as long as a new `Patience` allows."""
    share: str = ""
    """The share that the room of new notes counts for."""

    def holder(self, kind: NoteKind, id_: str) -> TenantNotes:
        """Returns this tenant's notes, of this model or another model of the store, that contain the given note.
        Returns `self` if no notes contain it. Raises `DiskStalled`."""
        return next((notes for notes in (self, *self._with_other_models()) if notes.get(kind, id_) is not None), self)

    def _with_other_models(self) -> Iterator[TenantNotes]:
        with suppress(CacheError, ValueError):
            for model in self.notes.models(self.patience):
                root = root_hash(identity_of_tenant(model.identity, self.record.tenant))
                yield replace(self, root=root)

    def put(self, kind: NoteKind, id_: str, content: bytes, prompt: TokenIds | None = None) -> bool:
        return self.notes.put(self.epoch, self.root, self.record, kind, id_, content, self.ttl_s, prompt, self.share)

    def recent(self, kind: NoteKind, id_: str) -> tuple[bool, bytes | None]:
        return self.notes.recent(self.root, kind, id_)

    def get(self, kind: NoteKind, id_: str) -> bytes | None:
        return self.notes.get(self.root, self.record.tenant, kind, id_, self.patience)

    def get_all(self, kind: NoteKind, ids: Sequence[str]) -> dict[str, bytes | None]:
        return self.notes.get_all(self.root, self.record.tenant, kind, ids, self.patience)

    def delete(self, kind: NoteKind, id_: str) -> bool:
        return self.notes.delete(self.root, self.record.tenant, kind, id_, self.patience)

    def settle(self, kind: NoteKind, id_: str) -> bool:
        return self.notes.settle(self.root, kind, id_, self.patience)
