"""The prefix tree of one snapshot: which node continues which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from diskprefix.errors import StoreCorrupt
from diskprefix.store.schema import Kind, NodeRecord, node_kind, node_name
from diskprefix.store.snapshot import Snapshot
from diskprefix.tokens import HASH_BYTES


class MisnamedNode(StoreCorrupt):
    """The name of a node is not the hash of its parent and its token ids."""


class PrefixTree:
    """The nodes of one snapshot. A record is read and checked when it is first asked for, and then kept.

    `node`, `path` and `entry` raise `StoreCorrupt` for damaged records. `children`, `subtrees` and `depth_first` use
    the parents that the records name, and do not check them.
    """

    def __init__(self, snapshot: Snapshot, secret: int | None = None) -> None:
        """`secret`: the store's. With it the names of the nodes are checked too."""
        self._snapshot = snapshot
        self._secret = secret
        self._nodes: dict[bytes, NodeRecord] = {}

    def node(self, name: bytes) -> NodeRecord | None:
        """Returns a node, or None if it is not stored. Raises `StoreCorrupt`."""
        if name not in self._nodes:
            record = self._snapshot.node(name)
            if record is None:
                return None
            if self._secret is not None and name != node_name(
                self._secret, record.parent, record.token_ids, record.kind, generated=record.generated
            ):
                raise MisnamedNode("its name is not the hash of its parent and its tokens")
            self._nodes[name] = record
        return self._nodes[name]

    def path(self, name: bytes) -> dict[bytes, NodeRecord]:
        """Returns the nodes from the first block to `name`, by name. Raises `StoreCorrupt` if they do not join."""
        path: list[tuple[bytes, NodeRecord]] = []
        while True:
            node = self.node(name)
            if node is None:
                raise StoreCorrupt(f"node {name.hex()} is missing from its path")
            start = path[-1][1].position if path else node.end
            if node.end != start or (path and (node.kind != Kind.BLOCK or not node.num_tokens)):
                raise StoreCorrupt(f"node {name.hex()} does not end at token {start}, where its child starts")
            path.append((name, node))
            if node.position == 0:
                return dict(reversed(path))
            name = node.parent

    def entry(self, name: bytes) -> dict[bytes, NodeRecord]:
        """Returns the nodes of the saved prompt that ends with node `name`: its path from the first block on, each
        block followed by the checkpoints that continue it. Raises `StoreCorrupt`."""
        nodes: dict[bytes, NodeRecord] = {}
        for step, node in self.path(name).items():
            nodes[step] = node
            for child in self.children.get(step, ()):
                if child in self.checkpoints and (checkpoint := self.node(child)) is not None:
                    nodes[child] = checkpoint
        return nodes

    @cached_property
    def checkpoints(self) -> set[bytes]:
        """The names of all checkpoints."""
        return {name for name, value in self._snapshot.records("nodes") if node_kind(value) == Kind.CHECKPOINT}

    @cached_property
    def children(self) -> dict[bytes, list[bytes]]:
        """The names of the nodes that continue each node or root."""
        children: dict[bytes, list[bytes]] = {}
        for name, value in self._snapshot.records("nodes"):
            children.setdefault(bytes(value[:HASH_BYTES]), []).append(name)
        return children

    def subtrees(self, tops: Mapping[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Returns nodes and everything that continues them, each with its parent, in an order in which they may be
        deleted. `tops` gives the parents, because a node's own record may be what is damaged."""
        order = dict(tops)
        queue = list(order.items())
        for name, _ in queue:
            for child in self.children.get(name, ()):
                if child not in order:
                    order[child] = name
                    queue.append((child, name))
        return queue[::-1]

    def depth_first(self) -> Iterator[bytes]:
        """Yields the names of all nodes that can be reached from a root or from a missing node, parents first."""
        names = {name for children in self.children.values() for name in children}
        todo = [name for parent, children in self.children.items() if parent not in names for name in children]
        while todo:
            name = todo.pop()
            yield name
            todo.extend(self.children.get(name, ()))
