"""The face for engines that name chunks of state by digests, not by token ids. FACE.md has its verbs in one table.

A chunk is the state of some tokens in all layers of a group. Its block continues the root of the group and holds the
chunk's digest in place of token ids, which are not known here. So it is named and compared like any block, and the
commands for the store work on it. A chunk that is not whole pages ends with zeros in the store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from diskprefix.errors import CacheError, StoreCorrupt
from diskprefix.prefixstore.cache.tiers.loading import READER_THREADS
from diskprefix.prefixstore.cache.tiers.nodes import Node
from diskprefix.prefixstore.cache.tiers.tier import View, open_views
from diskprefix.prefixstore.shared_store import SharedStore
from diskprefix.prefixstore.state_identity import StateIdentity
from diskprefix.prefixstore.store.changes import NewNode, batches
from diskprefix.prefixstore.store.codec.codec import Piece
from diskprefix.prefixstore.store.codec.planes import Bytes
from diskprefix.prefixstore.store.pieces import (
    DTYPES,
    LAYOUT_VERSION,
    Hold,
    LayoutGroup,
    LayoutText,
    PayloadLayout,
    split_payload,
)
from diskprefix.prefixstore.store.reads import Patience
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import NodeKind, node_name
from diskprefix.prefixstore.store.store import Publication
from diskprefix.prefixstore.store.writer import Room
from diskprefix.processors import unbind
from diskprefix.staging import Staging
from diskprefix.tokens import HASH_BYTES, ID_BYTES, as_token_ids

log = logging.getLogger("diskprefix")

DIGEST_BYTES = 32
NUM_IDS = DIGEST_BYTES // ID_BYTES
"""The number of token ids that a digest replaces."""
GROUP = "kv_group"
"""The field of an identity that has the index of the group."""
_ROW_BYTES = 4096
"""The size of a page of memory."""
_PUBLICATION_BYTES = 16 * 2**20
"""The most bytes of chunks in one transaction, which has at least one chunk."""
_STEP_S = 1e-5
"""A chunk is recorded as used this much earlier than the chunk before it, so that the ends of prompts are evicted
first: a chunk cannot be restored without the chunks before it."""
_AHEAD_S = 10.0
"""Uses are recorded this far in the future: writing a chunk counts as a use, and must not change the order of uses."""
_WRITE_S = 30.0
"""`write` waits at most this long for a chunk to be written."""
_LOOK_S = 0.5
_DELETE_S = 8.0
"""`delete` waits at most this long."""


class ChunkKey(NamedTuple):
    """The digest of all tokens up to the end of the chunk, and the group that it belongs to."""

    digest: bytes
    group: Hashable


class ChunkGroup(NamedTuple):
    """The root and the size of a group's chunks. `identity` is one of `chunk_identity`; `tenant` is the text of a
    `values.Tenant`."""

    identity: StateIdentity
    chunk_bytes: int
    tenant: str = ""


def chunk_identity(model: str, fingerprint: Mapping[str, str], num_bytes: int, dtype: str) -> StateIdentity:
    """Returns the identity of chunks of `num_bytes` each. `fingerprint` has all that changes their numbers or form.
    `dtype` is torch's name for the dtype of most values; it decides only how well they are compressed."""
    assert num_bytes > 0
    known = dtype if dtype in DTYPES else "uint8"
    dim = _ROW_BYTES // NUM_IDS // DTYPES[known][0]
    group = LayoutGroup(-(-num_bytes // _ROW_BYTES), dim, known, ("chunk",))
    layout = LayoutText(LAYOUT_VERSION, (group,), (0, "float32")).text()
    return StateIdentity(model, NUM_IDS, layout, LAYOUT_VERSION, fingerprint)


class _Root:
    """The root of a group, and the form of its blocks."""

    def __init__(self, group: ChunkGroup) -> None:
        self.name = group.identity.root(group.tenant)
        self.record = replace(group.identity.record(group.tenant), has_prompts=False)
        layout = PayloadLayout.parse(group.identity.layout)
        self.chunk_bytes, self.block_bytes = group.chunk_bytes, layout.payload_bytes(NUM_IDS, NodeKind.BLOCK)
        self.pieces: tuple[Piece, ...] = layout.pieces(NUM_IDS, NodeKind.BLOCK)


class _Written:
    """Tells when a publication is written or lost. A `Hold`."""

    def __init__(self, save: Save) -> None:
        self._save, self._has_ended = save, threading.Event()

    def release(self) -> None:
        self._has_ended.set()

    def frees(self) -> bool:
        return False

    def wait(self, seconds: float) -> bool:
        return self._has_ended.wait(seconds)

    @property
    def is_whole(self) -> bool:
        return self._has_ended.is_set() and self._save.lost is None


class ChunkStore:
    """Looks up, loads, saves and deletes chunks. `has` and `end_step` are for one thread, and wait for the disk only to
    look up names. The other methods are for any thread. `load`, `save`, `write` and `delete` wait for the disk."""

    def __init__(self, shared: SharedStore, group_of: Callable[[Any], ChunkGroup]) -> None:
        """`group_of` describes the group of a key."""
        self._shared, self._group_of = shared, group_of
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="kv-reader", initializer=unbind)
        self._roots: dict[Hashable, _Root] = {}
        self._staging: dict[int, Staging] = {}
        """By the size of a block."""
        self._lost: set[ChunkKey] = set()
        """Chunks that could not be loaded. They count as missing, even if their damaged blocks cannot be removed."""
        self._opened = ExitStack()
        self._views: list[View] | None = None

    def has(self, key: ChunkKey) -> bool:
        """Returns whether a chunk is stored, as of the first call of the step. False if the store cannot be read."""
        try:
            if self._views is None:
                self._views = self._opened.enter_context(open_views(self._shared.tiers))
            return key not in self._lost and self._find(self._views, key) is not None
        except CacheError as error:
            log.debug("[disk-cache] a chunk was not looked up: %s", error)
            return False

    def end_step(self) -> None:
        """Closes the views that `has` opened, so that the file's freed pages can be reused."""
        self._views = None
        self._opened.close()

    def are_stored(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Returns which chunks are stored now: none if the store cannot be read, or if the disk does not answer within
        seconds."""
        try:
            return self._shared.store.reads.ask(partial(self._are_stored, keys), Patience())
        except CacheError as error:
            log.debug("[disk-cache] %d chunks were not looked up: %s", len(keys), error)
            return [False] * len(keys)

    def load(self, keys: Sequence[ChunkKey], places: Sequence[Bytes]) -> list[bool]:
        """Reads chunks into `places`, uint8 of shape [chunk_bytes] each. Returns which of them hold their chunk now.
        The content of the others is undefined, and they are missing until they are saved again."""
        try:
            with open_views(self._shared.tiers) as views, ExitStack() as reading:
                started = [self._start_read(views, *chunk, reading) for chunk in zip(keys, places, strict=True)]
                loaded = [read is not None and self._finish_read(*read) for read in started]
        except CacheError as error:
            log.warning("[disk-cache] %d chunks were not loaded: %s", len(keys), error)
            loaded = [False] * len(keys)
        self._lost.update(key for key, is_loaded in zip(keys, loaded, strict=True) if not is_loaded)
        self.use([key for key, is_loaded in zip(keys, loaded, strict=True) if is_loaded], hits=1)
        return loaded

    def save(self, keys: Sequence[ChunkKey], places: Sequence[Bytes]) -> bool:
        """Copies the chunks that are not stored from `places`, and submits the copies to the writer. Returns False if
        the buffer had no room for some, or if the store cannot be used."""
        if (new := self._missing(dict(zip(keys, places, strict=True)))) is None:
            return False
        for part in self._parts(new):
            if (room := self._reserve(part)) is None:
                return False
            self._publish(part, room)
        return True

    def write(self, keys: Sequence[ChunkKey], places: Sequence[Bytes]) -> dict[ChunkKey, bool]:
        """Writes the chunks that are not stored from `places`, and waits until they are in the file, for which it
        copies them. Returns, for each of these, whether it was written. Gives up when the writer makes no progress."""
        chunks = dict(zip(keys, places, strict=True))
        if (new := self._missing(chunks)) is None:
            return dict.fromkeys(chunks, False)
        written: list[tuple[Mapping[ChunkKey, Bytes], _Written | None]] = []
        for part in self._parts(new):
            room = self._reserve(part, time.monotonic() + _WRITE_S)
            written.append((part, None if room is None else self._publish(part, room)))
        for _, last in written:
            deadline = time.monotonic() + _WRITE_S
            # Bound: `deadline`.
            while last is not None and self._is_writing(deadline) and not last.wait(_LOOK_S):
                pass
        return {key: last is not None and last.is_whole for part, last in written for key in part}

    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Removes stored chunks. Returns which were removed: none if the store cannot be written. If it cannot be
        written within seconds, they may be removed later."""
        store = self._shared.store
        is_stored = self.are_stored(keys)
        nodes = [self._node(key) for key in keys]
        tops = {node.name: node.parent for node, is_there in zip(nodes, is_stored, strict=True) if is_there}
        if not tops or store.problem is not None or store.write_stall is not None:
            return [False] * len(keys)
        try:
            removed = frozenset(store.reads.ask(partial(store.remove_subtrees, tops), Patience(_DELETE_S)).nodes)
        except CacheError as error:
            log.warning("[disk-cache] %d chunks were not deleted: %s", len(tops), error)
            return [False] * len(keys)
        return [node.name in removed for node in nodes]

    def pin(self, key: ChunkKey) -> None:
        """Keeps a chunk from eviction by this process until `unpin`. An eviction that is running may still take it."""
        self._shared.store.evictor.pin(self._node(key).name)

    def unpin(self, key: ChunkKey) -> None:
        self._shared.store.evictor.unpin(self._node(key).name)

    def use(self, keys: Sequence[ChunkKey], *, hits: int = 0) -> None:
        """Records that a request has these chunks, in the order of its tokens. `hits` is 1 if they were restored."""
        when = self._shared.store.clock() + _AHEAD_S
        num_after: Counter[Hashable] = Counter()
        for key in reversed(keys):
            self._shared.writer.touch(self._node(key).name, when + num_after[key.group] * _STEP_S, hits=hits)
            num_after[key.group] += 1

    def listed(
        self,
        group_of: Callable[[str], Hashable | None],
        after: tuple[str, bytes] | None = None,
        limit: int | None = None,
    ) -> list[ChunkKey]:
        """Returns the chunks in the file, by the names of their roots and their digests, both in ascending order: at
        most `limit`, those after the root (as hex) and digest of `after`. `group_of` returns the group of a root by the
        text of its identity, None to leave it out. Raises `CacheError`."""
        reads = self._shared.store.reads
        return reads.ask(lambda: [*islice(self._in_file(group_of, after), limit)])

    def clear(self, is_wanted: Callable[[str, str], bool]) -> bool:
        """Removes the chunks under all roots for which `is_wanted(model, identity)` holds, of every tenant, identity
        being the text of a root's. Waits for the disk without a limit. Returns False if the store cannot be written."""
        store = self._shared.store
        try:
            with store.reads.snapshot() as snapshot:
                roots = [root for root, record in snapshot.roots() if is_wanted(record.model, record.identity)]
                # The index lists a child as its parent, its token ids, its name.
                chunks = {key[-HASH_BYTES:]: root for root in roots for key in snapshot.keys_under("children", root)}
            store.remove_subtrees(chunks)
        except CacheError as error:
            log.warning("[disk-cache] not cleared: %s", error)
            return False
        return True

    def close(self) -> None:
        """Ends the step and the threads. The store stays open."""
        self.end_step()
        self._readers.shutdown()

    def _in_file(
        self, group_of: Callable[[str], Hashable | None], after: tuple[str, bytes] | None
    ) -> Iterator[ChunkKey]:
        with self._shared.store.reads.snapshot() as snapshot:
            groups = {root: group_of(record.identity) for root, record in snapshot.roots()}
            for root in sorted(groups):
                if (group := groups[root]) is None or (after is not None and root.hex() < after[0]):
                    continue
                start = after[1] if after is not None and root.hex() == after[0] else b""
                # The index lists a child as its parent, its token ids, its name.
                for key in snapshot.keys_under("children", root, root + start):
                    if (digest := key[HASH_BYTES:-HASH_BYTES]) != start:
                        yield ChunkKey(digest, group)

    def _are_stored(self, keys: Sequence[ChunkKey]) -> list[bool]:
        with open_views(self._shared.tiers) as views:
            return [key not in self._lost and self._find(views, key) is not None for key in keys]

    def _missing(self, chunks: Mapping[ChunkKey, Bytes]) -> dict[ChunkKey, Bytes] | None:
        """Returns the chunks that are not stored, None if the store cannot be used."""
        if self._shared.store.problem is not None:
            return None
        try:
            with open_views(self._shared.tiers) as views:
                # A damaged block is removed before a new one is written.
                new = {key: chunks[key] for key in chunks if key in self._lost or not self._find(views, key)}
        except CacheError as error:
            log.debug("[disk-cache] %d chunks were not saved: %s", len(chunks), error)
            return None
        self._lost.difference_update(chunks)
        return new

    def _parts(self, chunks: Mapping[ChunkKey, Bytes]) -> Iterator[Mapping[ChunkKey, Bytes]]:
        """Yields the chunks of each group in parts for one transaction each."""
        groups: dict[Hashable, list[ChunkKey]] = {}
        for key in chunks:
            groups.setdefault(key.group, []).append(key)
        for group, keys in groups.items():
            for part in batches(keys, max(1, _PUBLICATION_BYTES // self._root_of(group).block_bytes)):
                yield {key: chunks[key] for key in part}

    def _reserve(self, part: Mapping[ChunkKey, Bytes], deadline: float = 0.0) -> Room | None:
        """Reserves the bytes of some chunks in the write buffer, and waits for them until the deadline. Returns None if
        there is no room."""
        writer, num_bytes = self._shared.writer, sum(self._root_of(key.group).block_bytes for key in part)
        # Bound: `deadline`.
        while (room := writer.reserve(num_bytes)) is None and self._is_writing(deadline):
            writer.write_pages(_LOOK_S)
        return room

    def _is_writing(self, deadline: float) -> bool:
        """Returns whether it is worth waiting for the writer."""
        store = self._shared.store
        return time.monotonic() < deadline and store.problem is None and store.write_stall is None

    def _root_of(self, group: Hashable) -> _Root:
        if group not in self._roots:
            self._roots[group] = _Root(self._group_of(group))
        return self._roots[group]

    def _node(self, key: ChunkKey) -> Node:
        root = self._root_of(key.group).name
        return Node(
            node_name(self._shared.store.secret, root, key.digest, NodeKind.BLOCK), root, 0, NUM_IDS, NodeKind.BLOCK
        )

    def _find(self, views: Sequence[View], key: ChunkKey) -> tuple[Node, View] | None:
        """Returns a chunk's node and the first view that has it, or None."""
        node = self._node(key)
        view = next((view for view in views if view.has(node, key.digest)), None)
        return None if view is None else (node, view)

    def _start_read(
        self, views: Sequence[View], key: ChunkKey, place: Bytes, reading: ExitStack
    ) -> tuple[Node, View, list[Future[None]], Callable[[], None]] | None:
        """Starts reading the pieces of a chunk. Returns None if it is not stored. Closing `reading` waits for the
        reads. The last item of the result completes the place after them."""
        if (stored := self._find(views, key)) is None:
            return None
        node, view = stored
        root = self._root_of(key.group)
        is_whole = root.chunk_bytes == root.block_bytes
        block = place if is_whole else self._take(root)
        rows = block.reshape(-1, _ROW_BYTES)
        reads: list[Future[None]] = []
        # The view owns the memory that is read, so it must not be closed before.
        reading.callback(wait, reads)
        for piece, write in zip(
            root.pieces, view.piece_writes(node, root.pieces, range(len(root.pieces))), strict=True
        ):
            reads.append(self._readers.submit(write, rows[piece.rows]))
        return node, view, reads, (lambda: None) if is_whole else partial(_copy, place, block)

    def _finish_read(self, node: Node, view: View, reads: Sequence[Future[None]], complete: Callable[[], None]) -> bool:
        """Waits for the reads of a chunk. Returns False, and drops its block, if the block is damaged."""
        try:
            for read in reads:
                read.result()
        except StoreCorrupt as error:
            view.drop_damaged(node, error)
            return False
        complete()
        return True

    def _publish(self, part: Mapping[ChunkKey, Bytes], room: Room) -> _Written:
        """Submits copies of a group's chunks to the writer, in one transaction."""
        root = self._root_of(next(iter(part)).group)
        save = Save(self._shared.store.epochs.of(root.record.tenant), f"a part of {len(part)} chunks")
        written = _Written(save)
        try:
            publication = Publication(
                epoch=save.epoch,
                root=root.name,
                root_record=root.record,
                nodes=tuple(self._captured(key, place) for key, place in part.items()),
            )
        except BaseException:
            room.release()
            raise
        holds: list[Hold] = [room, written]
        self._shared.writer.queue_publication(save, publication, holds, is_last=True)
        return written

    def _captured(self, key: ChunkKey, place: Bytes) -> NewNode:
        root, node = self._root_of(key.group), self._node(key)
        payload = self._take(root)
        payload[: root.chunk_bytes] = place
        payload[root.chunk_bytes :] = 0
        return NewNode(
            name=node.name,
            parent=node.parent,
            position=0,
            token_ids=as_token_ids(np.frombuffer(key.digest, "<i4")),
            kind=NodeKind.BLOCK,
            payload=split_payload(payload.data, root.pieces),
            pieces=root.pieces,
        )

    def _take(self, root: _Root) -> Bytes:
        return self._staging.setdefault(root.block_bytes, Staging(root.block_bytes)).take()


class NoChunks(ChunkStore):
    """The chunks of an engine whose store could not be opened: none is stored."""

    def __init__(self) -> None:
        """Opens nothing."""

    def has(self, key: ChunkKey) -> bool:
        del key
        return False

    def end_step(self) -> None:
        """Does nothing."""

    def are_stored(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [False] * len(keys)

    def load(self, keys: Sequence[ChunkKey], places: Sequence[Bytes]) -> list[bool]:
        del places
        return [False] * len(keys)

    def save(self, keys: Sequence[ChunkKey], places: Sequence[Bytes]) -> bool:
        del keys, places
        return False

    def write(self, keys: Sequence[ChunkKey], places: Sequence[Bytes]) -> dict[ChunkKey, bool]:
        del places
        return dict.fromkeys(keys, False)

    def delete(self, keys: Sequence[ChunkKey]) -> list[bool]:
        return [False] * len(keys)

    def pin(self, key: ChunkKey) -> None:
        """Does nothing."""

    def unpin(self, key: ChunkKey) -> None:
        """Does nothing."""

    def use(self, keys: Sequence[ChunkKey], *, hits: int = 0) -> None:
        """Does nothing."""

    def listed(
        self,
        group_of: Callable[[str], Hashable | None],
        after: tuple[str, bytes] | None = None,
        limit: int | None = None,
    ) -> list[ChunkKey]:
        del group_of, after, limit
        return []

    def clear(self, is_wanted: Callable[[str, str], bool]) -> bool:
        del is_wanted
        return False

    def close(self) -> None:
        """Does nothing."""


def chunks_in(shared: SharedStore | None, group_of: Callable[[Any], ChunkGroup]) -> ChunkStore:
    """Returns the chunks of a store; none without one."""
    return NoChunks() if shared is None else ChunkStore(shared, group_of)


def _copy(place: Bytes, block: Bytes) -> None:
    place[:] = block[: len(place)]
