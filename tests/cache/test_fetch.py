"""An arena may have the beginning of the prompt already: then only what lies behind it is loaded."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.cache.policy.scope import parse_scope
from diskprefix.engine.forward import prefill
from diskprefix.errors import StoreUnavailable
from diskprefix.kv.arena import KVArena
from diskprefix.nouns import SHARED, CacheOptions, Prompt
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.purge import PurgeFilter, purge
from diskprefix.tokens import TokenIds, floor_to_grid
from tests.cache.opening import open_runner
from tests.runner import BLOCK, Runner, random_prompt
from tests.store.building import chain, damage

FULL = CacheOptions(scope=parse_scope("full", param="scope"))
READ_ONLY = CacheOptions(scope=parse_scope("full", param="scope"), save=False)
PROMPT = random_prompt(1, 6 * BLOCK + 5)


def compute(runner: Runner, token_ids: TokenIds, after_step: Callable[[KVArena], None] = lambda _: None) -> Any:
    """Computes a prompt in this arena, as the memory tier holds it. Returns the next-token logits."""
    with torch.inference_mode():
        runner.arena.settle()
        runner.arena.truncate(0)
        runner.arena.reserve(len(PROMPT) + 40)
        return go_on(runner, token_ids, 0, after_step)


def go_on(
    runner: Runner, token_ids: TokenIds, start: int, after_step: Callable[[KVArena], None] = lambda _: None
) -> torch.Tensor:
    with torch.inference_mode():
        return prefill(
            runner.model,
            runner.arena,
            token_ids,
            start=start,
            block_size=BLOCK,
            after_step=after_step,
        ).clone()


def fetch(runner: Runner, have: int, logits: torch.Tensor | None = None, options: CacheOptions = READ_ONLY) -> Any:
    cached = runner.cache.begin(Prompt(PROMPT), options)
    cached.fetch(runner.arena, have, logits)
    cached.choose(runner.arena)
    return cached


def state(runner: Runner, num_tokens: int) -> Bytes:
    return np.frombuffer(runner.arena.read_tokens(0, num_tokens), dtype=np.uint8).copy()


@pytest.mark.parametrize("have", [2 * BLOCK, 2 * BLOCK + 3, 4 * BLOCK - 1])
def test_what_the_arena_has_is_neither_loaded_nor_overwritten(
    have: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner("token", tmp_path)
    runner.run(PROMPT, "full")
    runner.flush()
    logits = compute(runner, PROMPT)
    expected = state(runner, len(PROMPT))
    compute(runner, PROMPT[:have])
    filled: list[int] = []
    fill = runner.arena.fill

    def noted(position: int, *args: Any) -> None:
        filled.append(position)
        fill(position, *args)

    monkeypatch.setattr(runner.arena, "fill", noted)
    cached = fetch(runner, have)
    restored = cached.restored
    assert (restored.num_tokens, restored.stored_tokens, restored.source) == (len(PROMPT), len(PROMPT), "disk")
    assert min(filled) == have
    assert np.array_equal(state(runner, len(PROMPT)), expected)
    assert torch.equal(restored.logits, logits)
    num_blocks = 6 - have // BLOCK
    bytes_behind = num_blocks * BLOCK * runner.layout.bytes_per_token
    assert bytes_behind < restored.num_bytes < bytes_behind + BLOCK * runner.layout.bytes_per_token + 1000
    cached.close()
    runner.close()


def test_what_is_stored_no_further_than_the_arena_has_is_not_loaded(tmp_path: Path) -> None:
    runner = open_runner("token", tmp_path)
    runner.run(PROMPT, 2 * BLOCK)
    runner.flush()
    compute(runner, PROMPT[: 3 * BLOCK + 2])
    expected = state(runner, 3 * BLOCK + 2)
    cached = fetch(runner, 3 * BLOCK + 2)
    restored = cached.restored
    assert (restored.num_tokens, restored.stored_tokens, restored.num_bytes) == (3 * BLOCK + 2, 2 * BLOCK, 0)
    assert np.array_equal(state(runner, 3 * BLOCK + 2), expected)
    report = cached.close()
    assert (report.source, report.restored, report.miss_reason) == ("memory", 3 * BLOCK + 2, None)
    runner.close()


def test_a_whole_prompt_in_memory_comes_with_its_logits(tmp_path: Path) -> None:
    runner = open_runner("token", tmp_path)
    logits = compute(runner, PROMPT)
    cached = fetch(runner, len(PROMPT), logits)
    assert torch.equal(cached.restored.logits, logits)
    assert cached.close().restored == len(PROMPT)
    runner.close()


@pytest.mark.parametrize("name", ["token", "qwen3_next"])
def test_what_memory_has_and_the_store_has_not_is_saved(name: str, tmp_path: Path) -> None:
    """A restart must find it, though nothing was computed for this request."""
    runner = open_runner(name, tmp_path)
    logits = compute(runner, PROMPT)
    cached = fetch(runner, len(PROMPT), logits, FULL)
    cached.publish(runner.arena, logits, 0.0)
    assert cached.close().saved == "queued"
    runner.reopen()
    again = runner.run(PROMPT, "full")
    assert (again.report.restored, again.num_forwards) == (len(PROMPT), 0)
    assert torch.equal(again.logits, logits)
    runner.close()


def test_what_memory_has_counts_as_stored_for_no_policy(tmp_path: Path) -> None:
    """`auto` selects what it would of a prompt that is nowhere yet: memory is gone after a restart."""
    runner = open_runner("qwen3_next", tmp_path)
    auto = CacheOptions(scope=parse_scope("auto", param="scope"))
    prompt = Prompt(PROMPT, boundaries=(len(PROMPT),))
    runner.cache.namespaces.get(SHARED).seen.remember(PROMPT, [])
    logits = compute(runner, PROMPT)
    cached = runner.cache.begin(prompt, auto)
    cached.fetch(runner.arena, len(PROMPT), logits)
    cached.choose(runner.arena)
    assert cached.selection.aligned == 6 * BLOCK
    cached.close()
    runner.close()


@pytest.mark.parametrize("name", ["token", "qwen3_next"])
def test_a_damaged_node_behind_it_leaves_a_state_to_go_on_from(name: str, tmp_path: Path) -> None:
    runner = open_runner(name, tmp_path)
    runner.run_prompt(Prompt(PROMPT, (4 * BLOCK,)), FULL)
    runner.flush()
    expected = compute(runner, PROMPT)
    damage(runner.cache.store, chain(runner.cache.store.secret, runner.cache.root, PROMPT, BLOCK)[3])
    compute(runner, PROMPT[: 2 * BLOCK])
    cached = fetch(runner, 2 * BLOCK)
    restored = cached.restored
    assert restored.refused == "damaged"
    # States at one position are overwritten by the attempt: such a model computes all.
    assert restored.num_tokens == (0 if name == "qwen3_next" else 3 * BLOCK)
    assert torch.equal(go_on(runner, PROMPT, restored.num_tokens), expected)
    cached.close()
    runner.close()


@pytest.mark.parametrize("name", ["token", "qwen3_next"])
@pytest.mark.parametrize("fails", ["snapshot", "in the middle"])
def test_a_store_that_fails_leaves_what_the_arena_had(
    name: str, fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = open_runner(name, tmp_path)
    runner.run_prompt(Prompt(PROMPT, (4 * BLOCK,)), FULL)
    runner.flush()
    expected = compute(runner, PROMPT)
    compute(runner, PROMPT[: 2 * BLOCK])
    num_filled = 0
    fill = runner.arena.fill

    def fail_later(*args: Any) -> None:
        nonlocal num_filled
        num_filled += 1
        if num_filled > 2:
            raise StoreUnavailable("the disk is away")
        fill(*args)

    def fail() -> None:
        raise StoreUnavailable("the disk is away")

    with monkeypatch.context() as patch:
        if fails == "snapshot":
            patch.setattr(runner.cache.store, "snapshot", fail)
        else:
            patch.setattr(runner.arena, "fill", fail_later)
        cached = fetch(runner, 2 * BLOCK)
    is_lost = name == "qwen3_next" and fails == "in the middle"
    assert cached.restored.num_tokens == (0 if is_lost else 2 * BLOCK)
    assert torch.equal(go_on(runner, PROMPT, cached.restored.num_tokens), expected)
    cached.close()
    runner.close()


def test_the_arena_knows_from_where_on_its_layers_with_windows_have_all_tokens(tmp_path: Path) -> None:
    """State that a restore did not load must not be saved in the place of what was removed meanwhile."""
    runner = open_runner("gemma3", tmp_path)
    windows = [group.window for group in runner.layout.groups if group.window]
    prompt = random_prompt(2, max(windows) + 4 * BLOCK)
    runner.run(prompt, "full")
    assert runner.arena.complete_from == 0
    runner.reopen()
    assert runner.run(prompt, "full").report.restored == len(prompt)
    assert BLOCK <= runner.arena.complete_from <= len(prompt) - min(windows) + 1
    runner.close()


def test_what_a_restore_did_not_load_is_not_saved_when_the_store_lost_it(tmp_path: Path) -> None:
    """The prompt before was restored, all but what its windows had passed. Then the store was purged, and the next
    prompt goes on in the same memory."""
    runner = open_runner("gemma3", tmp_path)
    window = max(group.window or 0 for group in runner.layout.groups)
    prompt = random_prompt(2, floor_to_grid(window, BLOCK) + 4 * BLOCK)
    longer = np.concatenate([prompt, random_prompt(3, 2 * BLOCK)])
    cold = runner.run(longer, "off")
    runner.run(prompt, "full")
    runner.reopen()
    assert runner.run(prompt, "full").report.restored == len(prompt)
    runner.flush()
    purge(runner.cache.store, PurgeFilter(), time.time(), lambda _: None)
    again = runner.run_prompt(Prompt(longer), FULL, have=len(prompt))
    assert torch.equal(again.logits, cold.logits)
    assert again.report.saved == "dropped"
    runner.reopen()
    assert runner.cache.stats()["blocks"] == 0
    fresh = runner.run(longer, "full")
    assert (fresh.report.restored, torch.equal(fresh.logits, cold.logits)) == (0, True)
    runner.close()


def test_a_fetch_runs_beside_the_engine_thread(tmp_path: Path) -> None:
    """Another sequence computes meanwhile, and its request is chosen and published."""
    runner = open_runner("token", tmp_path)
    cold = runner.run(PROMPT, "full")
    runner.flush()
    other = random_prompt(3, 20 * BLOCK)
    arena = KVArena(runner.layout, runner.model.device)
    arena.reserve(len(PROMPT))
    cached: CachedRequest = runner.cache.begin(Prompt(PROMPT), FULL)
    with ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(cached.fetch, arena)
        runner.run(other, "full")
        fetching.result()
    cached.choose(runner.arena)
    logits = cached.restored.logits
    assert logits is not None
    assert torch.equal(logits, cold.logits)
    cached.publish(arena, logits, 0.0)
    assert cached.close().saved == "stored"
    runner.flush()
    assert runner.run(other, "full").report.restored == len(other)
    runner.close()
