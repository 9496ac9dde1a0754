"""The store: nodes of the prefix tree, their payloads, entries and seen prompts in one LMDB environment.

A `Snapshot` is one read transaction, a publication one write transaction. There is one writer at a time, in this
process or another. The budget is the size of the memory map, so LMDB itself keeps the file within it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import CacheError, PrefixGone, StoreFull
from diskprefix.namespace_key import NamespaceKey
from diskprefix.store.changes import NODES_AT_ONCE, Changes, NewNode, SmallWrite, Use
from diskprefix.store.codec.codec import Codec
from diskprefix.store.eviction import recorded_ttl
from diskprefix.store.evictor import Evictor
from diskprefix.store.folder import OnWait
from diskprefix.store.ghosts import see
from diskprefix.store.schema import EntryRecord, Kind, RootRecord, encode_record
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store_file import OnCorruption, StoreFile
from diskprefix.store.store_identity import Epoch, epoch_of
from diskprefix.store.written import WRITTEN, WrittenBytes, read_written
from diskprefix.tokens import TokenPath
from diskprefix.units import counted, format_size

log = logging.getLogger("diskprefix")

_MAX_PROMPTS_READ = 1000
OUTDATED = "something was purged, or the store was replaced, since it began"
_RECORDED_BYTES = 1 << 16
"""The end of a process records what it has written if it is more than this, which recording itself may write."""


class Publication(Struct, frozen=True, eq=False):
    """The records that one transaction adds to a store of this `epoch`: new nodes (parents first), an entry, a seen
    prompt."""

    epoch: Epoch
    root: bytes
    root_record: RootRecord
    nodes: tuple[NewNode, ...]
    last_node: bytes | None = None
    """The last node of the request's path, new or already stored."""
    entry: EntryRecord | None = None
    prompt: TokenPath | None = None
    prompt_group: bytes = b""
    """The prompt's group: 8 bytes, or empty."""
    prompt_ttl_s: float | None = None
    ttl_s: float | None = None
    """The time to live of the path after its last use, in seconds; None for the daemon's."""
    anchors: tuple[int, ...] | None = None
    """New checkpoints remove the conversation's earlier ones, except the last few and those at these positions. With
    None they remove none."""
    daemon_ttl_s: float = 0.0
    """The daemon's time to live, 0 for none."""
    small_writes: tuple[SmallWrite, ...] = ()
    """These changes come first in the transaction."""

    def without_nodes(self) -> Publication:
        """Returns what is left of the publication if its nodes are lost."""
        return replace(self, nodes=(), last_node=None, entry=None)

    @property
    def base(self) -> bytes | None:
        """The stored node that this publication continues or ends with."""
        if not self.nodes:
            return self.last_node if self.entry is not None else None
        return self.nodes[0].parent if self.nodes[0].position > 0 else None

    @property
    def used_names(self) -> frozenset[bytes]:
        """The nodes that this publication continues or contains, which must not be evicted for it."""
        names = {node.parent for node in self.nodes if node.position > 0} | {node.name for node in self.nodes}
        return frozenset(names | ({self.last_node} if self.last_node else set()))

    @property
    def payload_bytes(self) -> int:
        return sum(node.payload_bytes for node in self.nodes)

    @property
    def is_finite(self) -> bool:
        """Returns whether all pieces that must be finite are."""
        return all(node.is_sound(index) for node in self.nodes for index in range(len(node.pieces)))


class Subtrees(NamedTuple):
    """The names of nodes, and of those nodes at which saved prompts end."""

    nodes: list[bytes]
    entries: list[bytes]


class Store(StoreFile):
    """An open store. `codec` is the codec of new payloads. `evictor` makes room. Methods raise `StoreUnavailable` if
    LMDB or the file system fails."""

    def __init__(
        self,
        path: Path,
        *,
        budget_bytes: int = 0,
        new_budget_bytes: int = 0,
        read_only: bool = False,
        on_corruption: OnCorruption = "refuse",
        min_free_bytes: int = 0,
        serving: bool = False,
        clock: Callable[[], float] = time.time,
        namespace: NamespaceKey | None = None,
        on_wait: OnWait = lambda _why: None,
    ) -> None:
        """Opens the store in folder `path`, and creates it unless `read_only`. `budget_bytes` sets the
        budget of the folder, for all processes that use it. Without it, the folder keeps its budget; if it has none, it
        gets `new_budget_bytes`, or in tools the size of its file.

        Raises `StoreUnavailable` (the folder cannot be created, read or written, others may write to it, or its file
        belongs to another program). With `on_corruption` "refuse", raises `StoreFormatError` for a store of another
        format and `StoreCorrupt` for a damaged file; with "quarantine", moves that file aside.

        `namespace` seeds the names of a new store. Raises `StoreUnavailable` if a daemon's is not that of the store.

        `serving` is for a daemon: it evicts until the budget holds, a read-only or full file system is no error,
        because `maintain` tries again, and DISK.md says when the file is checked. Other processes always check it.

        `on_wait` is called with the reason before a long check, and before a wait for a process that replaces the file.
        """
        super().__init__(
            *(path, budget_bytes, new_budget_bytes, read_only, on_corruption, serving),
            *(clock, namespace, min_free_bytes, on_wait),
        )
        self.codec = Codec.RAW
        self.evictor = Evictor(self)
        self._written = WrittenBytes(), 0
        """The record as it was last read, and `meter.recorded_bytes` at that time."""
        if serving:
            self.written()
            self._fit_budget_or_log()

    @property
    def store_id(self) -> bytes:
        return self.names.store_id

    @property
    def secret(self) -> int:
        return self.names.secret

    def close(self) -> None:
        """Closes the folder, after recording what this process has written, if that is more than a record takes."""
        if self.meter.total_bytes - self.meter.recorded_bytes > _RECORDED_BYTES:
            with suppress(CacheError):
                self.record_written()
        super().close()

    def publish(self, publication: Publication) -> int:
        """Writes a publication in one transaction, after evicting what it needs. Returns the number of evicted nodes.

        Raises `StoreFull` if it does not fit, `LargerThanStore` if it would not even in an empty store, `PrefixGone` if
        the node that it continues is gone, or something was purged since its request began, and `ReaderStays` if a
        reader that does not end keeps evicted pages from being reused.
        """
        with self.reads.snapshot() as snapshot:
            self._require_epoch(snapshot, publication)
            if publication.base is not None and snapshot.usage(publication.base) is None:
                raise PrefixGone("the prefix that it continues was evicted meanwhile")
            need = sum(node.max_bytes for node in publication.nodes if snapshot.usage(node.name) is None)
            before = () if publication.base is None else snapshot.ancestry(publication.base)
            kept_bytes = int(snapshot.usages(before).records["stored_bytes"].sum())
        need += sum(small_write.need_bytes for small_write in publication.small_writes)
        # The nodes that it continues are not evicted for it.
        self.evictor.check_fits(need + kept_bytes)
        evicted = self.evictor.make_room(need, publication.used_names)
        if self.evictor.may_grow(need) and self._try_write(publication):
            return evicted
        # The free pages are too young, or a reader still uses them, or they are too scattered for a payload. Evicting
        # more helps only in the last case, so wait for the others first.
        self.environment.wait_for_readers()
        room = need
        # Bound: the room doubles, and `make_room` raises an error for more than the budget.
        while True:
            self.evictor.let_freed_pages_age()
            if self._try_write(publication):
                return evicted
            room = 2 * room + 2**20
            evicted += self.evictor.make_room(room, publication.used_names)

    def _require_epoch(self, snapshot: Snapshot, publication: Publication) -> None:
        if publication.epoch != epoch_of(snapshot, self.names):
            raise PrefixGone(OUTDATED)

    def write(self, small_writes: Sequence[SmallWrite]) -> None:
        """Makes small writes in one transaction, after evicting what they need. Raises what `publish` does."""
        if need_bytes := sum(small_write.need_bytes for small_write in small_writes):
            self.evictor.make_room(need_bytes, frozenset())
        with self.changes() as changes:
            for small_write in small_writes:
                small_write.put(changes)

    def write_from(self, source: Callable[[], AbstractContextManager[SmallWrite | None]]) -> None:
        """Makes the small write that a source yields, if there is one. Raises what `publish` does."""
        with source() as small_write:
            if small_write is not None:
                self.write([small_write])

    def quarantine(self, name: bytes, parent: bytes) -> int:
        """Removes a damaged node and all that continues it. Returns the number of removed nodes. `parent` is the node
        that it continues, which its own record may not name."""
        return len(self.remove_subtrees({name: parent}).nodes)

    def remove_subtrees(self, tops: Mapping[bytes, bytes] | Iterable[bytes]) -> Subtrees:
        """Removes nodes and all that continues them, children first. A mapping gives the parents of the nodes;
        otherwise their own records do."""
        removed, known = Subtrees([], []), set(tops)
        left = [(name, tops[name] if isinstance(tops, Mapping) else None) for name in tops]
        # Bound: no node is added twice, and each round removes one, or adds the nodes that continue it.
        while left:
            num_removed = len(removed.nodes)
            with self.changes() as changes:
                # Bound: as above.
                while left and len(removed.nodes) < num_removed + NODES_AT_ONCE:
                    name, parent = left[-1]
                    # A damaged index could lead around in a circle.
                    children = [child for child in changes.children(name, self.secret) if child not in known]
                    known.update(children)
                    left += [(child, name) for child in children]
                    if children:
                        continue
                    left.pop()
                    if parent is not None and changes.is_ghost(name):
                        # Its payload was removed meanwhile. The ghost belongs to a seen prompt.
                        continue
                    parent = changes.parent(name) if parent is None else parent
                    removed.entries.extend([name] if changes.has_record("entries", name) else [])
                    removed.nodes.extend([name] if changes.delete_node(name, parent) else [])
        return removed

    def counts(self) -> dict[str, int]:
        """Returns `Snapshot.counts`, and the bytes in use (`used_bytes`) and of the whole file (`file_bytes`)."""
        with self.reads.snapshot() as snapshot:
            return snapshot.counts() | {"used_bytes": snapshot.used_bytes(), "file_bytes": self.file_bytes()}

    def written(self) -> WrittenBytes:
        """Returns what was written to the file, by all processes as far as they have recorded it. If the store cannot
        be read, returns what they had recorded when it was last read."""
        # Read before the record: what is recorded meanwhile would otherwise count twice.
        recorded_bytes = self.meter.recorded_bytes
        with suppress(CacheError), self.reads.snapshot() as snapshot:
            self._written = read_written(snapshot), recorded_bytes
        return self.written_lately()

    def written_lately(self) -> WrittenBytes:
        """Returns what `written` returned last, with what this process has written since. Does not read the store."""
        written, recorded_bytes = self._written
        written = msgspec.structs.replace(written, hours=dict(written.hours))
        return self.meter.add_to(written, self.clock(), recorded_bytes)

    def record_written(self) -> None:
        """Records what this process has written since its last publication, if the store can be written. Raises
        `CacheError`."""
        if self.problem is None and self.meter.total_bytes > self.meter.recorded_bytes:
            with self.changes() as changes:
                recorded = self._put_written(changes)
            self.meter.recorded_bytes = recorded

    def _put_written(self, changes: Changes) -> int:
        """Adds to the record what it lacks of this process. Returns the meter's `recorded_bytes` after the commit."""
        recorded_bytes = self.meter.recorded_bytes
        written = self.meter.add_to(read_written(changes), self.clock(), recorded_bytes)
        changes.put_meta(WRITTEN, encode_record(WRITTEN.encode(), written))
        return written.recorded_bytes

    def longest_prompt(self) -> int:
        """Returns the number of tokens of the longest of a thousand saved prompts, 0 if none can be read."""
        longest = 0
        with suppress(CacheError), self.reads.snapshot() as snapshot:
            for _, entry in islice(snapshot.entries(), _MAX_PROMPTS_READ):
                longest = max(longest, entry.num_tokens)
        return longest

    def file_bytes(self) -> int:
        return self.environment.file_bytes()

    def fit_budget(self) -> int:
        """Evicts until a lowered budget holds, and compacts the file if no other process has it open. Returns the
        number of evicted nodes."""
        before = self.counts()
        evicted = self.evictor.make_room(0, frozenset())
        if evicted:
            after = self.counts()
            log.warning(
                "[disk-cache] %s and %s were removed, because they do not fit %s",
                counted(before["entries"] - after["entries"], "saved prompt"),
                format_size(before["used_bytes"] - after["used_bytes"]),
                self.evictor.limit(),
            )
        file_bytes = self.file_bytes()
        if file_bytes > self.budget_bytes:
            log.info(
                "[disk-cache] the file has %s, more than the budget of %s: compacting it",
                format_size(file_bytes),
                format_size(self.budget_bytes),
            )
            self.compact()
        return evicted

    def maintain(self) -> bool:
        """Opens the folder again if needed; see `reopen`. Returns whether it did and the store can be written. Never
        raises."""
        if not self.reopen():
            return False
        self.evictor.may_have_own_ttls = True
        self._fit_budget_or_log()
        return self.problem is None

    def _fit_budget_or_log(self) -> None:
        try:
            if self.problem is None:
                self.fit_budget()
        except CacheError as error:
            log.warning("[disk-cache] the budget does not hold yet: %s", error)

    def _try_write(self, publication: Publication) -> bool:
        """Writes a publication in one transaction. Returns False, and writes nothing, if LMDB finds no free pages."""
        try:
            with self.changes() as changes:
                # Checked again: no purge can end between this check and the commit.
                self._require_epoch(changes, publication)
                for small_write in publication.small_writes:
                    small_write.put(changes)
                recorded = self._put_written(changes)
                changes.put_root(publication.root, publication.root_record)
                last_node = publication.last_node
                for node in publication.nodes:
                    holder = changes.put_node(publication.root, node, self.codec)
                    if holder == node.name and node.replaces:
                        changes.remove_shorter(node, self.secret)
                    elif node.name == last_node:
                        last_node = holder
                    if publication.anchors is not None and node.kind != Kind.BLOCK:
                        changes.remove_superseded(
                            *(node, self.secret, publication.anchors),
                            ttl_s=publication.daemon_ttl_s,
                            pinned=self.evictor.pinned(),
                            has_entry=publication.entry is not None and node.name == publication.last_node,
                        )
                if last_node is not None:
                    changes.touch(last_node, Use(self.clock(), 0, recorded_ttl(publication.ttl_s)))
                    # A prompt that a longer saved one contains has no entry of its own.
                    if publication.entry is not None and last_node == publication.last_node:
                        changes.put_entry(last_node, publication.entry)
                if publication.prompt is not None:
                    ttl_s = recorded_ttl(publication.prompt_ttl_s)
                    see(changes, publication.prompt, publication.prompt_group, ttl_s)
        except StoreFull:
            return False
        self.meter.recorded_bytes = recorded
        own_ttls = [publication.prompt_ttl_s, *(node.ttl_s for node in publication.nodes)]
        self.evictor.may_have_own_ttls |= any(ttl_s is not None for ttl_s in own_ttls)
        return True
