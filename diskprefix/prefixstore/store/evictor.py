"""The limits of a store, and the deletion of the nodes that `eviction` chooses."""

from __future__ import annotations

import errno
import logging
import math
import os
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from diskprefix.errors import CacheError, LargerThanStore, StoreCorrupt, StoreFull
from diskprefix.prefixstore.store.changes import NODES_AT_ONCE, RECORDS_AT_ONCE, Changes, batches
from diskprefix.prefixstore.store.eviction import (
    UsageTable,
    age_of,
    bytes_to_free,
    bytes_to_measure,
    choose_victims,
    expired,
    must_measure,
    usable_bytes,
)
from diskprefix.prefixstore.store.folder import FULL_BELOW_BYTES, FolderUnavailable, disk_full, file_errors, free_bytes
from diskprefix.prefixstore.store.ghosts import PROMPTS_AT_ONCE, forget_prompts, has_expired
from diskprefix.prefixstore.store.note_record import SHORT_TTL_S
from diskprefix.prefixstore.store.schema import node_num_tokens
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store_file import StoreFile
from diskprefix.tokens import HASH_BYTES
from diskprefix.units import format_size

log = logging.getLogger("diskprefix")

_F64 = struct.Struct("<d")
_ROOTS_SHARE = _SEEN_SHARE = 16
"""The part of the budget that the records of roots without nodes may take, and the part for seen prompts with their
ghosts."""


class Evictor:
    """Keeps a store within its budget and within the free space of its disk. Never evicts pinned nodes.

    `may_have_own_ttls`: a record may have its own time to live. Records of other processes count after the next
    `expire`.
    """

    def __init__(self, file: StoreFile, before_drop: Callable[[Changes, Sequence[bytes]], None]) -> None:
        """`file.min_free_bytes` of the disk stay free, 0 for no limit. `before_drop` is called with roots whose records
        are about to be removed, in the same transaction."""
        self.may_have_own_ttls = True
        self.served: tuple[str, ...] = ()
        """The identities of the models that the store is served with. State that other builds computed for these models
        is evicted first, once it was not used for an hour."""
        self.stays_s = math.inf
        """How long state stays that is not used: the age of what was evicted last, infinite while there is room."""
        self._refused_bytes = 0
        self._file, self._before_drop = file, before_drop
        self._pins: Counter[bytes] = Counter()
        self._pins_lock = threading.Lock()

    def pin(self, name: bytes) -> None:
        """Keeps a node, and so all its ancestors, from eviction by this process until `unpin`. Does not wait for the
        disk, so the running transaction may still delete the node. Then `publish` raises `PrefixGone` for nodes that
        continue it."""
        with self._pins_lock:
            self._pins[name] += 1

    def unpin(self, name: bytes) -> None:
        with self._pins_lock:
            self._pins[name] -= 1
            if self._pins[name] <= 0:
                del self._pins[name]

    def pinned(self) -> frozenset[bytes]:
        with self._pins_lock:
            return frozenset(self._pins)

    def evict_for(self, need_bytes: int, keep: frozenset[bytes]) -> int:
        """Evicts nodes, but none of `keep`, until `need_bytes` more fit. Returns the number of evicted nodes. If
        `need_bytes` would not fit even then, evicts nothing, and raises `FolderUnavailable` if the disk is full, or
        `StoreFull` if the budget is used up."""
        self._bound_seen()
        with self._file.reads.snapshot() as snapshot:
            used, usable, budget = snapshot.used_bytes(), self.usable_bytes(), self._file.budget_bytes
            wanted = bytes_to_free(used=used, need=need_bytes, usable=usable, budget=budget)
            if not wanted:
                return 0
            roots = snapshot.roots_beyond(budget // _ROOTS_SHARE)
            table, victims = self._victims(snapshot, wanted, keep)
            freed = sum(int(table.records["stored_bytes"][table.row_of[name]]) for name in victims)
            _log_eviction(snapshot, "disk" if self._is_limited_by_disk() else "budget", table, victims)
            if need_bytes and used + need_bytes - freed > usable:
                in_use = "what is stored is in use; raise --kv-cache-budget"
                raise self._full(f"no room for {format_size(need_bytes)}: {in_use}")
        self._drop_roots(roots)
        self._evict(victims)
        return len(victims)

    def _victims(self, snapshot: Snapshot, bytes_wanted: int, keep: frozenset[bytes]) -> tuple[UsageTable, list[bytes]]:
        """Returns all usage records and the nodes to evict, and measures their age."""
        table, now = snapshot.usages(), self._file.clock()
        victims = choose_victims(
            table,
            snapshot.parent,
            bytes_wanted=bytes_wanted,
            pinned=keep | self.pinned(),
            now=now,
            saves_nothing=snapshot.saves_nothing(self.served),
        )
        self.stays_s = age_of(table, victims, now) if victims else self.stays_s
        return table, victims

    def refuse(self, num_bytes: int) -> None:
        """Counts state that is not stored for want of room. For one thread, which need not be the writer's."""
        self._refused_bytes += num_bytes

    def measure_again(self, *, has_more_room: bool = False) -> None:
        """Measures `stays_s` again if enough was refused (see `eviction.must_measure`), or if the disk has more
        room."""
        budget = self._file.budget_bytes
        if not (has_more_room or must_measure(self._refused_bytes, budget)):
            return
        self._refused_bytes = 0
        with self._file.reads.snapshot() as snapshot:
            wanted = bytes_to_measure(used=snapshot.used_bytes(), usable=self.usable_bytes(), budget=budget)
            if wanted:
                self._victims(snapshot, wanted, frozenset())
            else:
                self.stays_s = math.inf

    def expire(self, ttl_s: float) -> int:
        """Removes nodes that were not used for `ttl_s` seconds (0: no limit) or for the time that a request asked for,
        seen prompts older than that, and expired notes. Returns the number of removed nodes."""
        with self._file.reads.snapshot() as snapshot:
            table, now = snapshot.usages(), self._file.clock()
            names = expired(table, snapshot.parent, ttl_s=ttl_s, pinned=self.pinned(), now=now)
            _log_eviction(snapshot, "expired", table, names)
            prompts, notes, has_own_ttls = list[bytes](), list[bytes](), table.has_own_ttls
            for key, came_at, own_s in snapshot.seen_times():
                has_own_ttls |= own_s > 0
                if has_expired(now, came_at, own_s, ttl_s):
                    prompts.append(key)
            for note in snapshot.notes():
                has_own_ttls |= note.times.ttl_s < SHORT_TTL_S
                if note.times.is_expired(now):
                    notes.append(note.key)
        self.may_have_own_ttls = has_own_ttls
        self._evict(names)
        self._forget_prompts(prompts)
        for some in batches(notes, RECORDS_AT_ONCE):
            with self._file.changes() as changes:
                changes.forget_notes(some)
        return len(names)

    def check_fits(self, need_bytes: int) -> None:
        """Raises an error if `need_bytes` would not fit even after evicting everything else: `LargerThanStore`, or
        `FolderUnavailable` if the disk is full."""
        if need_bytes > usable_bytes(self._file.budget_bytes):
            need, budget = format_size(need_bytes), format_size(self._file.budget_bytes)
            raise LargerThanStore(f"{need} do not fit --kv-cache-budget {budget}; raise it or save a shorter prefix")
        if need_bytes > self.usable_bytes():
            raise self._full("")

    def lacks_room(self, need_bytes: int) -> bool:
        """Returns whether the budget or the disk has no room for `need_bytes` even after evicting everything else."""
        with suppress(CacheError):
            return need_bytes > usable_bytes(self.room_bytes())
        return False

    def usable_bytes(self) -> int:
        """Returns the bytes that pages with data may take of the budget, or of the disk's space if that is less."""
        return usable_bytes(min(self._file.budget_bytes, self.disk_limit()))

    def may_grow(self, need_bytes: int) -> bool:
        """Returns whether `min_free_bytes` of the disk stay free even if no free page of the file can be reused."""
        return not self._file.min_free_bytes or self._file.environment.file_bytes() + need_bytes <= self.disk_limit()

    def let_freed_pages_age(self) -> None:
        """Commits a transaction that writes one small record: LMDB reuses pages only from the second commit after the
        one that freed them."""
        with self._file.changes() as changes:
            changes.put_meta("evicted_at", _F64.pack(self._file.clock()))

    def _evict(self, victims: list[bytes]) -> None:
        """Deletes nodes, children first. Keeps nodes that were continued or pinned since they were chosen. Raises
        `StoreCorrupt` if the parent of a node is unknown: the parent's count of children would stay too high, so it
        could never be evicted."""
        for some in batches(victims, NODES_AT_ONCE):
            with self._file.changes() as changes:
                roots = set()
                for name in some:
                    usage = changes.usage(name)
                    if usage is not None and not usage.children and name not in self._pins:
                        parent = changes.parent(name)
                        if len(parent) < HASH_BYTES:
                            raise StoreCorrupt(f"the record of node {name.hex()} is damaged")
                        roots.add(parent)
                        changes.delete_node(name, parent)
                changes.delete_bare_roots(roots)
        if victims:
            self.let_freed_pages_age()

    def _bound_seen(self) -> None:
        """Removes the oldest seen prompts if all together exceed their share, until the share is three quarters
        full."""
        limit, now = self._file.budget_bytes // _SEEN_SHARE, self._file.clock()
        with self._file.reads.snapshot() as snapshot:
            # A time in the future comes from a wrong clock: that prompt counts as no younger than others.
            times = snapshot.seen_times() if snapshot.seen_bytes() > limit else ()
            oldest_first = sorted((min(came_at, now), key) for key, came_at, _ in times)
        self._forget_prompts([key for _, key in oldest_first], until_bytes=limit * 3 // 4)

    def _forget_prompts(self, prompts: list[bytes], until_bytes: int = -1) -> None:
        """Removes seen prompts, given by their keys, until the remaining ones take at most `until_bytes`."""
        for some in batches(prompts, PROMPTS_AT_ONCE):
            with self._file.changes() as changes:
                forget_prompts(changes, some)
                changes.delete_bare_roots({key[:HASH_BYTES] for key in some})
                if changes.seen_bytes() <= until_bytes:
                    break

    def _drop_roots(self, roots: list[bytes]) -> None:
        for some in batches(roots, NODES_AT_ONCE):
            with self._file.changes() as changes:
                # Some roots may have got new nodes since they were chosen.
                empty = [root for root in some if not changes.has_under("children", root)]
                self._before_drop(changes, empty)
                forget_prompts(changes, [key for root in empty for key in changes.keys_under("seen", root)])
                changes.forget_notes([key for root in empty for key in changes.keys_under("notes", root)])
                changes.delete_bare_roots(set(empty))

    def disk_limit(self) -> int:
        """Returns the size in bytes that the file may have if `min_free_bytes` of the disk are to stay free."""
        if not self._file.min_free_bytes:
            return self._file.budget_bytes
        with file_errors(self._file.path):
            disk = os.statvfs(self._file.path)
        return self._file.environment.file_bytes() + max(0, disk.f_bavail * disk.f_frsize - self._file.min_free_bytes)

    def room_bytes(self) -> int:
        """Returns the size in bytes that the file can reach: the budget, or less if the disk has less space."""
        free = free_bytes(self._file.path)
        room = self._file.environment.file_bytes() + max(0, free - self._file.min_free_bytes)
        return self._file.budget_bytes if free < 0 else min(room, self._file.budget_bytes)

    def limit_text(self) -> str:
        """Returns a text for people that names the limit of the file's size."""
        budget = f"the budget of {format_size(self._file.budget_bytes)}"
        return f"{budget}: {self._full('')}" if self._is_limited_by_disk() else budget

    def full_disk(self) -> str | None:
        """Returns the message for a full disk, None if the disk has room. Never raises."""
        is_full = free_bytes(self._file.path) < self._file.min_free_bytes + FULL_BELOW_BYTES
        return disk_full(self._file.path, self._file.min_free_bytes) if is_full else None

    def is_crowded(self) -> bool:
        """Returns whether others have taken half of the space that the store leaves free, or all of the disk. The store
        itself never does. Never raises."""
        return 0 <= free_bytes(self._file.path) < max(FULL_BELOW_BYTES, self._file.min_free_bytes // 2)

    def _is_limited_by_disk(self) -> bool:
        return self.disk_limit() < self._file.budget_bytes

    def _full(self, budget_full: str) -> CacheError:
        """Returns the error for a file that may not grow: `FolderUnavailable` if the disk limits the file, otherwise
        `StoreFull` with the message `budget_full`."""
        if self._is_limited_by_disk():
            return FolderUnavailable(self._file.path, OSError(errno.ENOSPC, ""), self._file.min_free_bytes)
        return StoreFull(budget_full)


def _log_eviction(snapshot: Snapshot, reason: str, table: UsageTable, names: Sequence[bytes]) -> None:
    """Logs a batch of nodes that are about to be evicted."""
    if names and log.isEnabledFor(logging.DEBUG):
        records = table.records[[table.row_of[name] for name in names]]
        num_tokens = sum(node_num_tokens(snapshot.get_record("nodes", name) or b"") for name in names)
        num_bytes, last_used = int(records["stored_bytes"].sum()), float(records["last_used"].max())
        log.debug(
            "[disk-cache] evicting reason=%s blocks=%d tokens=%d bytes=%d restores=%d last_used=%.0f",
            *(reason, len(names), num_tokens, num_bytes, int(records["restores"].sum()), last_used),
        )
