"""Of a model that is exact at every token, all that a prompt shares with a stored block or tail is restored, and what
ends within a block is kept once. The logits at a prompt's end outlive the tail that its reply takes the place of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.kv.step import Run
from diskprefix.prefixstore.store.note_record import NoteKind, StoredNote
from diskprefix.prefixstore.store.schema import NodeKind, decode_node, node_name
from diskprefix.prefixstore.store.tree import list_entries
from diskprefix.runtime.prefill import prefill
from diskprefix.tokens import LEAST_TOKENS, TokenIds
from diskprefix.values import SHARED, CacheOptions, Mark, Prompt, Scope
from tests.prefixstore.cache.opening import AUTO, FULL, OFF, Opened, gated, is_sound
from tests.prefixstore.store.building import damage
from tests.runner import VOCAB, Answer, Runner, random_prompt, same

BLOCK = 32
READ_ONLY = replace(FULL, save=False)


@pytest.fixture
def runner(opened: Opened) -> Runner:
    return opened("token", block_size=BLOCK)


def leaving(stored: TokenIds, position: int, num_more: int = 20) -> TokenIds:
    """A prompt that leaves another one at a position: the token there is another one."""
    more = random_prompt(99, num_more)
    if position < len(stored):
        more[0] = (stored[position] + 1) % VOCAB
    return np.concatenate([stored[:position], more])


def longer(token_ids: TokenIds, num_more: int, seed: int = 2) -> TokenIds:
    return np.concatenate([token_ids, random_prompt(seed, num_more)])


def state_of(runner: Runner, num_tokens: int) -> npt.NDArray[np.uint8]:
    """The state of the first tokens in the sequence, shape [rows, num_tokens, bytes]."""
    (group,) = runner.layout.groups
    payload = np.frombuffer(runner.sequence.content(0, num_tokens), np.uint8)
    return payload.reshape(len(group.specs) * group.heads, num_tokens, -1 if num_tokens else 0).copy()


def ask(runner: Runner, token_ids: TokenIds, options: CacheOptions = FULL, reply: int = 0, **changes: Any) -> Answer:
    answer = runner.run_prompt(Prompt(token_ids, **changes), options, reply=reply)
    runner.flush()
    assert is_sound(runner)
    return answer


def read(runner: Runner, token_ids: TokenIds) -> Answer:
    return runner.run_prompt(Prompt(token_ids), READ_ONLY)


def restored(runner: Runner, token_ids: TokenIds) -> int:
    return read(runner, token_ids).report.restored


def nodes(runner: Runner) -> list[tuple[int, int]]:
    """The positions at which the stored nodes begin and end."""
    with runner.cache.store.snapshot() as snapshot:
        found = [node for name in snapshot.keys("usage") if (node := snapshot.node(name)) is not None]
    return sorted((node.position, node.end) for node in found)


def entries(runner: Runner) -> list[int]:
    with runner.cache.store.snapshot() as snapshot:
        return sorted(entry.num_tokens for entry in list_entries(snapshot))


def first_block(runner: Runner, token_ids: TokenIds) -> bytes:
    """The name of the block that begins a prompt."""
    return node_name(runner.cache.store.secret, runner.cache.root, token_ids[:BLOCK], NodeKind.BLOCK)


def test_a_prompt_restores_to_where_it_leaves_what_is_stored(runner: Runner) -> None:
    """At every position: in the first block, between blocks, in the tail and at its end. A few tokens that all prompts
    begin with are no hit."""
    stored = random_prompt(1, 3 * BLOCK + 5)
    ask(runner, stored)
    cold = state_of(runner, len(stored))
    runner.reopen()
    for position in range(len(stored) + 1):
        report = read(runner, leaving(stored, position, 2 * BLOCK)).report
        expected = position if position >= LEAST_TOKENS else 0
        assert (report.restored, report.matched, report.refused) == (expected, expected, None)
        assert (report.source, report.miss_reason) == (("disk", None) if expected else ("none", "new"))
        assert state_of(runner, expected).tobytes() == cold[:, :expected].tobytes()


def test_a_prompt_that_a_stored_one_begins_with_leaves_one_token_to_compute(runner: Runner) -> None:
    stored = random_prompt(1, 3 * BLOCK + 5)
    ask(runner, stored)
    runner.reopen()
    for end in range(LEAST_TOKENS + 1, len(stored)):
        report = read(runner, stored[:end].copy()).report
        assert report.restored == end - 1
        assert report.refused == ("no_logits" if end % BLOCK == 0 else None)
    whole = read(runner, stored)
    assert (whole.report.restored, whole.num_forwards) == (len(stored), 0)


def test_the_prefill_goes_on_to_the_grid_and_then_in_whole_steps(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = random_prompt(1, 2 * BLOCK + 5)
    ask(runner, stored)
    steps: list[tuple[int, int]] = []
    end_step = KVSequence.end_step

    def noted(sequence: KVSequence, run: Run) -> None:
        steps.append((run.start, run.end))
        end_step(sequence, run)

    monkeypatch.setattr(KVSequence, "end_step", noted)
    read(runner, leaving(stored, BLOCK + 3, 2 * BLOCK))
    assert steps == [(BLOCK + 3, 2 * BLOCK), (2 * BLOCK, 3 * BLOCK), (3 * BLOCK, 3 * BLOCK + 3)]


def test_the_child_that_shares_most_is_used(runner: Runner) -> None:
    """Of many that continue the same block, some of which are shorter than a block."""
    beginning, random = random_prompt(1, BLOCK), np.random.default_rng(3)
    ends = [end[: 4 + number % 14] for number, end in enumerate(random.integers(0, 3, (40, BLOCK)).astype(np.int32))]
    for end in ends:
        runner.run_prompt(Prompt(np.concatenate([beginning, end])), FULL)
    runner.reopen()
    for rest in random.integers(0, 3, (15, BLOCK)).astype(np.int32):
        most = max(int((np.cumprod(end == rest[: len(end)])).sum()) for end in ends)
        assert restored(runner, np.concatenate([beginning, rest, [390]]).astype(np.int32)) == BLOCK + most


def test_a_damaged_node_is_removed_and_the_next_best_is_used(runner: Runner) -> None:
    first, second = leaving(random_prompt(1, BLOCK), 28, 4), leaving(random_prompt(1, BLOCK), 21, 11)
    ask(runner, first)
    ask(runner, second)
    wanted = leaving(first, 26)
    runner.reopen()
    damage(runner.cache.store, first_block(runner, first))
    report = read(runner, wanted).report
    assert (report.restored, report.refused) == (21, "damaged")
    runner.wait_for(lambda: runner.cache.writer.housekeeping.quarantined == 2)
    assert is_sound(runner)
    # A record, this time.
    with runner.cache.store.changes() as changes:
        record = bytearray(changes.get_record("nodes", first_block(runner, second)))
        record[-1] ^= 1
        changes._put_record("nodes", first_block(runner, second), bytes(record))
    report = read(runner, wanted).report
    assert (report.restored, report.miss_reason) == (0, "damaged")
    runner.wait_for(lambda: runner.cache.writer.housekeeping.quarantined > 2)
    assert is_sound(runner)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_behind_a_damaged_block_a_part_of_another_may_follow(runner: Runner, victim: int) -> None:
    stored = random_prompt(1, 3 * BLOCK)
    ask(runner, stored)
    ask(runner, leaving(stored, victim * BLOCK + 19))
    runner.reopen()
    name = runner.cache.root
    for index in range(victim + 1):
        name = node_name(runner.cache.store.secret, name, stored[index * BLOCK : (index + 1) * BLOCK], NodeKind.BLOCK)
    damage(runner.cache.store, name)
    report = read(runner, longer(stored, 5)).report
    assert (report.restored, report.refused) == (victim * BLOCK + 19, "damaged")


def test_a_node_that_waits_to_be_written_is_used(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random_prompt(1, 2 * BLOCK + 5)
    ask(runner, leaving(stored, BLOCK + 4))
    with gated(runner, monkeypatch):
        runner.run_prompt(Prompt(stored), FULL)
        cold = state_of(runner, len(stored))
        report = read(runner, leaving(stored, BLOCK + 9)).report
        assert (report.restored, report.source) == (BLOCK + 9, "disk")
        assert np.array_equal(state_of(runner, BLOCK + 9), cold[:, : BLOCK + 9])
        assert restored(runner, leaving(stored, 2 * BLOCK + 2)) == 2 * BLOCK + 2
        # What is stored shares more than what is queued.
        assert restored(runner, leaving(leaving(stored, BLOCK + 4), BLOCK + 6)) == BLOCK + 6


def test_a_node_that_is_used_in_part_counts_as_used(runner: Runner) -> None:
    stored = random_prompt(1, BLOCK)
    ask(runner, stored)
    runner.run_prompt(Prompt(leaving(stored, 20)), replace(READ_ONLY, ttl_s=1000.0))

    def is_touched() -> bool:
        with runner.cache.store.snapshot() as snapshot:
            usage = snapshot.usage(first_block(runner, stored))
        assert usage is not None
        return (usage.restores, abs(usage.ttl_s)) == (1, 1000)

    runner.wait_for(is_touched)


def test_a_part_that_takes_longer_to_load_than_to_compute_is_computed(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = random_prompt(1, 2 * BLOCK + 5)
    ask(runner, stored)
    asked: list[tuple[int, int]] = []

    def pays(num_tokens: int, num_bytes: int) -> bool:
        asked.append((num_tokens, num_bytes))
        return num_tokens in (6, 20)

    monkeypatch.setattr(runner.cache.cost_model, "pays", pays)
    assert restored(runner, leaving(stored, BLOCK + 5)) == BLOCK
    assert restored(runner, leaving(stored, BLOCK + 6)) == BLOCK + 6
    # A prompt is matched again before it is loaded.
    assert set(asked) == {(num_tokens, BLOCK * runner.layout.bytes_per_token) for num_tokens in (5, 6)}
    assert restored(runner, leaving(stored, 20)) == 20
    miss = read(runner, leaving(stored, LEAST_TOKENS, BLOCK)).report
    assert (miss.restored, miss.refused, miss.miss_reason) == (0, None, "diverged")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_of_layers_with_windows_what_lies_under_the_window_is_restored_and_stored(name: str, opened: Opened) -> None:
    runner = opened(name, block_size=BLOCK, exact_at="token")
    stored = random_prompt(1, 4 * BLOCK + 5)
    ask(runner, stored)
    runner.reopen()
    for position in (BLOCK - 1, 2 * BLOCK + 3, 3 * BLOCK + 1, 4 * BLOCK + 3):
        prompt = leaving(stored, position, 2 * BLOCK)
        cold = ask(runner, prompt, OFF, reply=3)
        # What an earlier sequence left in the memory is never looked at.
        for page in filter(None, runner.sequence.pages()):
            page.rows.fill(0xFF)
        warm = ask(runner, prompt, reply=3)
        assert warm.report.restored == position
        assert same(warm, cold)
    runner.reopen()
    # Nor is it stored.
    prompt = leaving(prompt, len(prompt) - 2)
    assert same(ask(runner, prompt, reply=3), ask(runner, prompt, OFF, reply=3))


# What ends within a block.


def test_a_mark_is_kept_to_the_token(runner: Runner) -> None:
    scope = CacheOptions(scope=Scope("tokens", BLOCK))
    report = ask(runner, random_prompt(1, 3 * BLOCK), scope, marks=(Mark(2 * BLOCK + 3, 600.0),)).report
    assert report.selection.kept == 2 * BLOCK + 3
    assert nodes(runner) == [(0, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK + 3)]


@pytest.mark.parametrize("options", [FULL, AUTO], ids=["full", "auto"])
def test_the_turns_of_a_conversation_leave_no_trail(runner: Runner, options: CacheOptions) -> None:
    turn = random_prompt(1, BLOCK + 5)
    for seed in range(12):
        report = ask(runner, turn, options).report
        assert (report.saved, report.restored) == ("queued", len(turn) - 11 if seed else 0)
        last, turn = len(turn), longer(turn, 11, seed)
        assert nodes(runner) == [(start, min(start + BLOCK, last)) for start in range(0, last, BLOCK)]
        assert entries(runner)[-1] == last


def test_a_beginning_that_comes_later_is_there_already(runner: Runner) -> None:
    long = random_prompt(1, 2 * BLOCK + 20)
    ask(runner, long)
    written, stored = runner.cache.writer.written_tokens, nodes(runner)
    for end in (BLOCK + 3, 2 * BLOCK + 3):
        short = ask(runner, long[:end].copy()).report
        assert (short.restored, short.saved) == (end - 1, "stored")
        boundary = CacheOptions(scope=Scope("tokens", end))
        assert ask(runner, longer(long[:end], 5), boundary).report.saved == "stored"
    assert (runner.cache.writer.written_tokens, nodes(runner)) == (written, stored)
    assert entries(runner) == [len(long)]


def test_the_end_of_a_prompt_is_kept_with_its_logits_where_a_boundary_was_until_it_is_replaced(runner: Runner) -> None:
    prompt = random_prompt(1, 2 * BLOCK + 3)
    ask(runner, prompt, CacheOptions(scope=Scope("tokens", len(prompt) - 1)))
    ask(runner, longer(prompt, 9), CacheOptions(scope=Scope("tokens", len(prompt))))
    first = ask(runner, prompt)
    assert first.report.saved == "queued"
    assert is_whole_hit(ask(runner, prompt), len(prompt))
    assert nodes(runner) == [(0, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK + 3)]
    ask(runner, longer(prompt, 4))
    runner.reopen()
    again = ask(runner, prompt)
    assert (again.report.restored, again.num_forwards) == (len(prompt) - 1, 1)
    assert same(again, first)


def test_of_a_model_that_is_exact_on_the_grid_only_no_reply_is_kept(opened: Opened) -> None:
    runner = opened("grid", block_size=BLOCK)
    ask(runner, random_prompt(1, BLOCK + 5), reply=2 * BLOCK)
    assert nodes(runner) == [(0, BLOCK), (BLOCK, BLOCK + 5)]


def test_uses_count_where_what_was_used_is_replaced_at_once(runner: Runner) -> None:
    """They are written after a second; what replaces it is written before that."""
    turn = random_prompt(1, BLOCK + 5)
    ask(runner, turn)
    for seed in range(6):
        turn = longer(turn, 3, seed)
        ask(runner, turn)

    def restores() -> list[int]:
        with runner.cache.store.snapshot() as snapshot:
            return [int(number) for number in snapshot.usages().records["restores"]]

    runner.wait_for(lambda: restores() == [6, 6])


# The logits at a prompt's end.

GRID = 2 * BLOCK


def kept(runner: Runner) -> list[StoredNote]:
    with runner.cache.store.snapshot() as snapshot:
        return [note for note in snapshot.notes() if note.kind == NoteKind.LOGITS]


def num_tails(runner: Runner) -> int:
    with runner.cache.store.snapshot() as snapshot:
        return sum(decode_node(name, value).kind == NodeKind.TAIL for name, value in snapshot.records("nodes"))


def is_whole_hit(answer: Answer, num_tokens: int) -> bool:
    return (answer.num_forwards, answer.report.restored) == (0, num_tokens)


@pytest.mark.parametrize("num_tokens", [GRID, GRID + 1, GRID + BLOCK - 1])
@pytest.mark.parametrize("reply", [2, BLOCK + 2])
def test_a_repeat_runs_no_forward_though_the_reply_and_the_next_turns_replaced_the_tail(
    runner: Runner, num_tokens: int, reply: int
) -> None:
    prompt, turns = random_prompt(1, num_tokens), []
    for number in range(3):
        turns.append((prompt, ask(runner, prompt, reply=reply)))
        assert (num_tails(runner), len(kept(runner))) == (0, number + 1)
        prompt = longer(np.concatenate([prompt, np.array(turns[-1][1].greedy, np.int32)]), 7)
    runner.reopen()
    for prompt, cold in turns:
        warm = ask(runner, prompt, reply=reply)
        assert same(warm, cold)
        assert is_whole_hit(warm, len(prompt))
    assert len(kept(runner)) == 3


@pytest.mark.parametrize("num_tokens", [GRID, GRID + 5])
def test_where_a_longer_prompt_is_stored_the_first_run_computes_a_token_and_the_next_one_none(
    runner: Runner, num_tokens: int
) -> None:
    stored = random_prompt(3, 3 * BLOCK + 2)
    ask(runner, stored)
    shorter = stored[:num_tokens].copy()
    cold, first = ask(runner, shorter, OFF, reply=4), ask(runner, shorter, reply=4)
    assert same(first, cold)
    assert (first.num_forwards, first.report.restored) == (1, num_tokens - 1)
    runner.reopen()
    again = ask(runner, shorter, reply=4)
    assert same(again, cold)
    assert is_whole_hit(again, num_tokens)


def test_logits_that_a_tail_still_has_are_not_kept_twice(runner: Runner) -> None:
    prompt = random_prompt(4, GRID + 5)
    cold = ask(runner, prompt)
    assert (kept(runner), num_tails(runner)) == ([], 1)
    runner.reopen()
    # Now the reply is kept, and the tail goes.
    assert is_whole_hit(ask(runner, prompt, reply=6), len(prompt))
    assert (len(kept(runner)), num_tails(runner)) == (1, 0)
    runner.reopen()
    warm = ask(runner, prompt)
    assert same(warm, cold)
    assert is_whole_hit(warm, len(prompt))


@pytest.mark.parametrize("damaged", ["a bit", "length", "gone"])
def test_logits_that_are_damaged_or_gone_cost_one_token_and_are_kept_again(runner: Runner, damaged: str) -> None:
    prompt = random_prompt(5, GRID + 5)
    cold = ask(runner, prompt, reply=6)
    (note,) = kept(runner)
    if damaged == "length":
        cached = CachedRequest(runner.cache, Prompt(prompt), FULL)
        runner.cache.notes(SHARED).put(NoteKind.LOGITS, cached.nodes.end_id, b"short")
        cached.close()
        runner.flush()
    else:
        with runner.cache.store.changes() as changes:
            value = bytearray(changes.get_record("notes", note.key))
            value[-1] ^= 64
            changes.forget_notes([note.key])
            if damaged == "a bit":
                changes.put_note(note.key, bytes(value))
    runner.reopen()
    for num_forwards in (1, 0):
        warm = ask(runner, prompt, reply=6)
        assert same(warm, cold)
        assert (warm.num_forwards, warm.report.restored) == (num_forwards, len(prompt) - num_forwards)
        assert len(kept(runner)) == 1
        runner.reopen()


@pytest.mark.parametrize("position", [BLOCK, GRID])
def test_logits_whose_tokens_are_no_longer_stored_are_not_used(runner: Runner, position: int) -> None:
    prompt = random_prompt(6, GRID + 5)
    cold = ask(runner, prompt, reply=6)
    with runner.cache.store.snapshot() as snapshot:
        found = {name: decode_node(name, value) for name, value in snapshot.records("nodes")}
    for name, node in found.items():
        if node.position == position:
            runner.cache.store.quarantine(name, node.parent)
    assert len(kept(runner)) == 1
    warm = ask(runner, prompt, reply=6)
    assert same(warm, cold)
    assert (warm.num_forwards > 0, warm.report.restored) == (True, position)


def test_a_prompt_that_differs_in_its_last_token_gets_its_own_logits(runner: Runner) -> None:
    prompt = random_prompt(7, GRID + 5)
    ask(runner, prompt, reply=6)
    other = prompt.copy()
    other[-1] += 1 if other[-1] == 0 else -1
    cold = ask(runner, other, OFF, reply=4)
    for _ in range(2):
        assert same(ask(runner, other, reply=4), cold)
        runner.reopen()
    assert len(kept(runner)) == 2


def test_what_is_not_to_be_saved_leaves_no_logits(runner: Runner) -> None:
    for options in (OFF, READ_ONLY, CacheOptions(scope=Scope("tokens", BLOCK))):
        ask(runner, random_prompt(8, GRID + 5), options, reply=6)
    assert kept(runner) == []


# Prompts and replies of `auto`, while there is room.


def test_the_last_block_of_a_prompt_is_written_once_with_its_reply(runner: Runner) -> None:
    prompt = random_prompt(1, BLOCK + 10)
    answer = ask(runner, prompt, AUTO, reply=5)
    assert nodes(runner) == [(0, BLOCK), (BLOCK, BLOCK + 14)]
    assert runner.cache.writer.written_tokens == BLOCK + 14
    assert entries(runner) == [BLOCK + 14]
    assert (answer.report.selection.reason, answer.report.saved) == ("room", "queued")
    runner.reopen()
    assert restored(runner, prompt) == len(prompt) - 1


def test_at_the_ends_of_blocks_no_prompt_waits_for_its_reply(opened: Opened) -> None:
    runner = opened("grid", block_size=BLOCK)
    runner.run(random_prompt(1, 2 * BLOCK + 10), "auto", reply=5)
    runner.flush()
    assert (nodes(runner), entries(runner)) == ([(0, BLOCK), (BLOCK, 2 * BLOCK)], [2 * BLOCK])


def test_it_is_written_without_a_reply_that_is_saved(runner: Runner) -> None:
    prompt = random_prompt(1, BLOCK + 10)
    for reply in (0, 1):
        ask(runner, prompt, AUTO, reply=reply)
        assert (nodes(runner), entries(runner)) == ([(0, BLOCK), (BLOCK, BLOCK + 10)], [BLOCK + 10])


def gone_in_the_reply(runner: Runner, prompt: TokenIds) -> None:
    """A request whose client goes away when three tokens of its reply were computed, before its state is saved."""
    cached = CachedRequest(runner.cache, Prompt(prompt), AUTO)
    sequence = runner.new_sequence(len(prompt))
    cached.restore(sequence)
    logits = prefill(runner.runtime, sequence, prompt, start=0, block_size=BLOCK, after_step=cached.after_step)
    cached.publish(sequence, logits, 0.0)
    greedy = runner._decode(logits, 4)
    cached.save_partial(sequence, np.concatenate([prompt, greedy[:-1]]).astype(np.int32))
    cached.close()
    runner.flush()
    assert is_sound(runner)


def test_it_is_written_when_the_client_goes_away_in_the_reply(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed of the reply is not kept for as long, or not at all if the budget for writes is scarce."""
    end = BLOCK, BLOCK + 10
    gone_in_the_reply(runner, random_prompt(1, BLOCK + 10))
    assert (nodes(runner)[1:], entries(runner)) == ([end, (BLOCK, BLOCK + 13)], [BLOCK + 10, BLOCK + 13])
    monkeypatch.setattr(CachedRequest, "_may_save_unselected", lambda *_: False)
    gone_in_the_reply(runner, random_prompt(2, BLOCK + 10))
    assert nodes(runner).count(end) == 2
    assert entries(runner) == [BLOCK + 10, BLOCK + 10, BLOCK + 13]


def test_a_short_prompt_is_kept_with_a_reply_that_makes_it_long_enough(opened: Opened) -> None:
    runner = opened("token", block_size=BLOCK, kv_cache_min_tokens=30)
    prompt = random_prompt(1, 20)
    for reply, stored in ((10, []), (11, [(0, 30)])):
        report = ask(runner, prompt, AUTO, reply=reply).report
        assert (report.selection.reason, nodes(runner)) == ("short_prompt", stored)
    runner.reopen()
    assert restored(runner, longer(prompt, 20)) == 20
