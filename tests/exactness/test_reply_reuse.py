"""The state that decoding leaves serves the next turn, marked as generated, and only if a request asks for it."""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.engine.forward import prefill
from diskprefix.kv.arena import KVArena
from diskprefix.nouns import CacheOptions, Prompt
from diskprefix.store.maintenance.purge import PurgeFilter, purge
from diskprefix.store.maintenance.verify import verify_index, verify_payloads
from diskprefix.store.schema import Kind, NodeRecord, decode_node, piece_key
from diskprefix.store.tree import list_entries
from diskprefix.tokens import TokenIds, as_token_ids
from tests.devices import DEVICES
from tests.exactness.architectures import tiny_model
from tests.examples import examples
from tests.runner import BLOCK, VOCAB, Answer, Runner, random_prompt, same, tiny_llama, tiny_settings

MODELS = ("llama", "gemma3", "qwen3_next", "lfm2")
"""Full attention alone, with sliding windows, with a recurrence, with convolutions."""
PROMPT = 4 * BLOCK + 5
GRID = 4 * BLOCK
REPLY = 40
REACHED = 6 * BLOCK
"""The last grid point that decoding passes: the last token of the reply is not run through the model."""


@cache
def _model(name: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> PreTrainedModel:
    return (tiny_llama(dtype) if name == "llama" else tiny_model(name, dtype)).to(device)


@pytest.fixture(params=MODELS)
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(_model(request.param), tiny_settings(tmp_path / "kv"))
    yield runner
    runner.close()


def next_turn(prompt: TokenIds, answer: Answer, num_tokens: int = 20, seed: int = 100) -> TokenIds:
    """The prompt, its reply, and what the user says then."""
    return np.concatenate([prompt, as_token_ids(answer.greedy), random_prompt(seed, num_tokens)])


def nodes_of(runner: Runner) -> list[NodeRecord]:
    runner.flush()
    with runner.cache.store.snapshot() as snapshot:
        return [decode_node(name, value) for name, value in snapshot.records("nodes")]


def generated_ends(runner: Runner) -> list[int]:
    """Returns the ends of the stored generated blocks."""
    return sorted(node.end for node in nodes_of(runner) if node.generated and node.kind == Kind.BLOCK)


def is_sound(runner: Runner) -> bool:
    """Tells whether `diskprefix verify` finds no problem."""
    runner.flush()
    index = verify_index(runner.cache.store)
    payloads = verify_payloads(runner.cache.store, index.stored_bytes, lambda _: None)
    return not index.problems and not payloads.problems


def never_stopped(runner: Runner, prompt: TokenIds, whole: TokenIds, decoded_to: int) -> tuple[torch.Tensor, KVArena]:
    """One sequence in memory of its own: the prompt is prefilled, tokens are decoded one by one up to a grid point, and
    the rest is prefilled from there. Answers the logits at the end."""
    arena, model = KVArena(runner.layout, runner.model.device), runner.model

    def prefilled(token_ids: TokenIds, start: int) -> torch.Tensor:
        def nothing(_: KVArena) -> None:
            pass

        return prefill(model, arena, token_ids, start=start, block_size=BLOCK, after_step=nothing)

    with torch.inference_mode():
        arena.reserve(len(whole))
        prefilled(prompt, 0)
        for token in whole[len(prompt) : decoded_to].tolist():
            arena.forward(model, torch.tensor([[token]], device=model.device))
        return prefilled(whole, decoded_to), arena


@pytest.mark.parametrize(("scope", "restart"), [("full", False), ("full", True), ("auto:30", True), (BLOCK, True)])
def test_the_next_turn_goes_on_inside_the_reply(runner: Runner, scope: str | int, restart: bool) -> None:
    prompt = random_prompt(1, PROMPT)
    first = runner.run(prompt, scope, reply=REPLY, reuse_generated=True)
    if restart:
        runner.reopen()
    second = runner.run(next_turn(prompt, first), scope, reuse_generated=True)
    assert (first.report.exact, first.report.saved, second.report.exact) == (True, "queued", False)
    assert (second.report.restored, second.report.matched, second.report.refused) == (REACHED, REACHED, None)
    assert second.num_forwards == 3
    assert second.report.miss_reason is None


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_restored_is_what_decoding_left_bit_for_bit(
    tmp_path: Path, name: str, dtype: torch.dtype, device: str
) -> None:
    runner = Runner(_model(name, dtype, device), tiny_settings(tmp_path))
    prompt = random_prompt(2, PROMPT)
    whole = next_turn(prompt, runner.run(prompt, "full", reply=REPLY, reuse_generated=True))
    runner.reopen()
    warm = runner.run(whole, "full", reuse_generated=True)
    logits, arena = never_stopped(runner, prompt, whole, REACHED)
    assert warm.report.restored == REACHED
    assert torch.equal(warm.logits, logits.cpu())
    # A window hides from the next token whether what lies further back was restored, and it need not be.
    windows = [group.window or len(whole) for group in runner.layout.groups]
    seen = min(windows, default=0)
    compared = [a.read_tokens(len(whole) - seen, seen) for a in (runner.arena, arena)]
    assert compared[0] == compared[1]
    assert runner.arena.read_states() == arena.read_states()
    runner.close()


def test_a_request_that_does_not_ask_gets_the_cold_run(runner: Runner) -> None:
    prompt = random_prompt(3, PROMPT)
    whole = next_turn(prompt, runner.run(prompt, "full", reply=REPLY, reuse_generated=True))
    cold = runner.run(whole, "off", reply=8)
    options = CacheOptions(scope=parse_scope(GRID, param="scope"), save=False)
    for restart in (False, True):
        if restart:
            runner.reopen()
        exact = runner.run_prompt(Prompt(whole), options, reply=8)
        assert same(exact, cold)
        assert (exact.report.restored, exact.report.matched, exact.report.exact) == (GRID, GRID, True)


def test_without_the_option_no_reply_is_kept(runner: Runner) -> None:
    prompt = random_prompt(4, PROMPT)
    whole = next_turn(prompt, runner.run(prompt, "full", reply=REPLY))
    assert generated_ends(runner) == []
    second = runner.run(whole, "full", reply=8, reuse_generated=True)
    assert (second.report.restored, second.report.exact) == (GRID, True)
    assert same(second, runner.run(whole, "off", reply=8))


def test_what_is_computed_on_top_of_a_reply_is_no_more_exact_than_the_reply(runner: Runner) -> None:
    prompt = random_prompt(5, PROMPT)
    whole = next_turn(prompt, runner.run(prompt, "full", reply=REPLY, reuse_generated=True), 40)
    second = runner.run(whole, "full", reply=8, reuse_generated=True)
    assert generated_ends(runner) == list(range(GRID + BLOCK, len(whole) + 1, BLOCK))
    assert {node.generated for node in nodes_of(runner) if node.kind == Kind.TAIL} == {False, True}
    runner.reopen()
    repeat = runner.run(whole, "full", reply=8, reuse_generated=True)
    assert same(repeat, second)
    assert (repeat.num_forwards, repeat.report.restored, repeat.report.exact) == (0, len(whole), False)
    exact, cold = runner.run(whole, "full", reply=8), runner.run(whole, "off", reply=8)
    assert same(exact, cold)
    assert (exact.report.restored, exact.report.exact) == (GRID, True)
    assert same(runner.run(whole, "full", reply=8), cold)


def test_where_both_are_stored_the_exact_one_is_taken(runner: Runner) -> None:
    prompt = random_prompt(6, PROMPT)
    whole = next_turn(prompt, runner.run(prompt, "full", reply=REPLY, reuse_generated=True))
    cold = runner.run(whole, "full", reply=8)
    runner.reopen()
    warm = runner.run(whole, "full", reply=8, reuse_generated=True)
    assert same(warm, cold)
    assert (warm.report.restored, warm.report.exact) == (len(whole), True)
    assert is_sound(runner)


def test_what_is_computed_beside_a_reply_is_exact_and_kept_as_such(runner: Runner) -> None:
    """The only block of the reply ends with the prompt: without the next-token logits, nothing of it is restored."""
    prompt = random_prompt(17, GRID)
    first = runner.run(prompt, "full", reply=BLOCK + 1, reuse_generated=True)
    whole = np.concatenate([prompt, as_token_ids(first.greedy[:BLOCK])])
    beside = runner.run(whole, "full", reply=8, reuse_generated=True)
    assert (beside.report.restored, beside.report.matched, beside.report.exact) == (GRID, GRID + BLOCK, True)
    assert beside.report.refused == "no_logits"
    runner.reopen()
    exact, cold = runner.run(whole, "full", reply=8), runner.run(whole, "off", reply=8)
    assert same(exact, cold)
    assert (exact.num_forwards, exact.report.restored, exact.report.exact) == (0, len(whole), True)
    assert is_sound(runner)


def test_a_conversation_of_four_turns_computes_only_what_is_new(runner: Runner) -> None:
    prompt, reached = random_prompt(7, PROMPT), 0
    for turn in range(4):
        answer = runner.run(prompt, "full", reply=REPLY, reuse_generated=True)
        assert (answer.report.restored, answer.report.exact) == (reached, turn == 0)
        reached = (len(prompt) + REPLY - 1) // BLOCK * BLOCK
        prompt = next_turn(prompt, answer, seed=turn)
        runner.reopen()
    assert is_sound(runner)


@pytest.mark.parametrize(
    ("num_tokens", "reply", "is_kept"),
    [
        (GRID, BLOCK, False),
        (GRID, BLOCK + 1, True),
        (PROMPT, 10, False),
        (GRID - 1, 1, False),
        (GRID - 1, 2, True),
        (5, BLOCK, True),
    ],
)
def test_a_reply_is_kept_if_it_completes_a_block(runner: Runner, num_tokens: int, reply: int, is_kept: bool) -> None:
    prompt = random_prompt(9, num_tokens)
    first = runner.run(prompt, "full", reply=reply, reuse_generated=True)
    end = (num_tokens + reply - 1) // BLOCK * BLOCK
    assert generated_ends(runner) == [end] * is_kept
    runner.reopen()
    second = runner.run(next_turn(prompt, first), "full", reuse_generated=True)
    assert (second.report.restored, second.report.exact) == (end, not is_kept)


def test_a_conversation_shorter_than_the_least_worth_keeping_is_not_kept(tmp_path: Path) -> None:
    runner = Runner(_model("llama"), tiny_settings(tmp_path, kv_cache_min_tokens=REACHED + 1))
    prompt = random_prompt(11, PROMPT)
    runner.run(prompt, "full", reply=REPLY, reuse_generated=True)
    assert nodes_of(runner) == []
    runner.run(prompt, "full", reply=REPLY + BLOCK, reuse_generated=True)
    assert [node.generated for node in sorted(nodes_of(runner), key=lambda node: node.end)] == [False] * 4 + [True] * 3
    runner.close()


def test_a_reply_that_the_write_buffer_has_no_room_for_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Runner(_model("llama"), tiny_settings(tmp_path / "probe")).layout
    room = layout.bytes_per_token * PROMPT + layout.logits_bytes
    runner = Runner(_model("llama"), tiny_settings(tmp_path / "kv", kv_cache_write_buffer=room))
    disk, publish = threading.Event(), runner.cache.store.publish
    monkeypatch.setattr(runner.cache.store, "publish", lambda pub: publish(pub) if disk.wait(30) else 0)
    prompt = random_prompt(16, PROMPT)
    first = runner.run(prompt, "full", reply=REPLY, reuse_generated=True)
    disk.set()
    assert generated_ends(runner) == [GRID + BLOCK, GRID + 2 * BLOCK]
    assert (first.report.saved, runner.cache.stats()["dropped"]) == ("queued", 0)
    runner.close()


def test_off_neither_keeps_nor_restores_a_reply(runner: Runner) -> None:
    prompt = random_prompt(12, PROMPT)
    first = runner.run(prompt, "off", reply=REPLY, reuse_generated=True)
    assert nodes_of(runner) == []
    runner.run(prompt, "full", reply=REPLY, reuse_generated=True)
    second = runner.run(next_turn(prompt, first), "off", reuse_generated=True)
    assert (second.report.restored, second.report.miss_reason) == (0, "off")


def test_two_replies_to_one_prompt_stand_side_by_side(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, turns = random_prompt(13, PROMPT), []
    for choose in (torch.Tensor.argmax, torch.Tensor.argmin):
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "argmax", choose)
            turns.append(next_turn(prompt, runner.run(prompt, "full", reply=REPLY, reuse_generated=True)))
    assert not np.array_equal(turns[0][:REACHED], turns[1][:REACHED])
    runner.reopen()
    for whole in turns:
        warm = runner.run(whole, "full", reuse_generated=True)
        assert warm.report.restored == REACHED
        assert torch.equal(warm.logits, never_stopped(runner, prompt, whole, REACHED)[0])


def test_a_next_turn_that_leaves_the_reply_early_falls_back_to_the_prompt(runner: Runner) -> None:
    """As where clients take out what a model thought: that costs the last turn, and what is left is exact."""
    prompt = random_prompt(14, PROMPT)
    whole = next_turn(prompt, runner.run(prompt, "full", reply=REPLY, reuse_generated=True))
    whole[PROMPT] = (whole[PROMPT] + 1) % VOCAB
    warm, cold = runner.run(whole, "full", reply=8, reuse_generated=True), runner.run(whole, "off", reply=8)
    assert (warm.report.restored, warm.report.matched, warm.report.exact) == (GRID, GRID, True)
    assert same(warm, cold)


def test_a_store_of_replies_is_sound_through_eviction_and_purge(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = []
    for seed in range(6):
        prompt = random_prompt(seed, PROMPT)
        turns.append(next_turn(prompt, runner.run(prompt, "full", reply=REPLY, reuse_generated=True)))
    assert is_sound(runner)
    store = runner.cache.store
    with store.snapshot() as snapshot:
        before, used = len(snapshot.usages().names), snapshot.used_bytes()
        assert Counter(entry.num_tokens for entry in list_entries(snapshot)) == {PROMPT: 6, REACHED: 6}
    with monkeypatch.context() as patched:
        # An hour later, when nothing is new any more, with room for half of it.
        patched.setattr(store, "clock", lambda: time.time() + 3600)
        patched.setattr(store.evictor, "usable_bytes", lambda: used // 2)
        patched.setattr(store, "budget_bytes", used)
        assert 0 < store.evictor.make_room(0, frozenset()) < before
    assert is_sound(runner)
    for whole in turns:
        assert same(runner.run(whole, "auto:30", reply=4), runner.run(whole, "off", reply=4))
    # What still waits to be written would come after the purge.
    runner.flush()
    purge(store, PurgeFilter(), time.time(), lambda _: None)
    assert nodes_of(runner) == []
    missed = runner.run(turns[0], "full", reuse_generated=True).report
    assert (missed.restored, missed.exact) == (0, True)


def test_a_damaged_reply_is_removed_and_the_prompt_still_restored(runner: Runner) -> None:
    prompt = random_prompt(15, PROMPT)
    whole = next_turn(prompt, runner.run(prompt, "full", reply=REPLY, reuse_generated=True))
    runner.reopen()
    store = runner.cache.store
    with store.snapshot() as snapshot:
        victim = next(
            name
            for name, value in snapshot.records("nodes")
            if (node := decode_node(name, value)).generated and node.position == GRID
        )
    with store.changes() as changes:
        piece = bytearray(changes.piece(victim, 0) or b"")
        piece[-1] ^= 64
        changes._put("payloads", piece_key(victim, 0), bytes(piece))
    warm, cold = runner.run(whole, "full", reply=8, reuse_generated=True), runner.run(whole, "off", reply=8)
    assert same(warm, cold)
    assert (warm.report.restored, warm.report.exact, warm.report.refused) == (GRID, True, "damaged")
    assert is_sound(runner)


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[bool, str | int, bool, int, int]]:
    """For each turn: whether replies are reused, the scope, whether the daemon restarts before it, how long the reply
    is, and how much of the turn before is kept."""
    scopes: list[str | int] = ["full", "auto:30", 2 * BLOCK]
    lengths = st.integers(1, 3 * BLOCK), st.integers(0, 3 * BLOCK)
    turn = st.tuples(st.booleans(), st.sampled_from(scopes), st.booleans(), *lengths)
    return draw(st.lists(turn, min_size=2, max_size=5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
@settings(max_examples=examples(2), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=conversations())
def test_whatever_replies_are_kept_a_request_that_does_not_ask_gets_the_cold_run(
    name: str, turns: list[tuple[bool, str | int, bool, int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(_model(name), tiny_settings(Path(folder)))
        prompt = random_prompt(0, PROMPT)
        for number, (reuse, scope, restart, reply, dropped) in enumerate(turns):
            if restart:
                runner.reopen()
            answer = runner.run(prompt, scope, reply=reply, reuse_generated=reuse)
            exact = runner.run(prompt, "auto:30", reply=3)
            assert same(exact, runner.run(prompt, "off", reply=3))
            assert exact.report.exact
            if answer.report.exact:
                assert torch.equal(answer.logits, exact.logits)
            prompt = next_turn(prompt, answer, seed=number)
            prompt = prompt[: max(BLOCK, len(prompt) - dropped)].copy()
        assert is_sound(runner)
        runner.close()
