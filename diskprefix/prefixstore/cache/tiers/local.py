"""The tiers of one machine: the writer's buffer in memory, and the store on the disk."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import islice

import numpy as np

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.cache.tiers.nodes import Node
from diskprefix.prefixstore.cache.tiers.tier import TierName, Write
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.codec.codec import Piece, decode_piece, piece_seed, populate
from diskprefix.prefixstore.store.codec.planes import Bytes
from diskprefix.prefixstore.store.schema import MAX_PREFILL_S, NodeKind
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.writer import Waiting, Writer
from diskprefix.tokens import TokenIds, common_prefix_length

log = logging.getLogger("diskprefix")

_MAX_TRIES = 64
"""The maximum number of nodes that are tried to find one that shares a part of the prompt. Damaged ones are few."""


class BufferView:
    """A view of the nodes that wait, with their payloads as they are in memory."""

    tier: TierName = "memory"

    def __init__(self, waiting: Waiting) -> None:
        self._pending, self._ends = waiting
        self.damaged: set[bytes] = set()
        self.unverified: set[bytes] = set()

    def has(self, node: Node, token_ids: bytes) -> bool:
        new = None if node.name in self.damaged else self._pending.get(node.name)
        is_there = new is not None and _node(new) == node and new.token_ids.tobytes() == token_ids
        if is_there and new is not None and new.is_unverified:
            self.unverified.add(node.name)
        return is_there

    def similar(self, parent: bytes, token_ids: TokenIds) -> Iterator[tuple[Node, TokenIds]]:
        children = [new for new in self._pending.values() if new.parent == parent and new.name not in self.damaged]
        children.sort(key=lambda new: (common_prefix_length(new.token_ids, token_ids), len(new.token_ids)))
        self.unverified.update(new.name for new in children if new.is_unverified)
        yield from ((_node(new), new.token_ids) for new in reversed(children))

    def num_children(self, parent: bytes) -> int:
        return self._num_children[parent]

    @cached_property
    def _num_children(self) -> Counter[bytes]:
        return Counter(new.parent for new in self._pending.values())

    def is_part(self, node: Node) -> bool | None:
        if node.name in self._ends or self._num_children[node.name]:
            return False
        return True if node.name in self._pending else None

    def prefill_s(self, node: Node) -> float:
        return self._pending[node.name].prefill_s

    def piece_writes(self, node: Node, pieces: Sequence[Piece], needed: Sequence[int]) -> Iterator[Write]:  # noqa: ARG002
        for number in needed:
            yield partial(_copy, self._pending[node.name], number)

    def drop_damaged(self, node: Node, error: StoreCorrupt) -> None:  # noqa: ARG002 (the writer drops the node itself)
        self.damaged.add(node.name)


def _node(new: NewNode) -> Node:
    return Node(new.name, new.parent, new.position, len(new.token_ids), new.kind)


def _copy(node: NewNode, number: int, out: Bytes) -> None:
    # The writer may not have checked the node yet.
    if not node.is_sound(number):
        raise StoreCorrupt("its state is not finite")
    out[...] = np.frombuffer(node.payload[number], dtype=np.uint8).reshape(out.shape)


def of_any_build(_build: bytes) -> bool:
    """Accepts the state of every build."""
    return True


class DiskView:
    """A view of a store, by a snapshot."""

    tier: TierName = "disk"

    def __init__(
        self, snapshot: Snapshot, quarantine: Callable[[bytes, bytes], object], accepts: Callable[[bytes], bool]
    ) -> None:
        self._snapshot, self._quarantine, self._accepts = snapshot, quarantine, accepts
        self.damaged: set[bytes] = set()
        self.unverified = snapshot.unverified

    def has(self, node: Node, token_ids: bytes) -> bool:
        if node.name in self.damaged:
            return False
        try:
            build = self._snapshot.build_of(node.name, node.parent, node.position, node.kind, token_ids)
        except StoreCorrupt as error:
            self.drop_damaged(node, error)
            return False
        return build is not None and self._accepts(build)

    def similar(self, parent: bytes, token_ids: TokenIds) -> Iterator[tuple[Node, TokenIds]]:
        for name in islice(self._snapshot.similar_children(parent, token_ids.tobytes()), _MAX_TRIES):
            try:
                record = None if name in self.damaged else self._snapshot.node(name)
            except StoreCorrupt as error:
                self.drop_damaged(Node(name, parent, 0, 0, NodeKind.BLOCK), error)
                continue
            if record is not None and record.parent == parent and self._accepts(record.build):
                if record.is_unverified:
                    self.unverified.add(name)
                yield Node(name, parent, record.position, record.num_tokens, record.kind), record.token_ids

    def num_children(self, parent: bytes) -> int:
        try:
            usage = self._snapshot.usage(parent)
        except StoreCorrupt:
            return 0
        return 0 if usage is None else usage.children

    def is_part(self, node: Node) -> bool:
        try:
            entry = self._snapshot.entry(node.name)
        except StoreCorrupt:
            return False
        return entry is not None and entry.kind == "partial"

    def prefill_s(self, node: Node) -> float:
        try:
            usage = self._snapshot.usage(node.name)
        except StoreCorrupt:
            return 0.0
        return usage.prefill_s if usage is not None and 0 < usage.prefill_s < MAX_PREFILL_S else 0.0

    def piece_writes(self, node: Node, pieces: Sequence[Piece], needed: Sequence[int]) -> Iterator[Write]:
        for number, stored in zip(needed, self._snapshot.pieces_at(node.name, needed), strict=True):
            yield partial(self._decode, node.name, number, stored, pieces[number])

    def drop_damaged(self, node: Node, error: StoreCorrupt) -> None:
        self.damaged.add(node.name)
        kind = "checkpoint" if node.kind == NodeKind.CHECKPOINT else "block"
        log.warning("[disk-cache] %s %s is damaged and will be removed: %s", kind, node.name.hex(), error)
        self._quarantine(node.name, node.parent)

    def _decode(self, name: bytes, index: int, stored: memoryview | None, piece: Piece, out: Bytes) -> None:
        if stored is None:
            raise StoreCorrupt("a piece of its payload is missing")
        populate(stored)
        decode_piece(stored, piece, piece_seed(name, index), out)
        self._snapshot.read_at = time.monotonic()


@contextmanager
def view_buffer(writer: Writer) -> Iterator[BufferView]:
    """Yields a view of the nodes in a writer's buffer."""
    with writer.view() as waiting:
        yield BufferView(waiting)


@contextmanager
def view_disk(
    store: Store, quarantine: Callable[[bytes, bytes], object], accepts: Callable[[bytes], bool] = of_any_build
) -> Iterator[DiskView]:
    """Yields a view of a store. `quarantine` has a node removed by its name and the name of its parent. `accepts`
    returns whether the state of a build is shown, by the build's digest."""
    with store.reads.snapshot() as snapshot:
        yield DiskView(snapshot, quarantine, accepts)
