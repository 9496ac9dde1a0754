"""The prefix trees, folded: a run of nodes without branches or ends of saved prompts is one trunk."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from msgspec import Struct, field
from msgspec.structs import asdict

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.cache.other_settings import models_of_roots, telling_options
from diskprefix.prefixstore.store.schema import NodeKind, NodeRecord
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.tree import EntryInfo, PrefixTree, list_entries

_Nodes: TypeAlias = dict[bytes, NodeRecord]
_MAX_ENTRIES = 2000


class Trunk(Struct, kw_only=True):
    """Consecutive blocks from token `start` to `end`. `id` is the name of the last block, in hex, and `parent` the id
    of the trunk before, None at the beginning of a tree.

    `stored_bytes` is the size of blocks and `checkpoints` in the file. `entries` are the ids of the saved prompts that
    end at `end`; `num_entries` counts these and the saved prompts that continue the trunk. `hits` counts the requests
    that restored at least a part of it. Times are seconds since the epoch. `prefill_s` is the measured time to compute
    the tokens, 0 if unknown.
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


class FoldedTree(Struct, kw_only=True):
    """The tree of one model and tenant. `nodes` has each trunk before its descendants, the most recently used first.

    `listed_bytes` is the size of the saved prompts if each were stored alone and uncompressed, `raw_bytes` the size of
    the nodes uncompressed, and `stored_bytes` their size in the file, of which checkpoints take `checkpoint_bytes`. So
    sharing saves `listed_bytes - raw_bytes`, and compression saves `raw_bytes - stored_bytes`. `images` is the number
    of encoded pictures, for a tree that has these in place of prompts; `nodes` is empty then. `made_with` are the
    options of `serve`, by flag, that tell it from other trees of the same weights.
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
    made_with: dict[str, str] = field(default_factory=dict)
    nodes: list[Trunk] = field(default_factory=list)


class Outline(Struct, kw_only=True):
    """The trees of all roots, the largest first, and the saved prompts by id, the most recently used first."""

    trees: list[FoldedTree]
    entries: dict[str, EntryInfo]

    def listing(self, *, with_texts: bool = True) -> dict[str, Any]:
        """Returns JSON values: the number of saved prompts (`total`), the latest `entries`, and the `trees`. Without
        texts, the `preview` of each entry is None."""
        hidden: dict[str, Any] = {} if with_texts else {"preview": None}
        latest = list(self.entries.values())[:_MAX_ENTRIES]
        return {
            "total": len(self.entries),
            "entries": [asdict(info) | hidden for info in latest],
            "trees": [
                asdict(tree) | {"nodes": [asdict(node) for node in tree.nodes]} for tree in self.trees if tree.nodes
            ],
        }


def outline(
    snapshot: Snapshot, entries: Sequence[EntryInfo] | None = None, roots: Collection[bytes] | None = None
) -> Outline:
    """Returns the folded trees of `roots`, or of all roots. Nodes with damaged records are left out, with their
    descendants. `entries` is the result of `list_entries` for this snapshot, if the caller has it."""
    known = {info.id: info for info in (list_entries(snapshot) if entries is None else entries)}
    prefixes, trees = PrefixTree(snapshot), list[FoldedTree]()
    for root, record in snapshot.roots():
        if roots is None or root in roots:
            tree = FoldedTree(root=root.hex(), model=record.model, tenant=record.tenant)
            tree.nodes = _Folder(snapshot, prefixes, frozenset(map(bytes.fromhex, known)), tree).trunks(root)
            ended = [id_ for trunk in tree.nodes for id_ in trunk.entries]
            if record.has_pictures:
                tree.images, tree.nodes = sum(trunk.parent is None for trunk in tree.nodes), []
            tree.num_entries, tree.listed_bytes = len(ended), sum(known[id_].raw_bytes for id_ in ended)
            trees.append(tree)
    _tell_apart(snapshot, [tree for tree in trees if tree.nodes])
    return Outline(trees=sorted(trees, key=lambda tree: (-tree.stored_bytes, tree.root)), entries=known)


def _tell_apart(snapshot: Snapshot, trees: Sequence[FoldedTree]) -> None:
    """Sets `made_with` of each tree."""
    models = models_of_roots(snapshot, [bytes.fromhex(tree.root) for tree in trees])
    telling = telling_options(models.values())
    for tree in trees:
        if (model := models.get(bytes.fromhex(tree.root))) is not None:
            tree.made_with = telling[model.identity]


class _Folder:
    """Folds the nodes of one root, and sums them up in `sums`. Without recursion: trees are as deep as conversations
    are long."""

    def __init__(self, snapshot: Snapshot, tree: PrefixTree, ends: frozenset[bytes], sums: FoldedTree) -> None:
        self._snapshot, self._tree, self._ends, self._sums = snapshot, tree, ends, sums

    def trunks(self, root: bytes) -> list[Trunk]:
        """Returns the trunks of a root in the order of `FoldedTree.nodes`."""
        trunks: dict[str, Trunk] = {}
        todo = self._fold_all(self._children(root)[0], None)
        while todo:
            trunk, children = todo.pop()
            trunks[trunk.id] = trunk
            todo += self._fold_all(children, trunk.id)
        for trunk in reversed(trunks.values()):
            if trunk.parent is not None:
                trunks[trunk.parent].num_entries += trunk.num_entries
        return list(trunks.values())

    def _fold_all(self, nodes: _Nodes, parent: str | None) -> list[tuple[Trunk, _Nodes]]:
        """Returns the trunks that begin at these nodes, each with its children, the least recently used first."""
        folded = [self._fold(name, node, parent) for name, node in nodes.items()]
        return sorted(folded, key=lambda item: (item[0].last_used_at, item[0].id))

    def _fold(self, name: bytes, node: NodeRecord, parent: str | None) -> tuple[Trunk, _Nodes]:
        """Returns the trunk that begins at a node, and the nodes that continue the trunk."""
        trunk = Trunk(id=name.hex(), parent=parent, start=node.position, end=node.end)
        while True:
            children, checkpoints = self._children(name)
            self._extend(trunk, name, node, list(checkpoints.values()))
            ended = {name, *checkpoints} & self._ends
            trunk.entries, trunk.num_entries = sorted(end.hex() for end in ended), len(ended)
            if len(children) != 1 or ended:
                return trunk, children
            [(name, node)] = children.items()

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

    def _children(self, name: bytes) -> tuple[_Nodes, _Nodes]:
        """Returns the sound nodes that continue a node or root, and the sound checkpoints there."""
        children: _Nodes = {}
        checkpoints: _Nodes = {}
        for child in self._tree.children.get(name, ()):
            with suppress(StoreCorrupt):
                if (node := self._tree.node(child)) is not None:
                    (checkpoints if node.kind == NodeKind.CHECKPOINT else children)[child] = node
        return children, checkpoints
