"""A prompt of a model that is exact at every token restores all that it shares with a stored block or tail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.engine.forward import prefill
from diskprefix.kv.arena import KVArena
from diskprefix.nouns import SHARED, CacheOptions, Prompt
from diskprefix.store.schema import Kind, node_name
from diskprefix.store.verify import verify_index
from diskprefix.tokens import LEAST_TOKENS, TokenIds
from tests.cache.opening import gated
from tests.exactness.architectures import tiny_model
from tests.runner import VOCAB, Answer, Runner, random_prompt, tiny_llama, tiny_settings
from tests.store.building import damage

BLOCK = 32
FULL = CacheOptions(scope=parse_scope("full", param="scope"))
READ_ONLY = CacheOptions(scope=FULL.scope, save=False)


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv", block_size=BLOCK), exact_at="token")
    yield runner
    runner.close()


def leaving(stored: TokenIds, position: int, num_more: int = 20) -> TokenIds:
    """A prompt that leaves another one at a position: the token there is another one."""
    more = random_prompt(99, num_more)
    if position < len(stored):
        more[0] = (stored[position] + 1) % VOCAB
    return np.concatenate([stored[:position], more])


def state_of(runner: Runner, num_tokens: int) -> npt.NDArray[np.uint8]:
    """The state of the first tokens in the arena, shape [rows, num_tokens, bytes]."""
    (group,) = runner.layout.groups
    payload = np.frombuffer(runner.arena.read_tokens(0, num_tokens), np.uint8)
    return payload.reshape(len(group.specs) * group.heads, num_tokens, -1 if num_tokens else 0)


def ask(runner: Runner, token_ids: TokenIds, options: CacheOptions = READ_ONLY, reply: int = 0) -> Answer:
    answer = runner.run_prompt(Prompt(token_ids), options, reply=reply)
    runner.flush()
    return answer


def restored(runner: Runner, token_ids: TokenIds, options: CacheOptions = READ_ONLY) -> int:
    return ask(runner, token_ids, options).report.restored


def name_of(runner: Runner, token_ids: TokenIds, kind: Kind) -> bytes:
    """The name of a node that begins a prompt."""
    return node_name(runner.cache.store.secret, runner.cache.root, token_ids, kind)


def test_a_prompt_restores_to_where_it_leaves_what_is_stored(runner: Runner) -> None:
    """At every position: in the first block, between blocks, in the tail and at its end."""
    stored = random_prompt(1, 3 * BLOCK + 5)
    ask(runner, stored, FULL)
    cold = state_of(runner, len(stored)).copy()
    runner.reopen()
    for position in range(LEAST_TOKENS, len(stored) + 1):
        report = ask(runner, leaving(stored, position)).report
        assert (report.restored, report.matched, report.refused) == (position, position, None)
        assert report.source == "disk"
        assert state_of(runner, position).tobytes() == cold[:, :position].tobytes()


def test_a_few_tokens_that_all_prompts_begin_with_are_no_hit(runner: Runner) -> None:
    stored = random_prompt(1, 3 * BLOCK + 5)
    ask(runner, stored, FULL)
    for position in range(LEAST_TOKENS):
        report = ask(runner, leaving(stored, position, 2 * BLOCK)).report
        assert (report.restored, report.matched, report.miss_reason) == (0, 0, "new")


def test_a_prompt_that_a_stored_one_begins_with_leaves_one_token_to_compute(runner: Runner) -> None:
    stored = random_prompt(1, 3 * BLOCK + 5)
    ask(runner, stored, FULL)
    runner.reopen()
    for end in range(LEAST_TOKENS + 1, len(stored)):
        report = ask(runner, stored[:end].copy()).report
        assert report.restored == end - 1
        assert report.refused == ("no_logits" if end % BLOCK == 0 else None)
    whole = ask(runner, stored)
    assert (whole.report.restored, whole.num_forwards) == (len(stored), 0)


def test_the_prefill_goes_on_to_the_grid_and_then_in_whole_steps(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = random_prompt(1, 2 * BLOCK + 5)
    ask(runner, stored, FULL)
    steps: list[tuple[int, int]] = []
    forward = KVArena.forward

    def noted(arena: KVArena, model: Any, ids: torch.Tensor) -> torch.Tensor:
        steps.append((arena.num_tokens, arena.num_tokens + ids.shape[1]))
        return forward(arena, model, ids)

    monkeypatch.setattr(KVArena, "forward", noted)
    ask(runner, leaving(stored, BLOCK + 3, 2 * BLOCK))
    assert steps == [(BLOCK + 3, 2 * BLOCK), (2 * BLOCK, 3 * BLOCK), (3 * BLOCK, 3 * BLOCK + 3)]


def test_a_model_that_is_exact_on_the_grid_stays_on_it(tmp_path: Path) -> None:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv", block_size=BLOCK), exact_at="grid")
    stored = random_prompt(1, 2 * BLOCK + 5)
    ask(runner, stored, FULL)
    assert restored(runner, leaving(stored, BLOCK + 3)) == BLOCK
    with pytest.raises(AssertionError, match="grid points only"):
        prefill(
            runner.model,
            runner.arena,
            stored,
            start=3,
            block_size=BLOCK,
            after_step=lambda _: None,
        )
    runner.close()


def test_the_child_that_shares_most_is_used(runner: Runner) -> None:
    """Of many that continue the same block, some of which are shorter than a block."""
    beginning = random_prompt(1, BLOCK)
    ends = np.random.default_rng(3).integers(0, 3, (40, BLOCK)).astype(np.int32)
    for number, end in enumerate(ends):
        ask(runner, np.concatenate([beginning, end[: 4 + number % 14]]), FULL)
    runner.reopen()
    wanted = np.random.default_rng(4).integers(0, 3, (15, BLOCK)).astype(np.int32)
    for rest in wanted:
        stored = [end[: 4 + number % 14] for number, end in enumerate(ends)]
        most = max(int((np.cumprod(end == rest[: len(end)])).sum()) for end in stored)
        assert restored(runner, np.concatenate([beginning, rest, [390]]).astype(np.int32)) == BLOCK + most


def test_blocks_that_were_completed_from_a_part_are_stored(runner: Runner) -> None:
    stored = random_prompt(1, 2 * BLOCK + 5)
    ask(runner, stored, FULL)
    other = leaving(stored, BLOCK + 3, 2 * BLOCK)
    first = ask(runner, other, FULL)
    state = state_of(runner, len(other)).copy()
    assert (first.report.restored, first.report.saved) == (BLOCK + 3, "queued")
    runner.reopen()
    again = ask(runner, other)
    assert (again.report.restored, again.num_forwards) == (len(other), 0)
    assert torch.equal(again.logits, first.logits)
    assert np.array_equal(state_of(runner, len(other)), state)
    assert verify_index(runner.cache.store).problems == ()


def test_a_damaged_node_is_removed_and_the_next_best_is_used(runner: Runner) -> None:
    first, second = leaving(random_prompt(1, BLOCK), 28, 4), leaving(random_prompt(1, BLOCK), 21, 11)
    ask(runner, first, FULL)
    ask(runner, second, FULL)
    wanted = leaving(first, 26)
    runner.reopen()
    damage(runner.cache.store, name_of(runner, first, Kind.BLOCK))
    report = ask(runner, wanted).report
    assert (report.restored, report.refused) == (21, "damaged")
    runner.wait_for(lambda: runner.cache.writer.quarantined == 2)
    assert verify_index(runner.cache.store).problems == ()
    damage(runner.cache.store, name_of(runner, second, Kind.BLOCK))
    report = ask(runner, wanted).report
    assert (report.restored, report.miss_reason) == (0, "damaged")
    assert restored(runner, wanted) == 0


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_behind_a_damaged_block_a_part_of_another_may_follow(runner: Runner, victim: int) -> None:
    stored = random_prompt(1, 3 * BLOCK)
    other = leaving(stored, victim * BLOCK + 19)
    ask(runner, stored, FULL)
    ask(runner, other, FULL)
    runner.reopen()
    parent = runner.cache.root
    for index in range(victim + 1):
        parent = node_name(runner.cache.store.secret, parent, stored[index * BLOCK : (index + 1) * BLOCK], Kind.BLOCK)
    damage(runner.cache.store, parent)
    report = ask(runner, np.concatenate([stored, random_prompt(7, 5)])).report
    assert (report.restored, report.refused) == (victim * BLOCK + 19, "damaged")


def test_a_damaged_record_is_no_match(runner: Runner) -> None:
    stored = random_prompt(1, BLOCK)
    ask(runner, stored, FULL)
    name = name_of(runner, stored, Kind.BLOCK)
    with runner.cache.store.changes() as changes:
        record = bytearray(changes.record("nodes", name))
        record[-1] ^= 1
        changes._put("nodes", name, bytes(record))
    report = ask(runner, leaving(stored, 20)).report
    assert (report.restored, report.miss_reason) == (0, "damaged")
    runner.wait_for(lambda: runner.cache.writer.quarantined > 0)
    assert verify_index(runner.cache.store).problems == ()


def test_a_node_that_waits_to_be_written_is_used(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random_prompt(1, 2 * BLOCK + 5)
    ask(runner, leaving(stored, BLOCK + 4), FULL)
    with gated(runner, monkeypatch):
        runner.run_prompt(Prompt(stored), FULL)
        cold = state_of(runner, len(stored)).copy()
        report = runner.run_prompt(Prompt(leaving(stored, BLOCK + 9)), READ_ONLY).report
        assert (report.restored, report.source) == (BLOCK + 9, "disk")
        assert np.array_equal(state_of(runner, BLOCK + 9), cold[:, : BLOCK + 9])
        report = runner.run_prompt(Prompt(leaving(stored, 2 * BLOCK + 2)), READ_ONLY).report
        assert report.restored == 2 * BLOCK + 2
        # What is stored shares more than what is queued.
        report = runner.run_prompt(Prompt(leaving(leaving(stored, BLOCK + 4), BLOCK + 6)), READ_ONLY).report
        assert report.restored == BLOCK + 6


def test_tenants_share_no_part_of_a_block(runner: Runner) -> None:
    stored = random_prompt(1, BLOCK + 9)
    ask(runner, stored, FULL)
    other = CacheOptions(scope=FULL.scope, tenant=SHARED.with_salt("somebody"))
    assert restored(runner, leaving(stored, 20), other) == 0
    assert restored(runner, leaving(stored, 20)) == 20


def test_a_part_of_a_reply_is_used(runner: Runner) -> None:
    prompt = random_prompt(1, BLOCK + 4)
    first = ask(runner, prompt, FULL, reply=2 * BLOCK)
    reply = np.array(first.greedy, np.int32)
    turn = leaving(np.concatenate([prompt, reply]), len(prompt) + 7)
    assert ask(runner, turn).report.restored == len(prompt) + 7


def test_a_node_that_is_used_in_part_counts_as_used(runner: Runner) -> None:
    stored = random_prompt(1, BLOCK)
    ask(runner, stored, FULL)
    name = name_of(runner, stored, Kind.BLOCK)
    ask(runner, leaving(stored, 20), CacheOptions(scope=FULL.scope, save=False, ttl_s=1000.0))

    def is_touched() -> bool:
        with runner.cache.store.snapshot() as snapshot:
            usage = snapshot.usage(name)
        assert usage is not None
        return (usage.restores, abs(usage.ttl_s)) == (1, 1000)

    runner.wait_for(is_touched)


def test_a_part_that_takes_longer_to_load_than_to_compute_is_computed(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = random_prompt(1, 2 * BLOCK + 5)
    ask(runner, stored, FULL)
    asked: list[tuple[int, int]] = []

    def pays(num_tokens: int, num_bytes: int) -> bool:
        asked.append((num_tokens, num_bytes))
        return num_tokens in (6, 20)

    monkeypatch.setattr(runner.cache.cost_model, "pays", pays)
    assert restored(runner, leaving(stored, BLOCK + 5)) == BLOCK
    assert restored(runner, leaving(stored, BLOCK + 6)) == BLOCK + 6
    assert asked == [(num_tokens, BLOCK * runner.layout.bytes_per_token) for num_tokens in (5, 6)]
    assert restored(runner, leaving(stored, 20)) == 20
    miss = ask(runner, leaving(stored, LEAST_TOKENS, BLOCK)).report
    assert (miss.restored, miss.refused, miss.miss_reason) == (0, None, "diverged")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_of_layers_with_windows_what_lies_under_the_window_is_restored(name: str, tmp_path: Path) -> None:
    runner = Runner(tiny_model(name, torch.float32), tiny_settings(tmp_path / "kv", block_size=BLOCK), exact_at="token")
    stored = random_prompt(1, 4 * BLOCK + 5)
    ask(runner, stored, FULL)
    runner.reopen()
    for position in (BLOCK - 1, 2 * BLOCK + 3, 3 * BLOCK + 1, 4 * BLOCK + 3):
        prompt = leaving(stored, position, 2 * BLOCK)
        cold = ask(runner, prompt, CacheOptions(scope=parse_scope("off", param="scope")), reply=3)
        # What an earlier sequence left in the memory is never looked at.
        for memory in runner.arena.memory:
            memory.tensor.fill_(float("nan"))
        warm = ask(runner, prompt, FULL, reply=3)
        assert warm.report.restored == position
        assert torch.equal(warm.logits, cold.logits)
        assert warm.greedy == cold.greedy
    runner.reopen()
    # Nor is it stored.
    assert all(restored(runner, prompt[:end].copy()) == end - 1 for end in range(20, len(prompt)))
    again = ask(runner, leaving(prompt, len(prompt) - 2), reply=3)
    cold = ask(runner, leaving(prompt, len(prompt) - 2), CacheOptions(scope=parse_scope("off", param="scope")), reply=3)
    assert torch.equal(again.logits, cold.logits)
    runner.close()
