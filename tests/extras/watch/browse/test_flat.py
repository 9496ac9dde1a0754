"""The prefix trees as lists."""

from __future__ import annotations

import json

from diskprefix.extras.watch.browse.flat import listing
from diskprefix.extras.watch.browse.outline import Outline, RootOutline, Trunk


def trunk(id_: str, start: int, end: int, *children: Trunk, entries: tuple[str, ...] = ()) -> Trunk:
    return Trunk(
        id=id_,
        start=start,
        end=end,
        num_blocks=1,
        stored_bytes=10,
        checkpoints=0,
        hits=end,
        last_used_at=0.0,
        prefill_s=1.0,
        entries=list(entries),
        num_entries=len(entries) + sum(child.num_entries for child in children),
        children=list(children),
    )


def of(*trunks: Trunk) -> list[dict[str, object]]:
    tree = RootOutline(
        root="r", model="m", tenant="", block_size=16, stored_bytes=1, num_entries=1, trunks=list(trunks)
    )
    found = listing(Outline(roots=[tree], entries={}))
    json.dumps(found)
    nodes: list[dict[str, object]] = found["trees"][0]["nodes"]
    return nodes


def places(*trunks: Trunk) -> list[tuple[object, ...]]:
    return [tuple(node[name] for name in ("id", "parent", "start", "end", "num_blocks")) for node in of(*trunks)]


def test_a_node_comes_after_the_one_that_it_continues() -> None:
    tree = trunk("a", 0, 32, trunk("b", 32, 48, entries=("b",)), trunk("c", 32, 64, entries=("c",)))
    assert places(tree, trunk("d", 0, 16, entries=("d",))) == [
        ("a", None, 0, 32, 1),
        ("b", "a", 32, 48, 1),
        ("c", "a", 32, 64, 1),
        ("d", None, 0, 16, 1),
    ]


def test_the_end_of_a_prompt_is_shown_with_what_leads_to_it_alone() -> None:
    end = trunk("c", 48, 48, entries=("c",))
    [node] = of(trunk("a", 0, 32, trunk("b", 32, 48, end)))
    assert [node[name] for name in ("id", "start", "end", "hits")] == ["c", 0, 48, 48]
    assert [node[name] for name in ("num_blocks", "stored_bytes", "prefill_s")] == [3, 30, 3.0]


def test_a_prompt_that_another_goes_on_from_stands_alone() -> None:
    later = trunk("b", 32, 48, entries=("b",))
    assert [place[0] for place in places(trunk("a", 0, 32, later, entries=("a",)))] == ["a", "b"]


def test_a_tree_may_be_as_deep_as_a_conversation_is_long() -> None:
    deepest = trunk("0", 5000, 5001, entries=("0",))
    for number in range(5000, 0, -1):
        deepest = trunk(str(number), number - 1, number, deepest, entries=(str(number),))
    assert len(of(deepest)) == 5001
