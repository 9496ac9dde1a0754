"""The folded prefix trees: a run of nodes without branches or ends of saved prompts is one trunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from diskprefix.errors import StoreCorrupt
from diskprefix.store.schema import Kind, NodeRecord
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import EntryInfo, PrefixTree, list_entries

_MOST_ENTRIES = 2000


@dataclass(kw_only=True)
class Trunk:
    """Consecutive blocks from token `start` to `end`. `id` is the name of the last one, in hex, and `parent` the id of
    the trunk that it continues, None for the first of a tree.

    `stored_bytes` is their size in the file, with `checkpoints`. `entries` are the ids of the saved prompts that end at
    `end`. `num_entries` counts these and all that continue them. `hits` counts the requests that restored a part of
    it or all. Times are seconds since the epoch. `prefill_s` is the measured time to compute the tokens, 0 if unknown.
    """

    id: str
    parent: str | None
    start: int
    end: int
    num_blocks: int = 0
    checkpoints: int = 0
    stored_bytes: int = 0
    hits: int = 0
    last_used_at: float = 0.0
    prefill_s: float = 0.0
    entries: list[str] = field(default_factory=list)
    num_entries: int = 0


@dataclass(kw_only=True)
class FoldedTree:
    """The tree of one model and tenant. Each trunk is followed by all that continues it, the most recently used first.

    `listed_bytes`: the size of its saved prompts, uncompressed and each stored alone. `raw_bytes`: the size of its
    nodes, uncompressed and each stored once. `stored_bytes`: their size in the file. So sharing saves
    `listed_bytes - raw_bytes`, and compression saves `raw_bytes - stored_bytes`. `checkpoint_bytes` are the part of
    `stored_bytes` that checkpoints take. `images`: it holds what an encoder made of so many pictures, and no
    prompts; then `nodes` are left out.
    """

    root: str
    model: str
    tenant: str
    num_entries: int = 0
    blocks: int = 0
    checkpoints: int = 0
    listed_bytes: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    checkpoint_bytes: int = 0
    images: int = 0
    nodes: list[Trunk] = field(default_factory=list)


@dataclass(kw_only=True)
class Outline:
    """The trees of all roots, the largest first, and the saved prompts by id, the most recently used first."""

    trees: list[FoldedTree]
    entries: dict[str, EntryInfo]

    def listing(self, *, with_texts: bool = True) -> dict[str, Any]:
        """Returns JSON values: `total`, the number of saved prompts, the latest `entries`, and the `trees`. Without
        texts, the `preview` of each entry is None."""
        hidden: dict[str, Any] = {} if with_texts else {"preview": None}
        latest = list(self.entries.values())[:_MOST_ENTRIES]
        return {
            "total": len(self.entries),
            "entries": [asdict(info) | hidden for info in latest],
            "trees": [
                vars(tree) | {"nodes": [vars(trunk) for trunk in tree.nodes]} for tree in self.trees if tree.nodes
            ],
        }


def outline(
    snapshot: Snapshot, entries: Sequence[EntryInfo] | None = None, only: Collection[bytes] | None = None
) -> Outline:
    """Returns the folded trees. Nodes whose records are damaged are left out, with what continues them.

    `entries` is what `list_entries` returns for this snapshot, if the caller has it. `only`: the roots that are shown.
    """
    known = {info.id: info for info in (list_entries(snapshot) if entries is None else entries)}
    prefixes, trees = PrefixTree(snapshot), list[FoldedTree]()
    for root, record in snapshot.roots():
        if only is None or root in only:
            tree = FoldedTree(root=root.hex(), model=record.model, tenant=record.tenant)
            tree.nodes = _Folder(snapshot, prefixes, frozenset(map(bytes.fromhex, known)), tree).below(root)
            ended = [id_ for trunk in tree.nodes for id_ in trunk.entries]
            if record.has_pictures:
                tree.images, tree.nodes = sum(trunk.parent is None for trunk in tree.nodes), []
            tree.num_entries, tree.listed_bytes = len(ended), sum(known[id_].raw_bytes for id_ in ended)
            trees.append(tree)
    return Outline(trees=sorted(trees, key=lambda one: (-one.stored_bytes, one.root)), entries=known)


class _Folder:
    """Folds the nodes of one root, and sums them in `sums`. It does not recurse, because trees are as deep as
    conversations are long."""

    def __init__(self, snapshot: Snapshot, tree: PrefixTree, ends: frozenset[bytes], sums: FoldedTree) -> None:
        self._snapshot, self._tree, self._ends, self._sums = snapshot, tree, ends, sums

    def below(self, root: bytes) -> list[Trunk]:
        """Returns the trunks that continue a root, parents first."""
        trunks: list[Trunk] = []
        todo: list[tuple[bytes, str | None]] = [(name, None) for name in self._continuing(root)]
        while todo:
            name, parent = todo.pop()
            trunk, following = self._trunk(name, parent)
            trunks.append(trunk)
            todo.extend((child, trunk.id) for child in following)
        children = defaultdict[str | None, list[Trunk]](list)
        for trunk in reversed(trunks):
            trunk.num_entries += sum(child.num_entries for child in children[trunk.id])
            children[trunk.parent].append(trunk)
        return _latest_first(children)

    def _trunk(self, name: bytes, parent: str | None) -> tuple[Trunk, list[bytes]]:
        """Returns the trunk that begins at a node, and the nodes that continue it."""
        node = self._node(name)
        assert node is not None, "only sound nodes are followed"
        trunk = Trunk(id=name.hex(), parent=parent, start=node.position, end=node.end)
        while True:
            checkpoints = self._checkpoints(name)
            self._extend(trunk, name, node, list(checkpoints.values()))
            ended = {name, *checkpoints} & self._ends
            trunk.entries, trunk.num_entries = sorted(one.hex() for one in ended), len(ended)
            following = self._continuing(name)
            if len(following) != 1 or ended:
                return trunk, list(following)
            [(name, node)] = following.items()

    def _extend(self, trunk: Trunk, name: bytes, node: NodeRecord, checkpoints: list[NodeRecord]) -> None:
        trunk.id, trunk.end = name.hex(), node.end
        checkpoint_bytes = sum(point.stored_bytes for point in checkpoints)
        for sums in (trunk, self._sums):
            sums.checkpoints += len(checkpoints)
            sums.stored_bytes += node.stored_bytes + checkpoint_bytes
        trunk.num_blocks += 1
        self._sums.blocks += 1
        self._sums.raw_bytes += node.raw_bytes + sum(point.raw_bytes for point in checkpoints)
        self._sums.checkpoint_bytes += checkpoint_bytes
        if (usage := self._snapshot.usage(name)) is not None:
            trunk.hits = max(trunk.hits, usage.restores)
            trunk.last_used_at = max(trunk.last_used_at, round(usage.last_used, 3))
            trunk.prefill_s += usage.prefill_s

    def _continuing(self, name: bytes) -> dict[bytes, NodeRecord]:
        return {one: node for one, node in self._children(name).items() if node.kind != Kind.CHECKPOINT}

    def _checkpoints(self, name: bytes) -> dict[bytes, NodeRecord]:
        return {one: node for one, node in self._children(name).items() if node.kind == Kind.CHECKPOINT}

    def _children(self, name: bytes) -> dict[bytes, NodeRecord]:
        found = ((one, self._node(one)) for one in self._tree.children.get(name, ()))
        return {one: node for one, node in found if node is not None}

    def _node(self, name: bytes) -> NodeRecord | None:
        try:
            return self._tree.node(name)
        except StoreCorrupt:
            return None


def _latest_first(children: Mapping[str | None, list[Trunk]]) -> list[Trunk]:
    """Returns trunks, each followed by all that continues it. `children` has them by their parent."""
    ordered: list[Trunk] = []
    todo = sorted(children[None], key=_age)
    while todo:
        ordered.append(trunk := todo.pop())
        todo += sorted(children.get(trunk.id, ()), key=_age)
    return ordered


def _age(trunk: Trunk) -> tuple[float, str]:
    return trunk.last_used_at, trunk.id
