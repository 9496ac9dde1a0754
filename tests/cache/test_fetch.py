"""An arena may have the beginning of the prompt already: then only what lies behind it is loaded."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.engine.forward import prefill
from diskprefix.errors import StoreUnavailable
from diskprefix.kv.arena import KVArena
from diskprefix.nouns import SHARED, CacheOptions, Prompt
from diskprefix.store.purge import PurgeFilter, purge
from diskprefix.tokens import TokenIds, floor_to_grid
from tests.cache.opening import AUTO, FULL, Opened
from tests.runner import BLOCK, Runner, random_prompt
from tests.store.building import chain, damage

READ_ONLY = replace(FULL, save=False)
PROMPT = random_prompt(1, 6 * BLOCK + 5)


def compute(runner: Runner, token_ids: TokenIds, start: int = 0) -> torch.Tensor:
    """Computes a prompt in this arena, as the memory tier holds it. Returns the next-token logits."""
    if not start:
        runner.arena.settle()
        runner.arena.truncate(0)
        runner.arena.reserve(len(PROMPT) + 40)
    with torch.inference_mode():
        return prefill(
            runner.model, runner.arena, token_ids, start=start, block_size=BLOCK, after_step=lambda _: None
        ).clone()


def fetch(
    runner: Runner, have: int, logits: torch.Tensor | None = None, options: CacheOptions = READ_ONLY
) -> CachedRequest:
    cached = runner.cache.begin(Prompt(PROMPT), options)
    cached.fetch(runner.arena, have, logits)
    cached.choose(runner.arena)
    return cached


@pytest.mark.parametrize("have", [2 * BLOCK, 2 * BLOCK + 3, 4 * BLOCK - 1])
def test_what_the_arena_has_is_neither_loaded_nor_overwritten(
    have: int, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = opened("token")
    runner.run(PROMPT, "full")
    runner.flush()
    logits = compute(runner, PROMPT)
    expected = runner.arena.read_tokens(0, len(PROMPT))
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
    assert runner.arena.read_tokens(0, len(PROMPT)) == expected
    assert restored.logits is not None
    assert torch.equal(restored.logits, logits)
    block_bytes = BLOCK * runner.layout.bytes_per_token
    bytes_behind = (6 - have // BLOCK) * block_bytes
    assert bytes_behind < restored.num_bytes < bytes_behind + block_bytes + 1000
    cached.close()


def test_what_is_stored_no_further_than_the_arena_has_is_not_loaded(opened: Opened) -> None:
    runner, have = opened("token"), 3 * BLOCK + 2
    runner.run(PROMPT, 2 * BLOCK)
    runner.flush()
    compute(runner, PROMPT[:have])
    expected = runner.arena.read_tokens(0, have)
    cached = fetch(runner, have)
    restored = cached.restored
    assert (restored.num_tokens, restored.stored_tokens, restored.num_bytes) == (have, 2 * BLOCK, 0)
    assert runner.arena.read_tokens(0, have) == expected
    report = cached.close()
    assert (report.source, report.restored, report.miss_reason) == ("memory", have, None)


@pytest.mark.parametrize("name", ["token", "qwen3_next"])
def test_a_whole_prompt_in_memory_comes_with_its_logits_and_is_saved(name: str, opened: Opened) -> None:
    """A restart must find it, though nothing was computed for this request."""
    runner = opened(name)
    logits = compute(runner, PROMPT)
    cached = fetch(runner, len(PROMPT), logits, FULL)
    assert cached.restored.logits is not None
    assert torch.equal(cached.restored.logits, logits)
    cached.publish(runner.arena, logits, 0.0)
    report = cached.close()
    assert (report.restored, report.saved) == (len(PROMPT), "queued")
    runner.reopen()
    again = runner.run(PROMPT, "full")
    assert (again.report.restored, again.num_forwards) == (len(PROMPT), 0)
    assert torch.equal(again.logits, logits)


def test_what_memory_has_counts_as_stored_for_no_policy(opened: Opened) -> None:
    """`auto` selects what it would of a prompt that is nowhere yet: memory is gone after a restart."""
    runner = opened("qwen3_next")
    runner.cache.namespaces.get(SHARED).seen.remember(PROMPT, [])
    cached = runner.cache.begin(Prompt(PROMPT, boundaries=(len(PROMPT),)), AUTO)
    cached.fetch(runner.arena, len(PROMPT), compute(runner, PROMPT))
    cached.choose(runner.arena)
    assert cached.selection.aligned == 6 * BLOCK
    cached.close()


@pytest.mark.parametrize("name", ["token", "qwen3_next"])
@pytest.mark.parametrize("fails", ["a damaged node", "snapshot", "in the middle"])
def test_what_fails_behind_it_leaves_a_state_to_go_on_from(
    name: str, fails: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = opened(name)
    runner.run_prompt(Prompt(PROMPT, (4 * BLOCK,)), FULL)
    runner.flush()
    expected = compute(runner, PROMPT)
    compute(runner, PROMPT[: 2 * BLOCK])
    store, fill, num_filled = runner.cache.store, runner.arena.fill, 0

    def fail(*_: Any) -> None:
        raise StoreUnavailable("the disk is away")

    def fail_later(*args: Any) -> None:
        nonlocal num_filled
        num_filled += 1
        (fail if num_filled > 2 else fill)(*args)

    with monkeypatch.context() as patch:
        if fails == "snapshot":
            patch.setattr(store, "snapshot", fail)
        elif fails == "in the middle":
            patch.setattr(runner.arena, "fill", fail_later)
        else:
            damage(store, chain(store.secret, runner.cache.root, PROMPT, BLOCK)[3])
        cached = fetch(runner, 2 * BLOCK)
    restored = cached.restored
    assert restored.refused == ("damaged" if fails == "a damaged node" else None)
    # States at one position are overwritten by the attempt: such a model computes all.
    if name == "qwen3_next" and fails != "snapshot":
        assert restored.num_tokens == 0
    else:
        assert restored.num_tokens == (3 if fails == "a damaged node" else 2) * BLOCK
    assert torch.equal(compute(runner, PROMPT, start=restored.num_tokens), expected)
    cached.close()


def test_what_a_restore_did_not_load_is_not_saved_when_the_store_lost_it(opened: Opened) -> None:
    """The prompt before was restored, all but what its windows had passed. Then the store was purged, and the next
    prompt goes on in the same memory."""
    runner = opened("gemma3")
    windows = [group.window for group in runner.layout.groups if group.window]
    prompt = random_prompt(2, floor_to_grid(max(windows), BLOCK) + 4 * BLOCK)
    longer = np.concatenate([prompt, random_prompt(3, 2 * BLOCK)])
    cold = runner.run(longer, "off")
    runner.run(prompt, "full")
    assert runner.arena.complete_from == 0
    runner.reopen()
    assert runner.run(prompt, "full").report.restored == len(prompt)
    assert BLOCK <= runner.arena.complete_from <= len(prompt) - min(windows) + 1
    runner.flush()
    purge(runner.cache.store, PurgeFilter(), time.time(), lambda _: None)
    again = runner.run_prompt(Prompt(longer), FULL, have=len(prompt))
    assert torch.equal(again.logits, cold.logits)
    assert again.report.saved == "dropped"
    runner.reopen()
    assert runner.cache.stats()["blocks"] == 0
    fresh = runner.run(longer, "full")
    assert (fresh.report.restored, torch.equal(fresh.logits, cold.logits)) == (0, True)


def test_a_fetch_runs_beside_the_engine_thread(opened: Opened) -> None:
    """Another sequence computes meanwhile, and its request is chosen and published."""
    runner = opened("token")
    cold = runner.run(PROMPT, "full")
    runner.flush()
    other = random_prompt(3, 20 * BLOCK)
    arena = KVArena(runner.layout, runner.model.device)
    arena.reserve(len(PROMPT))
    cached = runner.cache.begin(Prompt(PROMPT), FULL)
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
