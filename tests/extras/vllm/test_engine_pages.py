"""Which pages can be stored, and which layers form a group."""

from __future__ import annotations

import pytest
import torch

from diskprefix.extras.vllm.engine_pages import EngineGroup, Pages, UnsupportedPages
from tests.extras.vllm.engine import DIM, FULL, HEADS, NUM_BLOCKS, PAGE, SLIDING, caches


def test_layers_at_equal_distances_are_copied_at_once() -> None:
    (group,) = Pages(caches([FULL]), [FULL], NUM_BLOCKS).groups
    assert [tuple(stack.shape) for stack in group.stacks] == [(2, NUM_BLOCKS, 2 * HEADS * PAGE * DIM)]
    assert group.layout.tensors == ("0.pages", "2.pages")


def test_layers_in_memories_of_their_own_form_one_group_too() -> None:
    apart = {name: cache.clone() for name, cache in caches([FULL]).items()}
    (group,) = Pages(apart, [FULL], NUM_BLOCKS).groups
    assert [tuple(stack.shape) for stack in group.stacks] == [(1, NUM_BLOCKS, 2 * HEADS * PAGE * DIM)] * 2


def test_a_layer_that_shares_the_pages_of_another_is_stored_once() -> None:
    found = caches([FULL])
    found[FULL.layers[1]] = found[FULL.layers[0]]
    (group,) = Pages(found, [FULL], NUM_BLOCKS).groups
    assert group.layout.tensors == ("0.pages",)


def test_each_table_of_blocks_and_each_form_has_a_group_of_its_own() -> None:
    found = caches([FULL, SLIDING])
    found[FULL.layers[1]] = torch.zeros(NUM_BLOCKS, 1, PAGE, DIM)
    groups = Pages(found, [FULL, SLIDING], NUM_BLOCKS).groups
    assert [(group.engine_group, group.layout.dtype, group.layout.window) for group in groups] == [
        (0, "bfloat16", None),
        (0, "float32", None),
        (1, "bfloat16", 12),
    ]


def test_a_block_of_the_engine_may_be_several_pages() -> None:
    engine = EngineGroup(FULL.layers, 2 * PAGE)
    (group,) = Pages(caches([FULL]), [engine], NUM_BLOCKS // 2).groups
    assert (group.layout.page, group.page_numbers([3, 5])) == (PAGE, [6, 7, 10, 11])


@pytest.mark.parametrize(
    ("cache", "problem"),
    [
        (torch.zeros(NUM_BLOCKS, PAGE, DIM), "2 dimensions"),
        (torch.zeros(NUM_BLOCKS, 1, PAGE // 2, DIM), "4 states for 8 tokens"),
        (torch.zeros(NUM_BLOCKS + 1, 1, PAGE, DIM), "25 pages for 24 blocks"),
        (torch.zeros(NUM_BLOCKS, HEADS, PAGE, 2 * DIM)[..., ::2], "not in one piece"),
        (torch.zeros(NUM_BLOCKS, HEADS, PAGE, 2 * DIM)[..., :DIM], "not in one piece"),
    ],
)
def test_pages_that_cannot_be_stored_are_named(cache: torch.Tensor, problem: str) -> None:
    engine = EngineGroup(("layers.0",), PAGE)
    with pytest.raises(UnsupportedPages, match=f"layers.0 has .*{problem}"):
        Pages({"layers.0": cache}, [engine], NUM_BLOCKS)


def test_a_model_without_pages_is_named() -> None:
    with pytest.raises(UnsupportedPages, match="no layer with a KV cache"):
        Pages({}, [FULL], NUM_BLOCKS)
