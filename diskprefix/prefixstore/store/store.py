"""The store: nodes of the prefix tree, their payloads, entries and seen prompts in one LMDB environment.

A `Snapshot` is one read transaction, a publication one write transaction. Only one thread of one process writes at a
time. The budget is the size of the memory map, so LMDB itself keeps the file within it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import CacheError, PrefixGone, StoreFull
from diskprefix.prefixstore.namespace_key import NamespaceKey
from diskprefix.prefixstore.store.changes import NODES_AT_ONCE, Changes, NewNode, SmallWrite, Use, WriteSource
from diskprefix.prefixstore.store.codec.codec import Codec
from diskprefix.prefixstore.store.epochs import Epoch, epochs_of
from diskprefix.prefixstore.store.eviction import recorded_ttl
from diskprefix.prefixstore.store.evictor import Evictor
from diskprefix.prefixstore.store.folder import OnWait
from diskprefix.prefixstore.store.ghosts import see
from diskprefix.prefixstore.store.pieces import Hold
from diskprefix.prefixstore.store.schema import OWN_KINDS, EntryRecord, NodeKind, RootRecord, encode_record
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics.savings import keep_counts
from diskprefix.prefixstore.store.store_file import OnCorruption, StoreFile
from diskprefix.prefixstore.store.write_counter import WRITTEN, WrittenBytes, read_written
from diskprefix.tokens import TokenPath
from diskprefix.units import counted, format_size

log = logging.getLogger("diskprefix")

_MAX_PROMPTS_READ = 1000
OUTDATED = "something of its tenant was purged, or the store was replaced, since it began"
EXPIRED = "its time to live was over before the disk had taken it"
_RECORDED_BYTES = 1 << 16
"""At its end, a process records its written bytes only if they are more than this, because recording may itself write
as many."""


class Publication(Struct, frozen=True, eq=False):
    """The records that one transaction adds to the store: new nodes (parents first), an entry, a seen prompt. `epoch`
    is that of the root's tenant when the request began. Nodes of prompts come with an entry."""

    epoch: Epoch
    root: bytes
    root_record: RootRecord
    nodes: tuple[NewNode, ...]
    replaced: tuple[bytes, bytes] | None = None
    """An interim checkpoint that the nodes replace: its name, and the name of its parent."""
    last_node: bytes | None = None
    """The last node of the request's path, new or already stored."""
    entry: EntryRecord | None = None
    """The entry of `last_node`, if it has a number of tokens. Nodes that belong to no other entry get it too."""
    continued: bytes | None = None
    """The node where an earlier entry ends that this publication continues, beside its `base`."""
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
    holds: Sequence[Hold] = ()
    """They keep the payloads, and are released when the publication is written or lost. Set by the writer."""
    queued_at: float = 0.0
    """The time, on the clock of `time.monotonic`, when the writer queued the publication."""
    unused_s: float = 0.0
    """How long ago the request ended, in seconds. Its last use of the state was then, however long the disk took."""

    def __post_init__(self) -> None:
        assert self.epoch.tenant == self.root_record.tenant, "the epoch is that of another tenant"
        assert self.entry or not (self.nodes and self.root_record.has_prompts), "state of a prompt ends in an entry"

    def without_nodes(self) -> Publication:
        """Returns the rest of the publication after its nodes are lost: the seen prompt."""
        return replace(self, nodes=(), last_node=None, entry=None, holds=())

    @property
    def base(self) -> bytes | None:
        """The stored node that this publication continues or ends with."""
        if not self.nodes:
            return None if self.entry is None else self.last_node
        return self.nodes[0].parent if self.nodes[0].position > 0 else None

    @property
    def used_names(self) -> frozenset[bytes]:
        """The nodes that this publication continues or contains. They must not be evicted to make room for it."""
        names = {node.parent for node in self.nodes if node.position > 0} | {node.name for node in self.nodes}
        return frozenset(names | ({self.last_node} if self.last_node else set()))

    @property
    def payload_bytes(self) -> int:
        return sum(node.payload_bytes for node in self.nodes)

    def lasts_s(self, ttl_s: float) -> float:
        """Returns the seconds for which all of its nodes stay without a use. `ttl_s` is the daemon's time to live, 0
        for none."""
        return min((node.ttl_s or ttl_s or math.inf for node in self.nodes), default=math.inf)

    @property
    def is_finite(self) -> bool:
        """Returns whether all pieces that must be finite are."""
        return all(node.is_sound(index) for node in self.nodes for index in range(len(node.pieces)))


class Subtrees(NamedTuple):
    """The names of nodes, and the names of the nodes at which entries end (`entries`)."""

    nodes: list[bytes]
    entries: list[bytes]


class Store(StoreFile):
    """An open store. `codec` is the codec of new payloads, and `evictor` makes room for them. Methods raise
    `StoreUnavailable` if LMDB or the file system fails."""

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

        `namespace` seeds the names of a new store. With `serving`, raises `StoreUnavailable` if it is not the namespace
        of the store.

        `serving` is for a daemon: it evicts until the budget holds, a read-only or full file system is no error,
        because `maintain` tries again, and DISK.md says when the file is checked. Other processes always check it.

        `on_wait` is called with the reason before a long check, and before a wait for a process that replaces the file.
        """
        super().__init__(
            *(path, budget_bytes, new_budget_bytes, read_only, on_corruption, serving),
            *(clock, namespace, min_free_bytes, on_wait),
        )
        self.codec = Codec.PLANES
        self.evictor = Evictor(self, before_drop=keep_counts)
        self._written = WrittenBytes(), 0
        """The record of written bytes when it was last read, and `meter.recorded_bytes` at that time."""
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
        """Closes the folder. First records the bytes that this process has written, if they are more than recording
        itself writes."""
        if self.meter.total_bytes - self.meter.recorded_bytes > _RECORDED_BYTES:
            with suppress(CacheError):
                self.record_written()
        super().close()

    def publish(self, publication: Publication) -> int:
        """Writes a publication in one transaction, after evicting nodes to make room for it. Returns the number of
        evicted nodes.

        Raises `StoreFull` if it does not fit, `LargerThanStore` if it would not fit even in an empty store,
        `PrefixGone` if the node that it continues is gone, or if the epoch of its request is over, and `ReaderStays` if
        a reader that does not end keeps evicted pages from being reused.
        """
        with self.reads.snapshot() as snapshot:
            self._require_epoch(snapshot, publication)
            if publication.base is not None and snapshot.usage(publication.base) is None:
                raise PrefixGone("the prefix that it continues was evicted meanwhile, or could not be saved")
            need = sum(node.max_bytes for node in publication.nodes if snapshot.usage(node.name) is None)
            before = () if publication.base is None else snapshot.ancestry(publication.base)
            kept_bytes = int(snapshot.usages(before).records["stored_bytes"].sum())
        need += sum(small_write.need_bytes for small_write in publication.small_writes)
        # The nodes that the publication continues are not evicted for it.
        self.evictor.check_fits(need + kept_bytes)
        evicted = self.evictor.evict_for(need, publication.used_names)
        if self.evictor.may_grow(need) and self._try_write(publication):
            return evicted
        # The free pages are too young, or a reader still uses them, or they are too scattered for a payload. Evicting
        # more helps only in the third case, so wait for the first two to end.
        self.environment.wait_for_readers()
        room = need
        # Bound: the room doubles, and `evict_for` raises an error for more than the budget.
        while True:
            self.evictor.let_freed_pages_age()
            if self._try_write(publication):
                return evicted
            room = 2 * room + 2**20
            evicted += self.evictor.evict_for(room, publication.used_names)

    def _require_epoch(self, snapshot: Snapshot, publication: Publication) -> None:
        if epochs_of(snapshot, self.names).is_over(publication.epoch):
            raise PrefixGone(OUTDATED)

    def write(self, small_writes: Sequence[SmallWrite]) -> None:
        """Makes small writes in one transaction, after evicting nodes to make room for them. Raises the errors of
        `publish`."""
        if need_bytes := sum(small_write.need_bytes for small_write in small_writes):
            self.evictor.evict_for(need_bytes, frozenset())
        with self.changes() as changes:
            for small_write in small_writes:
                small_write.put(changes)

    def write_from(self, source: WriteSource) -> None:
        """Makes the small write that a source yields, if it yields one. Raises the errors of `publish`."""
        with source() as small_write:
            if small_write is not None:
                self.write([small_write])

    def quarantine(self, name: bytes, parent: bytes) -> int:
        """Removes a damaged node and all its descendants. Returns the number of removed nodes. `parent` is the node
        that the damaged one continues; the damaged record may not name it."""
        return len(self.remove_subtrees({name: parent}).nodes)

    def remove_subtrees(self, tops: Mapping[bytes, bytes] | Iterable[bytes]) -> Subtrees:
        """Removes nodes and all their descendants, children first. A mapping gives the parent of each node; otherwise
        the nodes' own records do."""
        removed, known, moved = Subtrees([], []), set(tops), set[bytes]()
        left = [(name, tops[name] if isinstance(tops, Mapping) else None) for name in tops]
        # Bound: no node is added twice, and each round removes one, or adds the nodes that continue it.
        while left:
            num_removed = len(removed.nodes)
            with self.changes() as changes:
                # Bound: as above.
                while left and len(removed.nodes) < num_removed + NODES_AT_ONCE:
                    name, parent = left[-1]
                    # A damaged index could contain a cycle.
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
                    has_own_entry = changes.has_record("entries", name) and name not in moved
                    removed.entries.extend([name] if has_own_entry else [])
                    removed.nodes.extend([name] if changes.delete_node(name, parent) else [])
                    moved |= changes.moved_entries
        return removed

    def counts(self) -> dict[str, int]:
        """Returns `Snapshot.counts`, and the bytes in use (`used_bytes`) and of the whole file (`file_bytes`)."""
        with self.reads.snapshot() as snapshot:
            return snapshot.counts() | {"used_bytes": snapshot.used_bytes(), "file_bytes": self.file_bytes()}

    def written(self) -> WrittenBytes:
        """Returns the bytes written to the file: by other processes as far as they have recorded them, and by this
        process. If the store cannot be read, the recorded bytes are those of the last successful read."""
        # Read before the record: bytes that are recorded in between would otherwise count twice.
        recorded_bytes = self.meter.recorded_bytes
        with suppress(CacheError), self.reads.snapshot() as snapshot:
            self._written = read_written(snapshot), recorded_bytes
        return self.written_lately()

    def written_lately(self) -> WrittenBytes:
        """Returns the last result of `written`, plus the bytes that this process has written since. Does not read the
        store."""
        written, recorded_bytes = self._written
        written = msgspec.structs.replace(written, hours=dict(written.hours))
        return self.meter.add_to(written, self.clock(), recorded_bytes)

    def record_written(self) -> None:
        """Records the bytes that this process has written since its last publication, if the store can be written.
        Raises `CacheError`."""
        if self.problem is None and self.meter.total_bytes > self.meter.recorded_bytes:
            with self.changes() as changes:
                recorded = self._put_written(changes)
            self.meter.recorded_bytes = recorded

    def _put_written(self, changes: Changes) -> int:
        """Adds the bytes of this process that the record does not include yet. Returns the meter's `recorded_bytes`
        after the commit."""
        recorded_bytes = self.meter.recorded_bytes
        written = self.meter.add_to(read_written(changes), self.clock(), recorded_bytes)
        changes.put_meta(WRITTEN, encode_record(WRITTEN.encode(), written))
        return written.recorded_bytes

    def longest_prompt(self) -> int:
        """Returns the number of tokens of the longest saved prompt (among the first thousand), 0 if none can be
        read."""
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
        evicted = self.evictor.evict_for(0, frozenset())
        if evicted:
            after = self.counts()
            log.warning(
                "[disk-cache] %s and %s were removed, because they do not fit %s",
                counted(before["entries"] - after["entries"], "saved prompt"),
                format_size(before["used_bytes"] - after["used_bytes"]),
                self.evictor.limit_text(),
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
        """Opens the folder again if needed; see `reopen`. Returns True if it was opened again and the store can be
        written. Never raises."""
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
                changes.now -= publication.unused_s
                changes.put_root(publication.root, publication.root_record)
                last_node, entry = publication.last_node, publication.entry
                if publication.replaced is not None and publication.replaced[0] not in self.evictor.pinned():
                    changes.remove_interim(*publication.replaced)
                for node in publication.nodes:
                    holder = changes.put_node(publication.root, node, self.codec)
                    if holder == node.name and node.replaces:
                        changes.remove_shorter(node)
                    elif node.name == last_node:
                        last_node = holder
                    if publication.anchors is not None and node.kind != NodeKind.BLOCK:
                        is_end = entry is not None and entry.kind in OWN_KINDS and node.name == publication.last_node
                        changes.remove_superseded(
                            *(node, publication.anchors),
                            ttl_s=publication.daemon_ttl_s,
                            pinned=self.evictor.pinned(),
                            has_entry=is_end,
                        )
                if last_node is not None:
                    changes.touch(last_node, Use(changes.now, 0, recorded_ttl(publication.ttl_s)))
                    # A prompt that is a prefix of a longer saved prompt has no entry of its own.
                    if entry is not None and entry.num_tokens and last_node == publication.last_node:
                        changes.put_entry(last_node, entry)
                if entry is not None:
                    before = {name for name in (publication.continued, publication.base) if name is not None}
                    changes.cover(publication.nodes, entry, before)
                if publication.prompt is not None:
                    ttl_s = recorded_ttl(publication.prompt_ttl_s)
                    see(changes, publication.prompt, publication.prompt_group, ttl_s)
        except StoreFull:
            return False
        self.meter.recorded_bytes = recorded
        own_ttls = [publication.prompt_ttl_s, *(node.ttl_s for node in publication.nodes)]
        self.evictor.may_have_own_ttls |= any(ttl_s is not None for ttl_s in own_ttls)
        return True
