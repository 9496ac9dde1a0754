"""The tiers of one machine: the writer's buffer in memory, and the store on the disk."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice

import numpy as np

from diskprefix.cache.tiers.nodes import Node
from diskprefix.cache.tiers.tier import TierName, Write
from diskprefix.errors import StoreCorrupt
from diskprefix.store.changes import NewNode
from diskprefix.store.codec.codec import Piece, decode_piece, piece_seed, populate
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.pieces import Cut
from diskprefix.store.save import Save
from diskprefix.store.schema import MAX_PREFILL_S, Kind, NodeRecord, RootRecord
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.store import Publication, Store
from diskprefix.store.writer import Writer
from diskprefix.tokens import TokenIds, common_prefix_length

log = logging.getLogger("diskprefix")

_TRIES = 64
"""Nodes that are tried to find one that shares a part of the prompt. Few are of no use: damaged ones."""


def publisher(writer: Writer, save: Save, root: bytes, record: RootRecord) -> Callable[[tuple[NewNode, ...]], bool]:
    """Returns a function that adds nodes of one prompt, parents first, to a save, with their payloads in the buffer of
    the writer. It returns False if there is no room."""

    def publish(nodes: tuple[NewNode, ...]) -> bool:
        publication = Publication(epoch=save.epoch, root=root, root_record=record, nodes=nodes)
        room = writer.reserve(publication.payload_bytes)
        if room is not None:
            writer.add(save, publication, [room])
        return room is not None

    return publish


@dataclass(frozen=True)
class BufferTier:
    """The buffer of a writer, as a `Tier`."""

    writer: Writer

    @contextmanager
    def view(self) -> Iterator[BufferView]:
        with self.writer.view() as pending:
            yield BufferView(pending)


class BufferView:
    """The nodes that wait at one moment, with their raw payloads. See `View`."""

    tier: TierName = "memory"

    def __init__(self, pending: Mapping[bytes, NewNode]) -> None:
        self._pending = pending
        self.damaged: set[bytes] = set()

    def has(self, node: Node, token_ids: bytes) -> bool:
        found = self._pending.get(node.name)
        return (
            found is not None
            and _node(found) == node
            and found.token_ids.tobytes() == token_ids
            and node.name not in self.damaged
        )

    def similar(self, parent: bytes, token_ids: TokenIds) -> Iterator[tuple[Node, TokenIds]]:
        ahead = [found for found in self._pending.values() if found.parent == parent and found.name not in self.damaged]
        ahead.sort(key=lambda found: (common_prefix_length(found.token_ids, token_ids), len(found.token_ids)))
        yield from ((_node(found), found.token_ids) for found in reversed(ahead))

    def num_children(self, parent: bytes) -> int:
        return self._children[parent]

    @cached_property
    def _children(self) -> Counter[bytes]:
        return Counter(found.parent for found in self._pending.values())

    def prefill_s(self, node: Node) -> float:
        return self._pending[node.name].prefill_s

    def pieces(self, node: Node, cuts: Sequence[Cut], needed: Sequence[int]) -> Iterator[Write]:  # noqa: ARG002
        for number in needed:
            yield partial(_copy, self._pending[node.name], number)

    def drop(self, node: Node, error: StoreCorrupt) -> None:  # noqa: ARG002 (the writer drops it itself; see `View`)
        self.damaged.add(node.name)


def _node(found: NewNode) -> Node:
    return Node(found.name, found.parent, found.position, len(found.token_ids), found.kind)


def _copy(node: NewNode, number: int, out: Bytes) -> None:
    # The writer, which checks that as well, may not have come to it.
    if not node.is_sound(number):
        raise StoreCorrupt("its state is not finite")
    out[...] = np.frombuffer(node.payload[number], dtype=np.uint8).reshape(out.shape)


@dataclass(frozen=True)
class DiskTier:
    """A store, as a `Tier`. `quarantine` has a node removed, given its name and its parent's."""

    store: Store
    quarantine: Callable[[bytes, bytes], object]

    @contextmanager
    def view(self) -> Iterator[DiskView]:
        with self.store.snapshot() as snapshot:
            yield DiskView(snapshot, self._remove)

    def _remove(self, node: Node, error: StoreCorrupt) -> None:
        what = "checkpoint" if node.kind == Kind.CHECKPOINT else "block"
        log.warning("[disk-cache] %s %s is damaged and will be removed: %s", what, node.name.hex(), error)
        self.quarantine(node.name, node.parent)


class DiskView:
    """A snapshot of a store. See `View`."""

    tier: TierName = "disk"

    def __init__(self, snapshot: Snapshot, on_damaged: Callable[[Node, StoreCorrupt], object]) -> None:
        """`on_damaged` is called for each node that is found damaged."""
        self._snapshot = snapshot
        self._on_damaged = on_damaged
        self.damaged: set[bytes] = set()

    def has(self, node: Node, token_ids: bytes) -> bool:
        if node.name in self.damaged:
            return False
        try:
            return self._snapshot.has(node.name, node.parent, node.position, node.kind, token_ids)
        except StoreCorrupt as error:
            self.drop(node, error)
            return False

    def similar(self, parent: bytes, token_ids: TokenIds) -> Iterator[tuple[Node, TokenIds]]:
        for name in islice(self._snapshot.similar_children(parent, token_ids.tobytes()), _TRIES):
            record = self._sound_record(name, parent)
            if record is not None and record.parent == parent:
                node = Node(name, parent, record.position, record.num_tokens, record.kind)
                yield node, record.token_ids

    def num_children(self, parent: bytes) -> int:
        try:
            usage = self._snapshot.usage(parent)
        except StoreCorrupt:
            return 0
        return 0 if usage is None else usage.children

    def prefill_s(self, node: Node) -> float:
        try:
            usage = self._snapshot.usage(node.name)
        except StoreCorrupt:
            return 0.0
        return usage.prefill_s if usage is not None and 0 < usage.prefill_s < MAX_PREFILL_S else 0.0

    def pieces(self, node: Node, cuts: Sequence[Cut], needed: Sequence[int]) -> Iterator[Write]:
        for number, stored in zip(needed, self._snapshot.pieces_at(node.name, needed), strict=True):
            yield partial(self._decode, node.name, number, stored, cuts[number].piece)

    def drop(self, node: Node, error: StoreCorrupt) -> None:
        self.damaged.add(node.name)
        self._on_damaged(node, error)

    def _sound_record(self, name: bytes, parent: bytes) -> NodeRecord | None:
        """Returns the record of a node that is listed as continuing `parent`; None if it is missing or damaged."""
        if name in self.damaged:
            return None
        try:
            return self._snapshot.node(name)
        except StoreCorrupt as error:
            self.drop(Node(name, parent, 0, 0, Kind.BLOCK), error)
            return None

    def _decode(self, name: bytes, index: int, stored: memoryview | None, piece: Piece, out: Bytes) -> None:
        if stored is None:
            raise StoreCorrupt("a piece of its payload is missing")
        populate(stored)
        decode_piece(stored, piece, piece_seed(name, index), out)
