"""The logits at the end of a prompt outlive the tail that its reply takes the place of: its repeat runs no forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.nouns import SHARED, CacheOptions, Prompt
from diskprefix.store.note_record import NoteKind, StoredNote
from diskprefix.store.schema import Kind, decode_node
from diskprefix.store.verify import verify_index
from tests.runner import BLOCK, Answer, Runner, random_prompt, same, tiny_llama, tiny_settings

GRID = 4 * BLOCK


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path), exact_at=None)
    yield runner
    runner.close()


def kept(runner: Runner) -> list[StoredNote]:
    runner.flush()
    assert not verify_index(runner.cache.store).problems
    with runner.cache.store.snapshot() as snapshot:
        return [note for note in snapshot.notes() if note.kind == NoteKind.LOGITS]


def num_tails(runner: Runner) -> int:
    with runner.cache.store.snapshot() as snapshot:
        return sum(decode_node(name, value).kind == Kind.TAIL for name, value in snapshot.records("nodes"))


def is_whole_hit(answer: Answer, num_tokens: int) -> bool:
    return (answer.num_forwards, answer.report.restored) == (0, num_tokens)


@pytest.mark.parametrize("num_tokens", [GRID, GRID + 1, GRID + 5, GRID + BLOCK - 1])
@pytest.mark.parametrize("reply", [2, BLOCK, 3 * BLOCK])
def test_a_repeat_runs_no_forward_though_the_reply_replaced_the_tail(
    runner: Runner, num_tokens: int, reply: int
) -> None:
    prompt = random_prompt(1, num_tokens)
    cold = runner.run(prompt, "full", reply=reply)
    runner.flush()
    assert (num_tails(runner), len(kept(runner))) == (0, 1)
    for _ in range(2):
        runner.reopen()
        warm = runner.run(prompt, "full", reply=reply)
        assert same(warm, cold)
        assert is_whole_hit(warm, num_tokens)
    assert len(kept(runner)) == 1


def test_each_turn_of_a_conversation_can_be_repeated(runner: Runner) -> None:
    prompt, turns = random_prompt(2, GRID + 3), []
    for number in range(3):
        answer = runner.run(prompt, "full", reply=BLOCK + 2)
        turns.append((prompt, answer))
        prompt = np.concatenate([prompt, np.array(answer.greedy, np.int32), random_prompt(number, 7)])
    runner.reopen()
    for prompt, answer in turns:
        warm = runner.run(prompt, "full", reply=BLOCK + 2)
        assert same(warm, answer)
        assert is_whole_hit(warm, len(prompt))


@pytest.mark.parametrize("num_tokens", [GRID, GRID + 5])
def test_where_a_longer_prompt_is_stored_the_first_run_computes_a_token_and_the_next_one_none(
    runner: Runner, num_tokens: int
) -> None:
    longer = random_prompt(3, 6 * BLOCK + 2)
    runner.run(longer, "full")
    shorter = longer[:num_tokens].copy()
    cold = runner.run(shorter, "off", reply=4)
    first = runner.run(shorter, "full", reply=4)
    assert same(first, cold)
    assert (first.num_forwards, first.report.restored) == (1, num_tokens - 1)
    runner.reopen()
    again = runner.run(shorter, "full", reply=4)
    assert same(again, cold)
    assert is_whole_hit(again, num_tokens)


def test_logits_that_a_tail_still_has_are_not_kept_twice(runner: Runner) -> None:
    prompt = random_prompt(4, GRID + 5)
    cold = runner.run(prompt, "full")
    assert (kept(runner), num_tails(runner)) == ([], 1)
    runner.reopen()
    # Now the reply is kept, and the tail goes.
    answer = runner.run(prompt, "full", reply=6)
    assert is_whole_hit(answer, len(prompt))
    assert (len(kept(runner)), num_tails(runner)) == (1, 0)
    runner.reopen()
    warm = runner.run(prompt, "full")
    assert same(warm, cold)
    assert is_whole_hit(warm, len(prompt))


@pytest.mark.parametrize("damage", ["a bit", "length", "gone"])
def test_logits_that_are_damaged_or_gone_cost_one_token_and_are_kept_again(runner: Runner, damage: str) -> None:
    prompt = random_prompt(5, GRID + 5)
    cold = runner.run(prompt, "full", reply=6)
    (note,) = kept(runner)
    if damage == "length":
        notes = runner.cache.notes(SHARED)
        cached = runner.cache.begin(Prompt(prompt), CacheOptions(scope=parse_scope("full", param="scope")))
        assert notes.get(NoteKind.LOGITS, cached.nodes.end_id) is not None
        notes.put(NoteKind.LOGITS, cached.nodes.end_id, b"short")
        cached.close()
        runner.flush()
    else:
        with runner.cache.store.changes() as changes:
            value = bytearray(changes.record("notes", note.key))
            value[-1] ^= 64
            changes.put_note(note.key, bytes(value) if damage == "a bit" else None)
    runner.reopen()
    warm = runner.run(prompt, "full", reply=6)
    assert same(warm, cold)
    assert (warm.num_forwards, warm.report.restored) == (1, len(prompt) - 1)
    assert len(kept(runner)) == 1
    runner.reopen()
    again = runner.run(prompt, "full", reply=6)
    assert same(again, cold)
    assert is_whole_hit(again, len(prompt))


@pytest.mark.parametrize("position", [BLOCK, GRID])
def test_logits_whose_tokens_are_no_longer_stored_are_not_used(runner: Runner, position: int) -> None:
    prompt = random_prompt(6, GRID + 5)
    cold = runner.run(prompt, "full", reply=6)
    runner.flush()
    with runner.cache.store.snapshot() as snapshot:
        nodes = {name: decode_node(name, value) for name, value in snapshot.records("nodes")}
    for name, node in nodes.items():
        if node.position == position:
            runner.cache.store.quarantine(name, node.parent)
    assert len(kept(runner)) == 1
    warm = runner.run(prompt, "full", reply=6)
    assert same(warm, cold)
    assert (warm.num_forwards > 0, warm.report.restored) == (True, position)


def test_a_prompt_that_differs_in_its_last_token_gets_its_own_logits(runner: Runner) -> None:
    prompt = random_prompt(7, GRID + 5)
    runner.run(prompt, "full", reply=6)
    other = prompt.copy()
    other[-1] += 1 if other[-1] == 0 else -1
    cold = runner.run(other, "off", reply=4)
    assert same(runner.run(other, "full", reply=4), cold)
    runner.reopen()
    assert same(runner.run(other, "full", reply=4), cold)
    assert len(kept(runner)) == 2


def test_what_is_not_to_be_saved_leaves_no_logits(runner: Runner) -> None:
    prompt = random_prompt(8, GRID + 5)
    runner.run(prompt, "off", reply=6)
    only_read = CacheOptions(scope=parse_scope("full", param="scope"), save=False)
    runner.run_prompt(Prompt(prompt), only_read, reply=6)
    runner.run(prompt, 2 * BLOCK, reply=6)
    assert kept(runner) == []
