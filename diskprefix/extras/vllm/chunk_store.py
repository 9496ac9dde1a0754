"""The chunks of an engine's offloading as blocks of the store. The engine names them by digests.

A chunk is the state of some tokens in all layers of a group, of all ranks. Its block continues the root of the group
and holds the chunk's digest in the place of token ids, which are not known here. So it is named and compared like any
block, and the commands for the store work on it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

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
from diskprefix.store.schema import Kind, RootRecord, node_name
from diskprefix.store.store import Publication
from diskprefix.tokens import ID_BYTES, as_token_ids

log = logging.getLogger("diskprefix")

DIGEST_BYTES = 32
NUM_IDS = DIGEST_BYTES // ID_BYTES
"""A digest in the place of token ids."""
GROUP = "kv_group"
"""The field of an identity with the number of the group."""
_ROW_BYTES = 4096
"""Chunks are whole pages of memory."""
_PUBLICATION_BYTES = 16 * 2**20
"""The bytes of chunks that are written in one transaction, at least one chunk."""
_STEP_S = 1e-5
"""The time by which a chunk counts as used before the one that it continues, so that the ends of prompts are evicted
first. A chunk cannot be restored without those before it."""
_AHEAD_S = 10.0
"""The time by which all uses are recorded too late: a chunk counts as used when it is written, and the order of uses
must outlast that."""


class ChunkKey(NamedTuple):
    """The digest of all tokens up to the end of the chunk, and the number of its group of layers."""

    digest: bytes
    group: int


def chunk_layout(num_bytes: int, dtype: str) -> str:
    """Returns the layout of blocks that hold chunks of `num_bytes` each. `dtype` is torch's name of most of its
    numbers; it decides only how well they are compressed.

    Raises `ValueError` if a chunk is not whole pages.
    """
    if num_bytes < 1 or num_bytes % _ROW_BYTES:
        raise ValueError(f"diskprefix cannot store chunks of {num_bytes} bytes, because they are not whole pages")
    known = dtype if dtype in DTYPES else "uint8"
    dim = _ROW_BYTES // NUM_IDS // DTYPES[known][0]
    group = LayoutGroup(num_bytes // _ROW_BYTES, dim, known, ("chunk",))
    return LayoutText(LAYOUT_VERSION, (group,), (0, "float32")).text()


class ChunkStore:
    """Looks up, loads and saves chunks. `has` and `end_step` are for one thread, and wait for the disk only to look up
    names. `load` and `save` wait for it, and for a copy; each is for a thread of its own."""

    def __init__(self, shared: SharedStore, identity: RankIdentity) -> None:
        """`identity` is that of group 0, for all ranks; its layout is one of `chunk_layout`."""
        self._shared, self._identity = shared, identity
        self._layout = PayloadLayout.parse(identity.layout)
        self.chunk_bytes = self._layout.payload_bytes(NUM_IDS, Kind.BLOCK)
        self._staging = Staging(self.chunk_bytes)
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="kv-reader", initializer=unbind)
        self._roots: dict[int, tuple[bytes, RootRecord]] = {}
        """By group."""
        self._lost: set[ChunkKey] = set()
        """Chunks that could not be loaded: they are missing, even if their damaged blocks cannot be removed."""
        self._opened = ExitStack()
        self._views: list[View] | None = None

    def has(self, key: ChunkKey) -> bool:
        """Returns whether a chunk is stored, as of the first call of the step. False if the store cannot be read."""
        try:
            if self._views is None:
                self._views = self._opened.enter_context(open_views(self._shared.tiers))
            return key not in self._lost and self._found(self._views, key) is not None
        except CacheError as error:
            log.debug("[disk-cache] a chunk was not looked up: %s", error)
            return False

    def end_step(self) -> None:
        """Ends what `has` has opened, so that its pages can be written anew."""
        self._views = None
        self._opened.close()

    def load(self, keys: Sequence[ChunkKey], places: Sequence[Bytes]) -> list[bool]:
        """Reads chunks into `places`, uint8 of shape [chunk_bytes] each. Returns which of them hold their chunk now.
        The content of the others is undefined, and they are missing until they are saved again."""
        try:
            with open_views(self._shared.tiers) as views, ExitStack() as reading:
                begun = [self._begun(views, key, place, reading) for key, place in zip(keys, places, strict=True)]
                loaded = [one is not None and self._ended(*one) for one in begun]
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
                new = [
                    one
                    for one in zip(keys, places, strict=True)
                    if one[0] in self._lost or not self._found(views, one[0])
                ]
        except CacheError as error:
            log.debug("[disk-cache] %d chunks were not saved: %s", len(keys), error)
            return False
        self._lost.difference_update(keys)
        at_once = max(1, _PUBLICATION_BYTES // self.chunk_bytes)
        of_groups = groupby(sorted(new, key=lambda one: one[0].group), lambda one: one[0].group)
        return all(self._publish(group, part) for group, chunks in of_groups for part in batches(list(chunks), at_once))

    def use(self, keys: Sequence[ChunkKey], *, hits: int = 0) -> None:
        """Records that a request has these chunks, in the order of its tokens. `hits` is 1 if they were restored."""
        when = self._shared.store.clock() + _AHEAD_S
        num_after: Counter[int] = Counter()
        for key in reversed(keys):
            self._shared.writer.touch(self._node(key).name, when + num_after[key.group] * _STEP_S, hits=hits)
            num_after[key.group] += 1

    def close(self) -> None:
        """Ends the threads and the step. The store stays open."""
        self.end_step()
        self._readers.shutdown()

    def _root_of(self, group: int) -> tuple[bytes, RootRecord]:
        if group not in self._roots:
            identity = replace(self._identity, fingerprint={**self._identity.fingerprint, GROUP: str(group)})
            self._roots[group] = identity.root(""), identity.record("")
        return self._roots[group]

    def _node(self, key: ChunkKey) -> Node:
        root, _ = self._root_of(key.group)
        return Node(node_name(self._shared.store.secret, root, key.digest, Kind.BLOCK), root, 0, NUM_IDS, Kind.BLOCK)

    def _found(self, views: Sequence[View], key: ChunkKey) -> tuple[Node, View] | None:
        node = self._node(key)
        view = next((view for view in views if view.has(node, key.digest)), None)
        return None if view is None else (node, view)

    def _begun(
        self, views: Sequence[View], key: ChunkKey, place: Bytes, reading: ExitStack
    ) -> tuple[Node, View, list[Future[None]]] | None:
        """Begins to read a chunk, piece by piece; None if it is not stored. `reading` ends once nothing is read."""
        if (found := self._found(views, key)) is None:
            return None
        node, view = found
        cuts, rows = self._layout.cuts(NUM_IDS, Kind.BLOCK), place.reshape(-1, _ROW_BYTES)
        reads: list[Future[None]] = []
        # What is read belongs to the view: no thread may still read it when that is closed.
        reading.callback(wait, reads)
        for cut, write in zip(cuts, view.pieces(node, cuts, range(len(cuts))), strict=True):
            reads.append(self._readers.submit(write, rows[cut.first_row : cut.first_row + cut.piece.num_rows]))
        return node, view, reads

    def _ended(self, node: Node, view: View, reads: Sequence[Future[None]]) -> bool:
        try:
            for read in reads:
                read.result()
        except StoreCorrupt as error:
            view.drop(node, error)
            return False
        return True

    def _publish(self, group: int, chunks: Sequence[tuple[ChunkKey, Bytes]]) -> bool:
        save, writer = Save(self._shared.store.epoch), self._shared.writer
        if (room := writer.reserve(len(chunks) * self.chunk_bytes)) is None:
            return False
        try:
            root, record = self._root_of(group)
            publication = Publication(
                epoch=save.epoch,
                root=root,
                root_record=record,
                nodes=tuple(self._captured(key, place) for key, place in chunks),
            )
        except BaseException:
            room.release()
            raise
        writer.add(save, publication, [room], is_last=True)
        return True

    def _captured(self, key: ChunkKey, place: Bytes) -> NewNode:
        payload, node = self._staging.take(), self._node(key)
        payload[:] = place
        pieces = self._layout.pieces(NUM_IDS, Kind.BLOCK)
        return NewNode(
            name=node.name,
            parent=node.parent,
            position=0,
            token_ids=as_token_ids(np.frombuffer(key.digest, "<i4")),
            kind=Kind.BLOCK,
            payload=split_payload(payload.data, pieces),
            pieces=pieces,
        )
