"""A matcher forgets a damaged node, whatever it was matched as, and what continues it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from diskprefix.prefixstore.cache.matching import Matcher
from diskprefix.prefixstore.cache.policy.select import StateKind
from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.store.pieces import LayoutGroup, LayoutText, PayloadLayout
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.tokens import TokenIds, TokenPath, common_prefix_length

BLOCK = 64
LAYOUT = PayloadLayout.parse(LayoutText(1, (LayoutGroup(1, 4, "float32", ("k",)),), (8, "float32")).text())
STORED = np.arange(3 * BLOCK + 36, dtype=np.int32)


def nodes_of(token_ids: TokenIds) -> PromptNodes:
    return PromptNodes(TokenPath(1, b"r" * 16, token_ids, BLOCK), LAYOUT)


class Index:
    """Some nodes, as a tier has them. `damaged` ones are gone."""

    def __init__(self, *stored: tuple[Node, TokenIds]) -> None:
        self.stored = {node.name: (node, token_ids) for node, token_ids in stored}

    def has(self, node: Node, token_ids: bytes) -> bool:
        return node.name in self.stored and self.stored[node.name][1].tobytes() == token_ids

    def similar(self, parent: bytes, token_ids: TokenIds) -> Iterator[tuple[Node, TokenIds]]:
        children = [found for found in self.stored.values() if found[0].parent == parent]
        yield from sorted(children, key=lambda found: -common_prefix_length(found[1], token_ids))

    def num_children(self, parent: bytes) -> int:
        return sum(node.parent == parent for node, _ in self.stored.values())


def index_of(token_ids: TokenIds, *, partial: int = 0, checkpoint: int = 0) -> Index:
    """Returns an index with the blocks and the tail of a prompt, a block that ends at `partial`, and a checkpoint."""
    nodes = nodes_of(token_ids)
    some = [*nodes.blocks, nodes.tail()]
    some += [nodes.partial_block(partial)] if partial else []
    some += [nodes.checkpoint(checkpoint)] if checkpoint else []
    return Index(*((node, token_ids[node.position : node.end]) for node in some))


def matched(token_ids: TokenIds, *indexes: Index, state: StateKind = "token") -> Matcher[Index]:
    matcher = Matcher(nodes_of(token_ids), list(indexes), state)
    matcher.match()
    return matcher


def drop_last(matcher: Matcher[Index]) -> Node:
    """Drops the last node to restore from its index and from the matcher, as a restore does."""
    node = matcher.restorable()[0][-1]
    del matcher.index_of[node.name].stored[node.name]
    matcher.drop_node(node)
    return node


NEXT_TURN = np.append(STORED, np.full(BLOCK, 7, np.int32))


def test_the_tail_of_another_prompt_goes_and_its_blocks_stay() -> None:
    matcher = matched(NEXT_TURN, index_of(STORED))
    assert matcher.restorable()[1] == len(STORED)
    assert drop_last(matcher).kind == NodeKind.TAIL
    assert (matcher.partial_match, matcher.restorable()) == (None, (nodes_of(STORED).blocks, 3 * BLOCK))


def test_the_next_best_takes_the_place_of_a_partial_match() -> None:
    index = index_of(STORED, partial=3 * BLOCK + 20)
    matcher = matched(NEXT_TURN, index)
    assert [drop_last(matcher).kind, drop_last(matcher).kind] == [NodeKind.TAIL, NodeKind.BLOCK]
    assert matcher.restorable()[1] == 3 * BLOCK


def test_a_block_goes_with_all_that_continues_it_and_a_part_of_another_may_follow() -> None:
    blocks = nodes_of(STORED).blocks
    other = np.append(STORED[: BLOCK + 40], np.full(BLOCK, 9, np.int32))
    both = index_of(STORED)
    both.stored |= index_of(other).stored
    matcher = matched(STORED, both)
    del both.stored[blocks[1].name]
    matcher.drop_node(blocks[1])
    assert (matcher.tail, matcher.blocks, matcher.restorable()[1]) == (None, blocks[:1], BLOCK + 40)


def test_the_prompts_own_tail_goes_alone() -> None:
    matcher = matched(STORED, index_of(STORED))
    assert drop_last(matcher).kind == NodeKind.TAIL
    assert (matcher.tail, matcher.blocks, matcher.restorable()[1]) == (None, nodes_of(STORED).blocks, 3 * BLOCK)


@pytest.mark.parametrize("state", ["token_checkpoints", "checkpoints"])
def test_a_checkpoint_or_another_prompts_tail_takes_only_its_states_with_it(state: StateKind) -> None:
    grid = STORED[: 3 * BLOCK].copy()
    stored, first = (STORED, 2 * BLOCK + 5) if state == "token_checkpoints" else (grid, 2 * BLOCK)
    matcher = matched(NEXT_TURN if state == "token_checkpoints" else np.append(grid, NEXT_TURN[-BLOCK:]),
                      index_of(stored, checkpoint=first), state=state)  # fmt: skip
    for kind, stop in ((NodeKind.TAIL, len(stored)), (NodeKind.CHECKPOINT, first)):
        assert matcher.restorable()[1] == stop
        assert drop_last(matcher).kind == kind
        assert matcher.blocks == nodes_of(STORED).blocks
    assert matcher.restorable() == ([], 0)


def test_a_node_that_one_index_dropped_is_taken_from_the_next_one() -> None:
    """In memory, and written meanwhile."""
    memory, disk = index_of(STORED), index_of(STORED)
    matcher = matched(NEXT_TURN, memory, disk)
    tail = matcher.restorable()[0][-1]
    assert matcher.index_of[tail.name] is memory
    drop_last(matcher)
    assert (matcher.restorable()[0][-1], matcher.index_of[tail.name]) == (tail, disk)
    drop_last(matcher)
    assert matcher.restorable()[1] == 3 * BLOCK


@pytest.mark.parametrize("state", ["token", "sliceable", "token_checkpoints", "checkpoints"])
def test_dropping_every_node_to_restore_ends_with_none(state: StateKind) -> None:
    index = index_of(STORED, partial=3 * BLOCK + 20, checkpoint=2 * BLOCK)
    matcher, dropped = matched(NEXT_TURN, index, state=state), list[Node]()
    for _ in range(len(index.stored)):
        if matcher.restorable()[0]:
            dropped.append(drop_last(matcher))
    assert matcher.restorable() == ([], 0)
    assert len(set(dropped)) == len(dropped)
