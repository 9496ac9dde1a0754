"""Publishes and restores made-up prompts as a daemon does, without a model.

The crash matrix and the store benchmark drive a store with it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from diskprefix.cache.matching import Restored
from diskprefix.cache.restoration import Restoration
from diskprefix.cache.tiers.loading import READER_THREADS
from diskprefix.cache.tiers.local import BufferTier, DiskTier
from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Group, LayerSpec, Layout, TensorSpec
from diskprefix.kv.transfer import populate
from diskprefix.store.changes import NewNode
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import EntryRecord, RootRecord
from diskprefix.store.store import Publication, Store
from diskprefix.store.writer import Writer
from diskprefix.tokens import TokenIds, root_hash

CPU = torch.device("cpu")


def dense_layout(*, layers: int, heads: int, head_dim: int, dtype: torch.dtype, vocab_size: int) -> Layout:
    """Returns the layout of a model whose layers all have keys and values of one shape."""
    specs = (TensorSpec(i, part, heads, head_dim, dtype) for i in range(layers) for part in ("keys", "values"))
    return Layout((LayerSpec(),) * layers, (Group(tuple(specs)),), vocab_size, dtype)


class SyntheticModel:
    """Names the nodes of prompts under the root of a model that does not exist.

    The root is the hash of `identity`.
    """

    def __init__(self, store: Store, layout: Layout, *, identity: str, block_size: int = 256) -> None:
        self.store = store
        self.layout = layout
        self.root = root_hash(identity)
        self._block_size = block_size
        self._payload_layout = PayloadLayout.parse(layout.describe())
        self.record = RootRecord(
            model="made up", block_size=block_size, layout=layout.describe(), created_at=0.0, identity=identity
        )

    def nodes(self, token_ids: TokenIds) -> PromptNodes:
        return PromptNodes(self.store.secret, self.root, token_ids, self._block_size, self._payload_layout)

    def path(self, token_ids: TokenIds) -> list[Node]:
        """Returns the nodes of a whole prompt: its blocks, then its tail."""
        nodes = self.nodes(token_ids)
        return [*nodes.blocks, nodes.tail()]

    def payload_bytes(self, node: Node) -> int:
        return self._payload_layout.payload_bytes(node.num_tokens, node.kind)

    def publication(
        self, token_ids: TokenIds, payload: Callable[[Node], memoryview], *, stored: int = 0
    ) -> Publication:
        """Returns a publication of a prompt without its first `stored` nodes; `payload` returns a node's bytes."""
        nodes, path = self.nodes(token_ids), self.path(token_ids)
        return Publication(
            store_id=self.store.store_id,
            root=self.root,
            root_record=self.record,
            nodes=tuple(self._new_node(nodes, node, payload(node)) for node in path[stored:]),
            last_node=path[-1].name,
            entry=EntryRecord(root=self.root, num_tokens=len(token_ids), scope="full", preview="", created_at=0.0),
            prompt=token_ids,
        )

    def _new_node(self, nodes: PromptNodes, node: Node, payload: memoryview) -> NewNode:
        return NewNode(
            name=node.name,
            parent=node.parent,
            position=node.position,
            token_ids=nodes.tokens(node),
            kind=node.kind,
            payload=payload,
            pieces=tuple(cut.piece for cut in nodes.cuts(node)),
            prefill_s=node.num_tokens / 500,
        )


class Restorer:
    """Restores prompts as a daemon does, into an arena of its own."""

    def __init__(self, model: SyntheticModel, writer: Writer, *, capacity: int, device: torch.device = CPU) -> None:
        """`capacity` is the size of the arena in tokens."""
        self.arena = KVArena(model.layout, device)
        self.arena.reserve(capacity)
        # As a daemon does at its start: the first restore is measured, not the making of pages.
        populate([memory.tensor for memory in self.arena.memory])
        self._model = model
        self._writer = writer
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="kv-reader")

    def restore(self, token_ids: TokenIds) -> Restored:
        """Raises `CacheError`."""
        with contextlib.ExitStack() as pins:
            return self.restore_pinned(token_ids, pins)

    def restore_pinned(self, token_ids: TokenIds, pins: contextlib.ExitStack) -> Restored:
        """As `restore`; what was restored stays pinned until `pins` are closed."""
        model = self._model
        nodes = model.nodes(token_ids)
        restoration = Restoration(
            nodes,
            model.layout,
            (BufferTier(self._writer), DiskTier(model.store, self._writer.quarantine)),
            model.store.evictor,
            self._readers,
            pins,
            allows=lambda _num_tokens: True,
            pays=lambda _num_tokens, _num_bytes: True,
            noted_logits=lambda: None,
        )
        return restoration.run(self.arena)

    def seconds(self, token_ids: TokenIds) -> float:
        """Returns the seconds that the restore of a whole stored prompt takes: lookup, checksums, decoding, copying."""
        started = time.perf_counter()
        restored = self.restore(token_ids)
        elapsed = time.perf_counter() - started
        assert restored.num_tokens == len(token_ids), f"{restored.num_tokens} of {len(token_ids)} tokens were restored"
        return elapsed

    def close(self) -> None:
        self._readers.shutdown()


@contextlib.contextmanager
def open_restorer(model: SyntheticModel, *, capacity: int, device: torch.device = CPU) -> Iterator[Restorer]:
    """Gives a restorer with a writer of its own. The store stays open."""
    writer = Writer(model.store, buffer_bytes=2**30)
    restorer = Restorer(model, writer, capacity=capacity, device=device)
    try:
        yield restorer
    finally:
        restorer.close()
        writer.close(60.0)
