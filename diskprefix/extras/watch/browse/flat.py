"""The prefix trees as JSON values: a flat list of nodes for each tree, parents before children."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from diskprefix.extras.watch.browse.outline import BlockRun, Outline, Trunk

MOST_ENTRIES = 2000


@dataclass(kw_only=True)
class FlatNode(BlockRun):
    """A trunk, or a chain of trunks. `parent` is the id of the node that it continues, None for the first of a tree."""

    parent: str | None


@dataclass(kw_only=True)
class FlatTree:
    """The stored prefixes of one tenant of one model. A node comes after its parent."""

    root: str
    model: str
    tenant: str
    stored_bytes: int
    num_entries: int
    nodes: list[FlatNode]


_OF_RUN = [field.name for field in fields(BlockRun)]
_OF_TREE = [field.name for field in fields(FlatTree) if field.name != "nodes"]
_SUMS = ("num_blocks", "stored_bytes", "prefill_s")


def listing(found: Outline, *, with_texts: bool = True) -> dict[str, Any]:
    """Returns `total`, the number of saved prompts, `entries`, the most recently used first, and `trees`, each a
    `FlatTree` as JSON. Without texts, the `preview` of each entry is None."""
    latest = sorted(found.entries.values(), key=lambda info: -info.last_used_at)[:MOST_ENTRIES]
    hidden: dict[str, Any] = {} if with_texts else {"preview": None}
    return {
        "total": len(found.entries),
        "entries": [asdict(info) | hidden for info in latest],
        "trees": [
            {name: getattr(tree, name) for name in _OF_TREE} | {"nodes": [vars(node) for node in _nodes(tree.trunks)]}
            for tree in found.roots
        ],
    }


def _nodes(trunks: list[Trunk]) -> list[FlatNode]:
    nodes: list[FlatNode] = []
    todo: list[tuple[Trunk, str | None, list[Trunk]]] = [(trunk, None, []) for trunk in reversed(trunks)]
    while todo:
        trunk, parent, before = todo.pop()
        if len(trunk.children) == 1 and not trunk.entries:
            # The end of a prompt is a separate trunk. It is joined to the trunk before it.
            todo.append((trunk.children[0], parent, [*before, trunk]))
            continue
        nodes.append(_joined([*before, trunk], parent))
        todo.extend((child, trunk.id, []) for child in reversed(trunk.children))
    return nodes


def _joined(trunks: list[Trunk], parent: str | None) -> FlatNode:
    """Returns one node for trunks that follow each other."""
    values = {name: getattr(trunks[-1], name) for name in _OF_RUN} | {"start": trunks[0].start}
    sums = {name: sum(getattr(trunk, name) for trunk in trunks) for name in _SUMS}
    return FlatNode(parent=parent, **values | sums | {"hits": max(trunk.hits for trunk in trunks)})
