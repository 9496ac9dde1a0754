"""The prefix tree of one snapshot, and the list of its saved prompts for people."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from msgspec import Struct

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.schema import EntryKind, EntryRecord, NodeKind, NodeRecord, node_kind, node_name
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.tokens import HASH_BYTES

log = logging.getLogger("diskprefix")


class PrefixTree:
    """The nodes of one snapshot. A record is read and checked at its first use, and then kept in memory. Ghosts, which
    may be many more, are not kept.

    `node`, `path` and `entry` raise `StoreCorrupt` for damaged records. `children` and `depth_first` do not check them.
    """

    def __init__(self, snapshot: Snapshot, secret: int | None = None) -> None:
        """With the store's `secret`, the names of the nodes are checked too."""
        self._snapshot = snapshot
        self._secret = secret
        self._nodes: dict[bytes, NodeRecord] = {}

    def node(self, name: bytes) -> NodeRecord | None:
        """Returns a node, or None if it is not stored, or only a ghost. Raises `StoreCorrupt`."""
        node = self.node_or_ghost(name)
        return None if node is None or node.kind == NodeKind.GHOST else node

    def node_or_ghost(self, name: bytes) -> NodeRecord | None:
        if name in self._nodes:
            return self._nodes[name]
        node = self._snapshot.node_or_ghost(name)
        if node is None:
            return None
        if self._secret is not None and name != node_name(self._secret, node.parent, node.token_ids, node.kind):
            raise StoreCorrupt("its name is not the hash of its parent and its tokens")
        if node.kind != NodeKind.GHOST:
            self._nodes[name] = node
        return node

    def path(self, name: bytes) -> dict[bytes, NodeRecord]:
        """Returns the nodes from the first block to `name`, by name. Raises `StoreCorrupt` if they do not join."""
        path: list[tuple[bytes, NodeRecord]] = []
        # Bound: positions fall.
        while True:
            node = self.node(name)
            if node is None:
                raise StoreCorrupt(f"node {name.hex()} is missing from its path")
            start = path[-1][1].position if path else node.end
            if node.end != start or (path and (node.kind != NodeKind.BLOCK or not node.num_tokens)):
                raise StoreCorrupt(f"node {name.hex()} does not end at token {start}, where its child starts")
            path.append((name, node))
            if node.position == 0:
                return dict(reversed(path))
            name = node.parent

    def entry(self, name: bytes) -> dict[bytes, NodeRecord]:
        """Returns the nodes of the saved prompt that ends with node `name`: the path from the first block on, where
        each block is followed by the prompt's checkpoints that continue it. Raises `StoreCorrupt`."""
        path = self.path(name)
        following = [*path.values(), None]
        nodes: dict[bytes, NodeRecord] = {}
        for step, behind in zip([path[next(iter(path))].parent, *path], following, strict=True):
            if step in path and path[step].kind == NodeKind.BLOCK:
                nodes[step] = path[step]
            names = [child for child in self.children.get(step, ()) if child in self.checkpoints]
            checkpoints = {child: node for child in names if (node := self.node(child)) and _is_before(node, behind)}
            nodes.update(sorted(checkpoints.items(), key=lambda item: item[1].end))
        nodes[name] = path[name]
        return nodes

    def all_nodes(self) -> Iterator[tuple[bytes, NodeRecord]]:
        """Yields names and records of all nodes. Does not read ghosts. Raises `StoreCorrupt`."""
        for name, value in self._snapshot.records("nodes"):
            if node_kind(value) != NodeKind.GHOST and (node := self.node(name)) is not None:
                yield name, node

    @cached_property
    def checkpoints(self) -> set[bytes]:
        """The names of all checkpoints."""
        return {name for name, value in self._snapshot.records("nodes") if node_kind(value) == NodeKind.CHECKPOINT}

    @cached_property
    def children(self) -> dict[bytes, list[bytes]]:
        """The names of the nodes that continue each node or root, without ghosts."""
        children: dict[bytes, list[bytes]] = {}
        for name, value in self._snapshot.records("nodes"):
            if node_kind(value) != NodeKind.GHOST:
                children.setdefault(bytes(value[:HASH_BYTES]), []).append(name)
        return children

    def depth_first(self) -> Iterator[bytes]:
        """Yields the names of all nodes that can be reached from a root or from a missing node, parents first."""
        names = {name for children in self.children.values() for name in children}
        todo = [name for parent, children in self.children.items() if parent not in names for name in children]
        # Bound: each node has one parent, so none comes twice.
        while todo:
            name = todo.pop()
            yield name
            todo.extend(self.children.get(name, ()))


class EntryInfo(Struct, frozen=True, kw_only=True):
    """One entry: a saved prompt, or other stored state by its `kind` (see `schema.EntryKind`). Sizes are in bytes and
    include the checkpoints; `shared_bytes` is the size of the nodes that other entries also use.

    `checkpoints` are the positions of the checkpoints, and `checkpoint_bytes` their size. Times are seconds since the
    epoch. `hits` counts the requests that restored any prefix of the prompt. `ttl_s`: the time to live after the last
    use that requests asked for, in seconds; None if no request asked for any. `default_ttl`: a request did not ask for
    any, so the daemon's `--kv-cache-ttl` holds if that is longer.
    """

    id: str
    kind: EntryKind
    model: str
    num_tokens: int
    raw_bytes: int
    stored_bytes: int
    shared_bytes: int
    checkpoints: tuple[int, ...]
    checkpoint_bytes: int
    hits: int
    created_at: float
    last_used_at: float
    ttl_s: int | None
    default_ttl: bool
    scope: str
    tenant: str
    preview: str


def list_entries(snapshot: Snapshot) -> list[EntryInfo]:
    """Returns all entries, the most recently used first. An entry with a damaged path is logged and left out."""
    tree = PrefixTree(snapshot)
    entries: dict[bytes, tuple[EntryRecord, dict[bytes, NodeRecord]]] = {}
    for name, entry in snapshot.entries():
        try:
            entries[name] = entry, tree.entry(name)
        except StoreCorrupt as error:
            log.warning("entry %s left out: %s", name.hex(), error)
    users = Counter(node for _, nodes in entries.values() for node in nodes)
    infos = [_info(snapshot, name, entry, nodes, users) for name, (entry, nodes) in entries.items()]
    return sorted(infos, key=lambda info: (-info.last_used_at, info.id))


def _is_before(checkpoint: NodeRecord, node: NodeRecord | None) -> bool:
    """Returns whether the tokens of a checkpoint are the first tokens of `node`, which has the same parent."""
    tokens = b"" if node is None else node.token_ids.tobytes()
    return tokens.startswith(checkpoint.token_ids.tobytes())


def _info(
    snapshot: Snapshot, name: bytes, entry: EntryRecord, nodes: dict[bytes, NodeRecord], users: Counter[bytes]
) -> EntryInfo:
    root, usage = snapshot.root(entry.root), snapshot.usage(name)
    checkpoints = [node for node in nodes.values() if node.kind == NodeKind.CHECKPOINT]
    return EntryInfo(
        id=name.hex(),
        kind=entry.kind,
        model=root.model if root else "",
        num_tokens=entry.num_tokens,
        raw_bytes=sum(node.raw_bytes for node in nodes.values()),
        stored_bytes=sum(node.stored_bytes for node in nodes.values()),
        shared_bytes=sum(node.stored_bytes for step, node in nodes.items() if users[step] > 1),
        checkpoints=tuple(sorted(node.end for node in checkpoints)),
        checkpoint_bytes=sum(node.stored_bytes for node in checkpoints),
        # A use of a node is also a use of all its ancestors, so the first block counts the uses of any prefix.
        hits=max(
            (use.restores for step in nodes if nodes[step].position == 0 and (use := snapshot.usage(step))), default=0
        ),
        created_at=round(entry.created_at, 3),
        last_used_at=round(usage.last_used if usage else entry.created_at, 3),
        ttl_s=abs(usage.ttl_s) or None if usage else None,
        default_ttl=usage.ttl_s <= 0 if usage else True,
        scope=entry.scope,
        tenant=root.tenant if root else "",
        preview=entry.preview,
    )
