"""The connector's configuration: the daemon's settings, and one line for what is wrong.
And which pages of the engine are stored together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from diskprefix.bridges.shared.connector_settings import connector_settings
from diskprefix.bridges.vllm.engine_pages import EngineGroup, Pages, UnsupportedPages
from diskprefix.bridges.vllm.request_options import BadParameters, options_of
from diskprefix.errors import DiskPrefixError
from diskprefix.prefixstore.store_options import StoreOptions
from diskprefix.values import Mark
from tests.bridges.vllm.engine import DIM, FULL, HEADS, NUM_BLOCKS, PAGE, SLIDING, caches

KV = {"kv_cache_dir": "/kv"}


def test_keys_are_settings_of_the_daemon() -> None:
    settings = connector_settings(
        KV | {"kv_cache_budget": "2GiB", "kv_cache_ttl": "7d", "disk_prefix_cache": "AUTO:9"}, 128
    )
    assert (settings.kv_cache_dir, settings.kv_cache_budget, settings.kv_cache_ttl) == (Path("/kv"), 2**31, 604800.0)
    assert (settings.disk_prefix_cache, settings.block_size) == ("auto:9", 128)


@pytest.mark.parametrize(("page", "block"), [(16, 128), (48, 144), (128, 128), (272, 272)])
def test_a_block_is_whole_pages_and_not_too_small(page: int, block: int) -> None:
    assert connector_settings(KV, page).block_size == block


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "kv_cache_dir: must name the folder of the store"),
        (
            {"kv_cache_dir": "~nobody-here/kv"},
            "kv_cache_dir: ~nobody-here/kv: ~nobody-here names no user",
        ),
        (KV | {"bugdet": 1}, "bugdet: unknown key; there are: kv_cache_dir, kv_cache_budget, "),
        (KV | {"kv_cache_budget": "much"}, "kv_cache_budget: 'much' is not a size"),
        (KV | {"kv_cache_budget": 5}, "kv_cache_budget: 5 is out of range"),
        (KV | {"disk_prefix_cache": "most"}, "disk_prefix_cache: 'most' is not a cache scope"),
        (KV | {"kv_cache_ttl": "1 month"}, "kv_cache_ttl: '1 month' is not a duration"),
        (KV | {"kv_cache_min_tokens": "few"}, "kv_cache_min_tokens: 'few' is not a valid integer"),
        (KV | {"record": []}, "record: must be a number or a text"),
        (KV | {"block_size": 200}, "block_size: 200 tokens are not whole pages of 16 tokens"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(DiskPrefixError) as raised:
        connector_settings(config, 16)
    assert raised.value.message.startswith(problem)


def test_a_request_may_choose_its_own() -> None:
    options, marks = options_of(
        {"window": 5, "save": False, "ttl": "1h", "marks": [7, 3], "remote_host": "x"}, StoreOptions()
    )
    assert (str(options.scope), options.save, options.ttl_s) == ("auto:5", False, 3600.0)
    assert marks == (Mark(3), Mark(7))
    assert str(options_of(None, StoreOptions())[0].scope) == "auto:30"


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"scope": True}, "scope: "),
        ({"scope": "full", "window": 3}, "prefix_cache.window: only the scope auto"),
        ({"window": 0}, "window: must be an integer of at least 1"),
        ({"save": "no"}, "save: must be true or false"),
        ({"ttl": -1}, "ttl: "),
        ({"marks": 3}, "marks: must be a list"),
        ({"marks": list(range(33))}, "marks: must have at most 32 numbers (got 33)"),
        ({"marks": [1.5]}, "marks: must be an integer"),
    ],
)
def test_what_a_request_asks_wrongly_is_named(parameters: dict[str, Any], problem: str) -> None:
    with pytest.raises(BadParameters) as raised:
        options_of(parameters, StoreOptions())
    assert str(raised.value).startswith(problem)


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
