"""The folded prefix tree: a run of nodes without branches or ends of saved prompts is one trunk."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from diskprefix.errors import StoreCorrupt
from diskprefix.store.schema import Kind, NodeRecord, UsageRecord
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import EntryInfo, PrefixTree, list_entries


@dataclass(kw_only=True)
class BlockRun:
    """Consecutive blocks from token `start` to `end`. `id` is the name of the last one, in hex.

    `stored_bytes` is their size in the file, with checkpoints. `entries` are the ids of the saved prompts that end at
    `end`. `num_entries` counts these and all that continue them. `hits` counts the requests that restored a part of
    it or all. Times are seconds since the epoch. `prefill_s` is the measured time to compute the tokens, 0 if unknown.
    """

    id: str
    start: int
    end: int
    num_blocks: int = 0
    stored_bytes: int = 0
    hits: int = 0
    last_used_at: float = 0.0
    prefill_s: float = 0.0
    entries: list[str] = field(default_factory=list)
    num_entries: int = 0


@dataclass(kw_only=True)
class Trunk(BlockRun):
    """A run of blocks in a tree, the number of its checkpoints, and the runs that continue it."""

    checkpoints: int = 0
    children: list[Trunk] = field(default_factory=list)


@dataclass(kw_only=True)
class RootOutline:
    """The tree of one model and tenant. `stored_bytes` is the size of all its nodes in the file."""

    root: str
    model: str
    tenant: str
    block_size: int
    stored_bytes: int
    num_entries: int
    trunks: list[Trunk]


@dataclass(kw_only=True)
class Outline:
    """All trees, the largest first, and the saved prompts by id."""

    roots: list[RootOutline]
    entries: dict[str, EntryInfo]


def outline(
    snapshot: Snapshot, entries: list[EntryInfo] | None = None, only: Collection[bytes] | None = None
) -> Outline:
    """Returns the folded trees. Nodes whose records are damaged are left out, with what continues them.

    `entries` is what `list_entries` returns for this snapshot, if the caller has it. `only`: the roots that are shown.
    """
    known = {info.id: info for info in (list_entries(snapshot) if entries is None else entries)}
    folder = _Folder(snapshot, frozenset(map(bytes.fromhex, known)))
    roots = []
    for root, record in snapshot.roots():
        trunks = folder.below(root) if only is None or root in only else []
        if trunks:
            roots.append(
                RootOutline(
                    root=root.hex(),
                    model=record.model,
                    tenant=record.tenant,
                    block_size=record.block_size,
                    stored_bytes=sum(trunk.stored_bytes for trunk in walk(trunks)),
                    num_entries=sum(trunk.num_entries for trunk in trunks),
                    trunks=trunks,
                )
            )
    return Outline(roots=sorted(roots, key=lambda one: (-one.stored_bytes, one.root)), entries=known)


def walk(trunks: list[Trunk]) -> Iterator[Trunk]:
    """Yields the trunks and all that continues them, parents first."""
    todo = list(reversed(trunks))
    while todo:
        trunk = todo.pop()
        yield trunk
        todo.extend(reversed(trunk.children))


class _Folder:
    """Folds the nodes of one snapshot. It does not recurse, because trees are as deep as conversations are long."""

    def __init__(self, snapshot: Snapshot, ends: frozenset[bytes]) -> None:
        self._snapshot = snapshot
        self._tree = PrefixTree(snapshot)
        self._ends = ends

    def below(self, root: bytes) -> list[Trunk]:
        """Returns the trunks that continue a root, the most recently used first."""
        tops: list[Trunk] = []
        order: list[Trunk] = []
        todo = [(name, tops) for name in self._continuing(root)]
        while todo:
            name, siblings = todo.pop()
            trunk, following = self._trunk(name)
            siblings.append(trunk)
            order.append(trunk)
            todo.extend((child, trunk.children) for child in following)
        for trunk in reversed(order):
            trunk.num_entries += sum(child.num_entries for child in trunk.children)
            trunk.children.sort(key=_by_use)
        return sorted(tops, key=_by_use)

    def _trunk(self, name: bytes) -> tuple[Trunk, list[bytes]]:
        """Returns the trunk that begins at a node, and the nodes that continue it."""
        first = self._node(name)
        assert first is not None, "only sound nodes are followed"
        trunk = Trunk(id=name.hex(), start=first.position, end=first.position)
        while True:
            node, usage = self._node(name), self._snapshot.usage(name)
            assert node is not None, "only sound nodes are followed"
            checkpoints = self._checkpoints(name)
            _extend(trunk, name, node, usage, checkpoints)
            ended = {name, *(point for point, _ in checkpoints)} & self._ends
            trunk.entries = sorted(one.hex() for one in ended)
            trunk.num_entries = len(ended)
            following = self._continuing(name)
            if len(following) != 1 or ended:
                return trunk, following
            name = following[0]

    def _continuing(self, name: bytes) -> list[bytes]:
        children = self._tree.children.get(name, ())
        return [one for one in children if (node := self._node(one)) is not None and node.kind != Kind.CHECKPOINT]

    def _checkpoints(self, name: bytes) -> list[tuple[bytes, NodeRecord]]:
        children = ((one, self._node(one)) for one in self._tree.children.get(name, ()))
        return [(one, node) for one, node in children if node is not None and node.kind == Kind.CHECKPOINT]

    def _node(self, name: bytes) -> NodeRecord | None:
        try:
            return self._tree.node(name)
        except StoreCorrupt:
            return None


def _extend(
    trunk: Trunk, name: bytes, node: NodeRecord, usage: UsageRecord | None, points: list[tuple[bytes, NodeRecord]]
) -> None:
    trunk.id, trunk.end = name.hex(), node.end
    trunk.num_blocks += 1
    trunk.stored_bytes += node.stored_bytes + sum(point.stored_bytes for _, point in points)
    trunk.checkpoints += len(points)
    if usage is not None:
        trunk.hits, trunk.last_used_at = max(trunk.hits, usage.restores), round(usage.last_used, 3)
        trunk.prefill_s += usage.prefill_s


def _by_use(trunk: Trunk) -> tuple[float, str]:
    return -trunk.last_used_at, trunk.id
