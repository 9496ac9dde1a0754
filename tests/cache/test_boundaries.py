"""Of a model that is exact at every token, a boundary is kept where the policy put it, and only once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.nouns import CacheOptions, Mark, Prompt
from diskprefix.store.tree import list_entries
from diskprefix.store.verify import verify_index
from diskprefix.tokens import TokenIds
from tests.runner import Answer, Runner, random_prompt, tiny_llama, tiny_settings

BLOCK = 32
FULL = CacheOptions(scope=parse_scope("full", param="scope"))


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv", block_size=BLOCK), exact_at="token")
    yield runner
    runner.close()


def ask(runner: Runner, prompt: TokenIds | Prompt, scope: str | int = "full", **changes: object) -> Answer:
    options = CacheOptions(scope=parse_scope(scope, param="scope"), **changes)  # type: ignore[arg-type]
    answer = runner.run_prompt(prompt if isinstance(prompt, Prompt) else Prompt(prompt), options)
    runner.flush()
    assert verify_index(runner.cache.store).problems == ()
    return answer


def entries(runner: Runner) -> list[int]:
    with runner.cache.store.snapshot() as snapshot:
        return sorted(entry.num_tokens for entry in list_entries(snapshot))


def nodes(runner: Runner) -> list[tuple[int, int]]:
    """The positions at which the stored nodes begin and end."""
    with runner.cache.store.snapshot() as snapshot:
        found = [node for name in snapshot.keys("nodes") if (node := snapshot.node(name)) is not None]
    return sorted((node.position, node.end) for node in found)


@pytest.mark.parametrize("boundary", [BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1])
def test_a_boundary_is_kept_to_the_token(runner: Runner, boundary: int) -> None:
    prompt = random_prompt(1, 4 * BLOCK)
    first = ask(runner, prompt, boundary)
    assert first.report.selection.kept == boundary
    assert entries(runner) == [boundary]
    runner.reopen()
    other = np.concatenate([prompt[:boundary], random_prompt(2, 9)])
    cold = ask(runner, other, "off")
    warm = ask(runner, other, boundary)
    assert (warm.report.restored, warm.report.saved) == (boundary, "stored")
    assert torch.equal(warm.logits, cold.logits)
    assert entries(runner) == [boundary]


def test_a_safe_boundary_of_auto_is_kept_to_the_token(runner: Runner) -> None:
    prompt = Prompt(random_prompt(1, 3 * BLOCK + 5), boundaries=(BLOCK, 3 * BLOCK + 2))
    report = ask(runner, prompt, "auto").report
    assert (report.selection.selected, report.selection.kept) == (3 * BLOCK + 2, 3 * BLOCK + 2)
    turn = np.concatenate([prompt.token_ids[: 3 * BLOCK + 2], random_prompt(2, 9)])
    assert ask(runner, turn, "off", save=False).report.restored == 0
    assert ask(runner, turn, "full", save=False).report.restored == 3 * BLOCK + 2


def test_a_mark_is_kept_to_the_token(runner: Runner) -> None:
    prompt = Prompt(random_prompt(1, 3 * BLOCK), marks=(Mark(2 * BLOCK + 3, 600.0),))
    assert ask(runner, prompt, str(BLOCK)).report.selection.kept == 2 * BLOCK + 3
    assert nodes(runner) == [(0, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK + 3)]


@pytest.mark.parametrize("scope", ["full", "auto"])
def test_the_turns_of_a_conversation_leave_no_trail(runner: Runner, scope: str) -> None:
    turn = random_prompt(1, BLOCK + 5)
    for seed in range(12):
        before = ask(runner, turn, scope)
        assert before.report.saved == "queued"
        restored = before.report.restored
        assert restored == (0 if seed == 0 else len(turn) - 11)
        assert nodes(runner)[-1][1] == len(turn)
        turn = np.concatenate([turn, random_prompt(seed, 11)])
    last = len(turn) - 11
    assert nodes(runner) == [(start, min(start + BLOCK, last)) for start in range(0, last, BLOCK)]
    assert entries(runner)[-1] == last


def test_a_beginning_that_comes_later_is_there_already(runner: Runner) -> None:
    long = random_prompt(1, 2 * BLOCK + 20)
    ask(runner, long)
    written, stored = runner.cache.writer.written_tokens, nodes(runner)
    for end in (BLOCK + 3, 2 * BLOCK + 3):
        short = ask(runner, long[:end].copy())
        assert (short.report.restored, short.report.saved) == (end - 1, "stored")
    for boundary in (BLOCK + 3, 2 * BLOCK + 3):
        other = np.concatenate([long[:boundary], random_prompt(boundary, 5)])
        assert ask(runner, other, boundary).report.saved == "stored"
    assert (runner.cache.writer.written_tokens, nodes(runner)) == (written, stored)
    assert entries(runner) == [len(long)]


def test_a_prompt_whose_end_was_replaced_computes_one_token(runner: Runner) -> None:
    prompt = random_prompt(1, 2 * BLOCK + 3)
    first = ask(runner, prompt)
    again = ask(runner, prompt)
    assert (again.report.restored, again.num_forwards) == (len(prompt), 0)
    ask(runner, np.concatenate([prompt, random_prompt(2, 4)]))
    runner.reopen()
    again = ask(runner, prompt)
    assert (again.report.restored, again.num_forwards) == (len(prompt) - 1, 1)
    assert torch.equal(again.logits, first.logits)


def test_the_end_of_a_prompt_is_kept_with_its_logits_where_a_boundary_was(runner: Runner) -> None:
    prompt = random_prompt(1, 2 * BLOCK + 3)
    ask(runner, prompt, len(prompt) - 1)
    ask(runner, np.concatenate([prompt, prompt]), len(prompt))
    assert ask(runner, prompt).report.saved == "queued"
    assert ask(runner, prompt).num_forwards == 0
    assert nodes(runner) == [(0, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, 2 * BLOCK + 3)]


def test_of_a_model_that_is_exact_on_the_grid_only_no_reply_is_kept(tmp_path: Path) -> None:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv", block_size=BLOCK), exact_at="grid")
    assert runner.run(random_prompt(1, BLOCK + 5), "full", reply=2 * BLOCK).report.saved == "queued"
    runner.flush()
    assert nodes(runner) == [(0, BLOCK), (BLOCK, BLOCK + 5)]
    runner.close()


def test_uses_count_where_what_was_used_is_replaced_at_once(runner: Runner) -> None:
    """They are written after a second; what replaces it is written before that."""
    turn = random_prompt(1, BLOCK + 5)
    ask(runner, turn)
    num_turns = 6
    for seed in range(num_turns):
        turn = np.concatenate([turn, random_prompt(seed, 3)])
        ask(runner, turn)

    def restores() -> list[int]:
        with runner.cache.store.snapshot() as snapshot:
            return [int(number) for number in snapshot.usages().records["restores"]]

    runner.wait_for(lambda: restores() == [num_turns, num_turns])


def test_the_end_of_a_conversation_restores_while_it_waits_to_be_written(runner: Runner) -> None:
    turn = random_prompt(1, BLOCK + 5)
    for seed in range(4):
        report = runner.run_prompt(Prompt(turn), FULL).report
        assert report.restored == (len(turn) - 7 if seed else 0)
        turn = np.concatenate([turn, random_prompt(seed, 7)])
    runner.flush()
    assert len(nodes(runner)) == -(-(len(turn) - 7) // BLOCK)
