"""A sequence may have the beginning of the prompt already: then only what lies behind it is loaded."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from diskprefix.errors import StoreUnavailable
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.runtime.prefill import prefill
from diskprefix.tokens import Logits, TokenIds, floor_to_grid
from diskprefix.values import SHARED, CacheOptions, Prompt
from tests.prefixstore.cache.opening import AUTO, FULL, Opened
from tests.prefixstore.store.building import chain, damage
from tests.runner import BLOCK, Runner, random_prompt

READ_ONLY = replace(FULL, save=False)
PROMPT = random_prompt(1, 6 * BLOCK + 5)


def compute(runner: Runner, token_ids: TokenIds, start: int = 0) -> Logits:
    """Computes a prompt in a new sequence, or goes on in the last one. Returns the next-token logits."""
    if not start:
        runner.new_sequence(len(PROMPT) + 40)
    return prefill(
        runner.runtime, runner.sequence, token_ids, start=start, block_size=BLOCK, after_step=lambda _: None
    ).copy()


def fetch(
    runner: Runner, in_memory_tokens: int, logits: Logits | None = None, options: CacheOptions = READ_ONLY
) -> CachedRequest:
    cached = CachedRequest(runner.cache, Prompt(PROMPT), options)
    cached.fetch(runner.sequence, in_memory_tokens, logits)
    cached.choose(runner.sequence)
    return cached


@pytest.mark.parametrize("in_memory_tokens", [2 * BLOCK, 2 * BLOCK + 3, 4 * BLOCK - 1])
def test_what_the_sequence_has_is_neither_loaded_nor_overwritten(
    in_memory_tokens: int, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = opened("token")
    runner.run(PROMPT, "full")
    runner.flush()
    logits = compute(runner, PROMPT)
    expected = runner.sequence.content(0, len(PROMPT))
    compute(runner, PROMPT[:in_memory_tokens])
    filled: list[int] = []
    fill = runner.sequence.fill

    def noted(position: int, *args: Any) -> None:
        filled.append(position)
        fill(position, *args)

    monkeypatch.setattr(runner.sequence, "fill", noted)
    cached = fetch(runner, in_memory_tokens)
    restored = cached.restored
    assert (restored.num_tokens, restored.stored_tokens, restored.source) == (len(PROMPT), len(PROMPT), "disk")
    assert min(filled) == in_memory_tokens
    assert runner.sequence.content(0, len(PROMPT)) == expected
    assert restored.logits is not None
    assert np.array_equal(restored.logits, logits)
    block_bytes = BLOCK * runner.layout.bytes_per_token
    bytes_behind = (6 - in_memory_tokens // BLOCK) * block_bytes
    assert bytes_behind < restored.num_bytes < bytes_behind + block_bytes + 1000
    cached.close()


def test_what_is_stored_no_further_than_the_sequence_has_is_not_loaded(opened: Opened) -> None:
    runner, in_memory_tokens = opened("token"), 3 * BLOCK + 2
    runner.run(PROMPT, 2 * BLOCK)
    runner.flush()
    compute(runner, PROMPT[:in_memory_tokens])
    expected = runner.sequence.content(0, in_memory_tokens)
    cached = fetch(runner, in_memory_tokens)
    restored = cached.restored
    assert (restored.num_tokens, restored.stored_tokens, restored.num_bytes) == (in_memory_tokens, 2 * BLOCK, 0)
    assert runner.sequence.content(0, in_memory_tokens) == expected
    report = cached.close()
    assert (report.source, report.restored, report.miss_reason) == ("memory", in_memory_tokens, None)


@pytest.mark.parametrize("name", ["token", "qwen3_next"])
def test_a_whole_prompt_in_memory_comes_with_its_logits_and_is_saved(name: str, opened: Opened) -> None:
    """A restart must find it, though nothing was computed for this request."""
    runner = opened(name)
    logits = compute(runner, PROMPT)
    cached = fetch(runner, len(PROMPT), logits, FULL)
    assert cached.restored.logits is not None
    assert np.array_equal(cached.restored.logits, logits)
    cached.publish(runner.sequence, logits, 0.0)
    report = cached.close()
    assert (report.restored, report.saved) == (len(PROMPT), "queued")
    runner.reopen()
    again = runner.run(PROMPT, "full")
    assert (again.report.restored, again.num_forwards) == (len(PROMPT), 0)
    assert np.array_equal(again.logits, logits)


def test_what_memory_has_counts_as_stored_for_no_policy(opened: Opened) -> None:
    """`auto` selects what it would of a prompt that is nowhere yet: memory is gone after a restart."""
    runner = opened("qwen3_next")
    runner.cache.namespaces.get(SHARED).seen.remember(PROMPT, [])
    cached = CachedRequest(runner.cache, Prompt(PROMPT, boundaries=(len(PROMPT),)), AUTO)
    logits = compute(runner, PROMPT)
    cached.fetch(runner.sequence, len(PROMPT), logits)
    cached.choose(runner.sequence)
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
    store, fill, num_filled = runner.cache.store, runner.sequence.fill, 0

    def fail(*_: Any) -> None:
        raise StoreUnavailable("the disk is away")

    def fail_later(*args: Any) -> None:
        nonlocal num_filled
        num_filled += 1
        (fail if num_filled > 2 else fill)(*args)

    with monkeypatch.context() as patch:
        if fails == "snapshot":
            patch.setattr(store.reads, "snapshot", fail)
        elif fails == "in the middle":
            patch.setattr(runner.sequence, "fill", fail_later)
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
    assert np.array_equal(compute(runner, PROMPT, start=restored.num_tokens), expected)
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
    assert runner.sequence.complete_from == 0
    runner.reopen()
    assert runner.run(prompt, "full").report.restored == len(prompt)
    assert BLOCK <= runner.sequence.complete_from <= len(prompt) - min(windows) + 1
    runner.flush()
    purge(runner.cache.store, PurgeFilter(), time.time(), lambda _: None)
    again = runner.run_prompt(Prompt(longer), FULL, in_memory_tokens=len(prompt))
    assert torch.equal(again.logits, cold.logits)
    assert again.report.saved == "dropped"
    runner.reopen()
    assert runner.cache.stats()["blocks"] == 0
    fresh = runner.run(longer, "full")
    assert (fresh.report.restored, torch.equal(fresh.logits, cold.logits)) == (0, True)


@pytest.mark.parametrize("name", ["token", "grid", "qwen3_next"])
@pytest.mark.parametrize("in_memory_tokens", [0, 2 * BLOCK])
def test_what_a_sequence_had_that_lost_its_memory_is_restored(name: str, in_memory_tokens: int, opened: Opened) -> None:
    """It may wait to be written: the pages are others' by then."""
    runner, told = opened(name), list[int]()
    expected = compute(runner, PROMPT)
    cached = fetch(runner, 0, None, FULL)
    compute(runner, PROMPT[: 4 * BLOCK])
    cached.save_partial(runner.sequence, PROMPT[: 4 * BLOCK])
    compute(runner, PROMPT[:in_memory_tokens] if in_memory_tokens else PROMPT[::-1].copy())
    again = cached.begin_restore(runner.sequence, PROMPT, in_memory_tokens, on_block=told.append)
    again.run()
    assert cached.adopt_restore(again).num_tokens == 4 * BLOCK
    assert (runner.sequence.num_tokens, sorted(told)) == (4 * BLOCK, list(range(in_memory_tokens // BLOCK, 4)))
    assert np.array_equal(compute(runner, PROMPT, start=4 * BLOCK), expected)
    cached.close()
    runner.flush()
    assert not runner.cache.store.evictor.pinned()
    assert not runner.pool.holds


def test_a_block_is_told_when_all_that_is_needed_of_it_is_there(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread is slow with a part of the last block but two: those behind it come first."""
    runner = opened("gemma3", exact_at="token")
    prompt = random_prompt(2, floor_to_grid(max(g.window or 0 for g in runner.layout.groups), BLOCK) + 4 * BLOCK + 3)
    runner.run(prompt, "full")
    runner.reopen()
    whole = next(number for number, group in enumerate(runner.layout.groups) if group.window is None)
    slow, is_told = len(prompt) // BLOCK - 3, threading.Event()
    fill, filled, told = KVSequence.fill, set[tuple[int, int]](), list[int]()

    def slowly(sequence: KVSequence, position: int, num_tokens: int, group: int, *rest: Any) -> None:
        fill(sequence, position, num_tokens, group, *rest)
        assert (position // BLOCK, group) != (slow, whole) or is_told.wait(30)
        filled.add((position // BLOCK, group))

    def on_block(number: int) -> None:
        needed = {n for n, g in enumerate(runner.layout.groups) if g.first_needed(len(prompt)) < (number + 1) * BLOCK}
        assert {(number, n) for n in needed} <= filled
        told.append(number)
        if number == slow + 2:
            is_told.set()

    monkeypatch.setattr(KVSequence, "fill", slowly)
    cached = CachedRequest(runner.cache, Prompt(prompt), READ_ONLY)
    cached.begin_restore(runner.new_sequence(len(prompt)), prompt, on_block=on_block).run()
    cached.close()
    # Two threads read: only the slow one is surely behind those after it.
    assert told[-1] == slow
    assert sorted(told) == [*range(slow + 3)]


def test_a_load_that_fails_ends_once_no_thread_writes_to_its_pages(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses the second reading thread, while the first one is about to write."""
    runner, is_writing, has_ended = opened("token"), threading.Event(), threading.Event()
    runner.run(PROMPT, "full")
    runner.flush()
    runner.new_sequence(len(PROMPT))
    fill, submit, late = runner.sequence.fill, runner.cache.readers.submit, list[bool]()

    def write(*args: Any) -> None:
        is_writing.set()
        late.append(has_ended.wait(0.2))
        fill(*args)

    def refuse(*args: Any) -> Any:
        if not is_writing.is_set():
            begun = submit(*args)
            assert is_writing.wait(30)
            return begun
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(runner.sequence, "fill", write)
    monkeypatch.setattr(runner.cache.readers, "submit", refuse)
    cached = CachedRequest(runner.cache, Prompt(PROMPT), READ_ONLY)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        cached.fetch(runner.sequence)
    has_ended.set()
    assert late
    assert not any(late)
    cached.close()
