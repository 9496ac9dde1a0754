"""The nodes that go with deleted entries: those that belong to no other entry.

Each is found by walking up from the end of an entry, so the work grows with what is removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.pieces import PayloadLayout
from diskprefix.prefixstore.store.schema import NodeKind, NodeRecord, RootRecord, checkpoint_names, node_name
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.tokens import TokenPath, num_common


class Removal:
    """The nodes that go with the `deleted` entries, which are the names of nodes. Methods raise `StoreCorrupt`."""

    def __init__(self, snapshot: Snapshot, roots: Mapping[bytes, RootRecord], deleted: Container[bytes]) -> None:
        self._snapshot, self._deleted, self._secret = snapshot, deleted, snapshot.names().secret
        self.nodes: dict[bytes, int] = {}
        """The sizes in the file of the nodes, by name, children first."""
        self._gone_children: Counter[bytes] = Counter()
        self._with_states = {root for root, record in roots.items() if PayloadLayout.parse(record.layout).states}

    def remove(self, name: bytes) -> None:
        """Adds the nodes of the deleted entry that ends at a node, from there on, as far as nothing else needs them."""
        # Bound: positions fall.
        while name not in self.nodes and self._is_free(name, node := self._node(name)):
            self._add(name, node.parent)
            self._add_checkpoints(node)
            if node.position == 0:
                return
            name = node.parent

    def left(self, name: bytes) -> set[bytes]:
        """Returns the nodes of the entry that ends at a node that stay: on its path, and checkpoints beside it."""
        left, after = set[bytes](), b""
        # Bound: positions fall.
        while True:
            node = self._node(name)
            left.add(name)
            if node.kind == NodeKind.BLOCK:
                left.update(self._checkpoints(name, node, after))
            after = node.token_ids.tobytes()
            name = node.parent
            if node.position == 0:
                left.update(self._checkpoints(node.root, node, after))
                break
            if self._node(name).position >= node.position:
                raise StoreCorrupt(f"node {name.hex()} does not come before the node that continues it")
        return left - self.nodes.keys()

    def num_kept(self, path: TokenPath) -> int:
        """Returns how many of a prompt's first tokens stay stored."""
        size = path.block_size
        for num_blocks in reversed(range(path.num_blocks + 1)):
            name = path.parent(num_blocks)
            if not num_blocks or self.stays(name):
                rest = path.token_ids[num_blocks * size : (num_blocks + 1) * size].tobytes()
                return num_blocks * size + self.num_shared(name, rest)
        raise AssertionError("a root is the beginning of all prompts")

    def stays(self, name: bytes) -> bool:
        """Returns whether a node is stored and does not go."""
        return name not in self.nodes and self._snapshot.has_record("usage", name)

    def num_shared(self, name: bytes, token_ids: bytes) -> int:
        """Returns how many of these token ids (int32, little-endian) a node has that continues this node or root, and
        stays."""
        similar = (other for other in self._snapshot.similar_children(name, token_ids) if other not in self.nodes)
        nearest = next(similar, None)
        node = None if nearest is None else self._snapshot.node(nearest)
        return 0 if node is None else num_common(token_ids, node.token_ids.tobytes())

    def _node(self, name: bytes) -> NodeRecord:
        node = self._snapshot.node(name)
        if node is None:
            raise StoreCorrupt(f"node {name.hex()} is missing from its path")
        return node

    def _is_free(self, name: bytes, node: NodeRecord) -> bool:
        """Returns whether nothing else needs a node. Adds the checkpoint at the end of its block in that case."""
        if self._is_other_entry(name):
            return False
        usage = self._snapshot.usage(name)
        num_left = 0 if usage is None else usage.children - self._gone_children[name]
        if num_left == 1 and node.root in self._with_states:
            bare = node_name(self._secret, name, b"", NodeKind.CHECKPOINT)
            if self.stays(bare) and not self._is_other_entry(bare):
                self._add(bare, name)
                return True
        return num_left <= 0

    def _add_checkpoints(self, node: NodeRecord) -> None:
        """Adds the checkpoints before the end of a removed node that no other prompt has."""
        for name in self._checkpoints(node.parent, node, node.token_ids.tobytes()):
            beside = self._snapshot.node(name)
            if beside is not None and beside.num_tokens and not self._is_other_entry(name):
                token_ids = beside.token_ids.tobytes()
                if next(self._others(name, node.parent, token_ids), None) is None:
                    self._add(name, beside.parent)

    def _checkpoints(self, parent: bytes, node: NodeRecord, token_ids: bytes) -> Iterator[bytes]:
        """Yields the stored checkpoints that continue `parent` with the first of these token ids, the longest first.
        Leaves out those that go."""
        if node.root in self._with_states:
            for names in reversed(checkpoint_names(self._secret, parent, token_ids)):
                yield from (name for kind, name in names if kind == NodeKind.CHECKPOINT and self.stays(name))

    def _others(self, name: bytes, parent: bytes, token_ids: bytes) -> Iterator[bytes]:
        """Yields the nodes that continue `parent` beside this one with all these token ids, and stay."""
        for other in self._snapshot.similar_children(parent, token_ids):
            if not self._begins_with(other, token_ids):
                return
            if other != name and other not in self.nodes:
                yield other

    def _begins_with(self, name: bytes, token_ids: bytes) -> bool:
        node = self._snapshot.node(name)
        return node is not None and node.token_ids.tobytes().startswith(token_ids)

    def _is_other_entry(self, name: bytes) -> bool:
        return self._snapshot.has_record("entries", name) and name not in self._deleted

    def _add(self, name: bytes, parent: bytes) -> None:
        usage = self._snapshot.usage(name)
        self.nodes[name] = 0 if usage is None else usage.stored_bytes
        self._gone_children[parent] += 1
