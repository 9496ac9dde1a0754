"""The chunks of vLLM's offloading as blocks of the store. vLLM names chunks by digests.

A chunk is the state of some tokens in all layers of a group, of all ranks. Its block continues the root of the group
and holds the chunk's digest in place of token ids, which are not known here. So it is named and compared like any
block, and the commands for the store work on it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from itertools import groupby
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from diskprefix.cache.tiers.loading import READER_THREADS
from diskprefix.cache.tiers.nodes import Node
from diskprefix.cache.tiers.tier import View, open_views
from diskprefix.errors import CacheError, StoreCorrupt
from diskprefix.extras.vllm.plans import RankIdentity
from diskprefix.extras.vllm.processors import unbind
from diskprefix.extras.vllm.shared_store import SharedStore
from diskprefix.extras.vllm.staging import Staging
from diskprefix.store.changes import NewNode, batches
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.pieces import DTYPES, LAYOUT_VERSION, LayoutGroup, LayoutText, PayloadLayout, split_payload
from diskprefix.store.save import Save
from diskprefix.store.schema import NodeKind, RootRecord, node_name
from diskprefix.store.store import Publication
from diskprefix.tokens import ID_BYTES, as_token_ids

log = logging.getLogger("diskprefix")

DIGEST_BYTES = 32
NUM_IDS = DIGEST_BYTES // ID_BYTES
"""The number of token ids that a digest replaces."""
GROUP = "kv_group"
"""The field of an identity that has the index of the group."""
_ROW_BYTES = 4096
"""The size of a page of memory. Chunks are whole pages."""
_PUBLICATION_BYTES = 16 * 2**20
"""The most bytes of chunks in one transaction, which has at least one chunk."""
_STEP_S = 1e-5
"""A chunk is recorded as used this much earlier than the chunk before it, so that the ends of prompts are evicted
first: a chunk cannot be restored without the chunks before it."""
_AHEAD_S = 10.0
"""Uses are recorded this far in the future: writing a chunk counts as a use, and must not change the order of uses."""


class ChunkKey(NamedTuple):
    """The digest of all tokens up to the end of the chunk, and the index of its group of layers."""

    digest: bytes
    group: int


def chunk_layout(num_bytes: int, dtype: str) -> str:
    """Returns the layout of blocks that hold a chunk of `num_bytes` each. `dtype` is torch's name for the dtype of most
    values; it decides only how well they are compressed. Raises `ValueError` if a chunk is not whole pages."""
    if num_bytes < 1 or num_bytes % _ROW_BYTES:
        raise ValueError(f"diskprefix cannot store chunks of {num_bytes} bytes, because they are not whole pages")
    known = dtype if dtype in DTYPES else "uint8"
    dim = _ROW_BYTES // NUM_IDS // DTYPES[known][0]
    group = LayoutGroup(num_bytes // _ROW_BYTES, dim, known, ("chunk",))
    return LayoutText(LAYOUT_VERSION, (group,), (0, "float32")).text()


class ChunkStore:
    """Looks up, loads and saves chunks. `has` and `end_step` are for one thread, and wait for the disk only to look up
    names. `load` and `save` wait for the disk and copy; each is for a thread of its own."""

    def __init__(self, shared: SharedStore, identity: RankIdentity) -> None:
        """`identity` is the identity of group 0 for all ranks, with a layout from `chunk_layout`."""
        self._shared, self._identity = shared, identity
        self._layout = PayloadLayout.parse(identity.layout)
        self.chunk_bytes = self._layout.payload_bytes(NUM_IDS, NodeKind.BLOCK)
        self._staging = Staging(self.chunk_bytes)
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="kv-reader", initializer=unbind)
        self._roots: dict[int, tuple[bytes, RootRecord]] = {}
        """By group."""
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
        if self._shared.store.problem is not None:
            return False
        try:
            with open_views(self._shared.tiers) as views:
                # A damaged block is removed before a new one is written.
                chunks = zip(keys, places, strict=True)
                new = [chunk for chunk in chunks if chunk[0] in self._lost or not self._find(views, chunk[0])]
        except CacheError as error:
            log.debug("[disk-cache] %d chunks were not saved: %s", len(keys), error)
            return False
        self._lost.difference_update(keys)
        at_once = max(1, _PUBLICATION_BYTES // self.chunk_bytes)
        by_group = groupby(sorted(new, key=lambda chunk: chunk[0].group), lambda chunk: chunk[0].group)
        return all(self._publish(group, part) for group, some in by_group for part in batches(list(some), at_once))

    def use(self, keys: Sequence[ChunkKey], *, hits: int = 0) -> None:
        """Records that a request has these chunks, in the order of its tokens. `hits` is 1 if they were restored."""
        when = self._shared.store.clock() + _AHEAD_S
        num_after: Counter[int] = Counter()
        for key in reversed(keys):
            self._shared.writer.touch(self._node(key).name, when + num_after[key.group] * _STEP_S, hits=hits)
            num_after[key.group] += 1

    def close(self) -> None:
        """Ends the step and the threads. The store stays open."""
        self.end_step()
        self._readers.shutdown()

    def _root_of(self, group: int) -> tuple[bytes, RootRecord]:
        if group not in self._roots:
            identity = replace(self._identity, fingerprint={**self._identity.fingerprint, GROUP: str(group)})
            self._roots[group] = identity.root(""), identity.record("")
        return self._roots[group]

    def _node(self, key: ChunkKey) -> Node:
        root, _ = self._root_of(key.group)
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
    ) -> tuple[Node, View, list[Future[None]]] | None:
        """Starts reading the pieces of a chunk. Returns None if it is not stored. Closing `reading` waits for the
        reads."""
        if (stored := self._find(views, key)) is None:
            return None
        node, view = stored
        pieces, rows = self._layout.pieces(NUM_IDS, NodeKind.BLOCK), place.reshape(-1, _ROW_BYTES)
        reads: list[Future[None]] = []
        # The view owns the memory that is read, so it must not be closed before.
        reading.callback(wait, reads)
        for piece, write in zip(pieces, view.piece_writes(node, pieces, range(len(pieces))), strict=True):
            reads.append(self._readers.submit(write, rows[piece.rows]))
        return node, view, reads

    def _finish_read(self, node: Node, view: View, reads: Sequence[Future[None]]) -> bool:
        """Waits for the reads of a chunk. Returns False, and drops its block, if the block is damaged."""
        try:
            for read in reads:
                read.result()
        except StoreCorrupt as error:
            view.drop_damaged(node, error)
            return False
        return True

    def _publish(self, group: int, chunks: Sequence[tuple[ChunkKey, Bytes]]) -> bool:
        root, record = self._root_of(group)
        save, writer = Save(self._shared.store.epochs.of(record.tenant)), self._shared.writer
        if (room := writer.reserve(len(chunks) * self.chunk_bytes)) is None:
            return False
        try:
            publication = Publication(
                epoch=save.epoch,
                root=root,
                root_record=record,
                nodes=tuple(self._captured(key, place) for key, place in chunks),
            )
        except BaseException:
            room.release()
            raise
        writer.queue_publication(save, publication, [room], is_last=True)
        return True

    def _captured(self, key: ChunkKey, place: Bytes) -> NewNode:
        payload, node = self._staging.take(), self._node(key)
        payload[:] = place
        pieces = self._layout.pieces(NUM_IDS, NodeKind.BLOCK)
        return NewNode(
            name=node.name,
            parent=node.parent,
            position=0,
            token_ids=as_token_ids(np.frombuffer(key.digest, "<i4")),
            kind=NodeKind.BLOCK,
            payload=split_payload(payload.data, pieces),
            pieces=pieces,
        )
