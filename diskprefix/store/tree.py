"""The prefix tree of one snapshot: which node continues which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from diskprefix.errors import StoreCorrupt
from diskprefix.store.schema import Kind, node_kind, node_name
from diskprefix.store.snapshot import Snapshot
from diskprefix.tokens import HASH_BYTES


class MisnamedNode(StoreCorrupt):
    """The name of a node is not the hash of its parent and its token ids."""


class TreeNode(NamedTuple):
    """A node record without its token ids, which would fill the memory if those of all nodes were kept."""

    parent: bytes
    root: bytes
    position: int
    num_tokens: int
    kind: Kind
    num_pieces: int
    raw_bytes: int
    stored_bytes: int
    generated: bool

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


class PrefixTree:
    """The nodes of one snapshot. A record is read and checked when it is first asked for, and then kept.

    `node`, `path` and `entry` raise `StoreCorrupt` for damaged records. `children`, `subtrees` and `depth_first` use
    the parents that the records name, and do not check them.
    """

    def __init__(self, snapshot: Snapshot, secret: int | None = None) -> None:
        """`secret`: the store's. With it the names of the nodes are checked too."""
        self._snapshot = snapshot
        self._secret = secret
        self._nodes: dict[bytes, TreeNode] = {}

    def node(self, name: bytes) -> TreeNode | None:
        """Returns a node, or None if it is not stored. Raises `StoreCorrupt`."""
        if name not in self._nodes:
            record = self._snapshot.node(name)
            if record is None:
                return None
            if self._secret is not None and name != node_name(
                self._secret, record.parent, record.token_ids, record.kind, generated=record.generated
            ):
                raise MisnamedNode("its name is not the hash of its parent and its tokens")
            self._nodes[name] = TreeNode(
                parent=record.parent,
                root=record.root,
                position=record.position,
                num_tokens=len(record.token_ids),
                kind=record.kind,
                num_pieces=record.num_pieces,
                raw_bytes=record.raw_bytes,
                stored_bytes=record.stored_bytes,
                generated=record.generated,
            )
        return self._nodes[name]

    def path(self, name: bytes) -> list[bytes]:
        """Returns the names of the nodes from the first block to `name`. Raises `StoreCorrupt` if they do not join."""
        path: list[bytes] = []
        child: TreeNode | None = None
        while True:
            node = self.node(name)
            if node is None:
                raise StoreCorrupt(f"node {name.hex()} is missing from its path")
            if child is not None and (node.end != child.position or node.kind != Kind.BLOCK or not node.num_tokens):
                raise StoreCorrupt(f"node {name.hex()} does not end at token {child.position}, where its child starts")
            path.append(name)
            if node.position == 0:
                return path[::-1]
            name, child = node.parent, node

    def entry(self, name: bytes) -> list[bytes]:
        """Returns the names of the nodes of the saved prompt that ends with node `name`: its path from the first block
        on, each block followed by the checkpoints that continue it. Raises `StoreCorrupt`."""
        return [node for step in self.path(name) for node in self._with_checkpoints(step)]

    def _with_checkpoints(self, name: bytes) -> Iterator[bytes]:
        if name not in self.checkpoints:
            yield name
        yield from (child for child in self.children.get(name, ()) if child in self.checkpoints)

    @property
    def checkpoints(self) -> set[bytes]:
        """The names of all checkpoints."""
        return self._links[1]

    @property
    def children(self) -> dict[bytes, list[bytes]]:
        """The names of the nodes that continue each node or root."""
        return self._links[0]

    @cached_property
    def _links(self) -> tuple[dict[bytes, list[bytes]], set[bytes]]:
        children: dict[bytes, list[bytes]] = {}
        checkpoints = set()
        for name, value in self._snapshot.records("nodes"):
            children.setdefault(bytes(value[:HASH_BYTES]), []).append(name)
            if node_kind(value) == Kind.CHECKPOINT:
                checkpoints.add(name)
        return children, checkpoints

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
