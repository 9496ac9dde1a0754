"""The prefix trees as JSON values: a flat list for each tree, parents before children."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from diskprefix.extras.watch.browse.outline import Outline, Trunk

MOST_ENTRIES = 2000
_NAMES = [field.name for field in fields(Trunk) if field.name not in ("children", "checkpoints")]

_SUMS = ("num_blocks", "stored_bytes", "prefill_s")


def listing(found: Outline, *, with_texts: bool = True) -> dict[str, Any]:
    """Returns `total`, the number of saved prompts, `entries`, the most recently used first, and `trees`.

    Without texts, the `preview` of each entry is None. A tree has `nodes`: each is a `Trunk`, or a chain of them, with
    the id of its `parent` (None for the first of a tree).
    """
    latest = sorted(found.entries.values(), key=lambda info: -info.last_used_at)[:MOST_ENTRIES]
    hidden: dict[str, Any] = {} if with_texts else {"preview": None}
    return {
        "total": len(found.entries),
        "entries": [asdict(info) | hidden for info in latest],
        "trees": [
            {
                "root": tree.root,
                "model": tree.model,
                "tenant": tree.tenant,
                "stored_bytes": tree.stored_bytes,
                "num_entries": tree.num_entries,
                "nodes": _nodes(tree.trunks),
            }
            for tree in found.roots
        ],
    }


def _nodes(trunks: list[Trunk]) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    todo: list[tuple[Trunk, str | None, list[Trunk]]] = [(trunk, None, []) for trunk in reversed(trunks)]
    while todo:
        trunk, parent, before = todo.pop()
        if len(trunk.children) == 1 and not trunk.entries and trunk.children[0].generated == trunk.generated:
            # The end of a prompt is a trunk of its own, and would stand alone behind this one.
            todo.append((trunk.children[0], parent, [*before, trunk]))
            continue
        nodes.append({"parent": parent} | _joined([*before, trunk]))
        todo.extend((child, trunk.id, []) for child in reversed(trunk.children))
    return nodes


def _joined(trunks: list[Trunk]) -> dict[str, Any]:
    """Returns one node of trunks that follow each other."""
    node = {name: getattr(trunks[-1], name) for name in _NAMES} | {"start": trunks[0].start}
    return node | {name: sum(getattr(trunk, name) for trunk in trunks) for name in _SUMS}
