"""The nearest tier: the nodes that wait in memory until the writer has written them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import numpy as np

from diskprefix.cache.tiers.nodes import Node
from diskprefix.cache.tiers.tier import TierName, Write
from diskprefix.errors import StoreCorrupt
from diskprefix.store.changes import NewNode
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.pieces import Cut
from diskprefix.store.schema import RootRecord
from diskprefix.store.store import Chain, Publication
from diskprefix.store.writer import Writer
from diskprefix.tokens import TokenIds, common_prefix_length


def publisher(
    writer: Writer, store_id: bytes, root: bytes, record: RootRecord
) -> Callable[[tuple[NewNode, ...]], bool]:
    """Returns what puts nodes of one prompt into the buffer of a writer, which writes them to the disk: parents first,
    call after call. It returns False if the buffer has no room for them. `store_id` names the store whose secret named
    the nodes."""
    chain = Chain()

    def publish(nodes: tuple[NewNode, ...]) -> bool:
        publication = Publication(store_id=store_id, root=root, root_record=record, nodes=nodes, chain=chain)
        has_room = writer.reserve(publication.payload_bytes)
        if has_room:
            writer.submit(publication, reserved_bytes=publication.payload_bytes)
        return has_room

    return publish


class BufferTier:
    """The buffer of a writer, as a `Tier`."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    @contextmanager
    def view(self) -> Iterator[BufferView]:
        yield BufferView(self._writer.pending)


class BufferView:
    """The nodes that waited at one moment, with their raw payloads. See `View`."""

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

    def prefill_s(self, node: Node) -> float:
        return self._pending[node.name].prefill_s

    def pieces(self, node: Node, cuts: Sequence[Cut], needed: Sequence[int]) -> Iterator[Write]:
        payload = self._pending[node.name].payload
        starts = list(accumulate((cut.piece.num_bytes for cut in cuts), initial=0))
        for number in needed:
            yield partial(_copy, payload[starts[number] : starts[number + 1]])

    def drop(self, node: Node, error: StoreCorrupt) -> None:  # noqa: ARG002 (memory is not damaged; see `View`)
        self.damaged.add(node.name)


def _node(found: NewNode) -> Node:
    return Node(found.name, found.parent, found.position, len(found.token_ids), found.kind, found.generated)


def _copy(raw: memoryview, out: Bytes) -> None:
    out[...] = np.frombuffer(raw, dtype=np.uint8).reshape(out.shape)
