"""A model with sliding windows in the engine: what slid out of memory is missed by nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diskprefix.engine.loop import Engine
from diskprefix.tokens import TokenIds
from tests.engine.driving import (
    Client,
    alone,
    forget_idle,
    load,
    request,
    run_together,
    tokens,
    write_model,
)
from tests.engine.test_drafts import scripted

PROMPT, REPLY = 1450, 1130
"""The reply is so long that the window at the prompt's end slides out."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = load(folder, tmp_path / "kv")
    assert engine.cache.layout.exact_at == "token"
    yield engine
    engine.close()


def answered(engine: Engine, prompt: TokenIds) -> TokenIds:
    """The reply to a prompt, whose sequence is left in memory."""
    (client,) = run_together(engine, [request(prompt, max_tokens=REPLY, scope="1")])
    (allocation,) = engine.pool.allocations
    assert allocation.arena.complete_from >= PROMPT
    return np.array(client.tokens, np.int32)


def cached_tokens(engine: Engine, prompt: TokenIds) -> int:
    """Of a prompt whose reply must be the one that it gets alone."""
    one = request(prompt, scope="1")
    (client,) = run_together(engine, [one])
    assert client.tokens == alone(engine, one).tokens
    return client.done.usage.cached_tokens


def test_a_turn_goes_on_from_memory_where_the_window_still_is(engine: Engine) -> None:
    prompt = tokens(PROMPT)
    reply = answered(engine, prompt)
    assert cached_tokens(engine, np.concatenate([prompt[:700], tokens(90, 3)])) == 0
    assert cached_tokens(engine, np.concatenate([prompt, reply, tokens(40, 1)])) == PROMPT + REPLY - 1


def test_a_turn_that_leaves_the_reply_goes_on_from_the_prompts_end(engine: Engine) -> None:
    """Such as that of a client that strips what the model thought."""
    prompt = tokens(PROMPT)
    reply = answered(engine, prompt)
    assert cached_tokens(engine, np.concatenate([prompt, reply[:100], tokens(90, 2)])) == PROMPT


TWO_CHOICES = request(tokens(PROMPT), n=2, max_tokens=REPLY, temperature=0.9, seed=4)


@pytest.fixture(scope="module")
def two_choices(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Client:
    """The replies where there is memory for both."""
    engine = load(folder, tmp_path_factory.mktemp("alone") / "kv")
    client = alone(engine, TWO_CHOICES)
    engine.close()
    return client


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_choices_begin_at_the_prompts_end_however_far_the_first_has_come(
    engine: Engine, two_choices: Client, num_sequences: int
) -> None:
    """In the memory of the one that has ended, or beside it."""
    arenas = [engine.pool._new_arena() for _ in range(num_sequences)]
    for arena in arenas:
        arena.reserve(PROMPT + REPLY)
    # There is no room for more.
    engine.pool._spare, engine.pool.limit_bytes = arenas, sum(arena.num_bytes for arena in arenas)
    (found,) = run_together(engine, [TWO_CHOICES])
    assert [found.tokens_of(choice) for choice in (0, 1)] == [two_choices.tokens_of(choice) for choice in (0, 1)]


def test_a_beginning_that_another_request_computes_is_copied_before_it_slides_out(engine: Engine) -> None:
    long = tokens(2900)
    later = np.concatenate([long[:2000], tokens(100, 1)])
    one, other = request(long, max_tokens=8, scope="1"), request(later, max_tokens=8, scope="1")
    first, second = run_together(engine, [one, other])
    assert second.done.usage.cached_tokens == 2000
    assert first.tokens == alone(engine, one).tokens
    assert second.tokens == alone(engine, other).tokens


def test_a_prompt_longer_than_the_memory_of_its_windows_is_saved_whole(folder: Path, tmp_path: Path) -> None:
    """And restored after a restart."""
    one = request(tokens(2800), max_tokens=6)
    engine = load(folder, tmp_path / "kv")
    (cold,) = run_together(engine, [one])
    engine.close()
    engine = load(folder, tmp_path / "kv")
    (warm,) = run_together(engine, [one])
    assert warm.done.usage.cached_tokens == 2800
    assert warm.tokens == cold.tokens == alone(engine, one).tokens
    longer = request(np.concatenate([tokens(2800)[:2777], tokens(30, 1)]), max_tokens=6)
    forget_idle(engine.pool)
    (turn,) = run_together(engine, [longer])
    assert turn.done.usage.cached_tokens == 2777
    assert turn.tokens == alone(engine, longer).tokens
    engine.close()


def test_a_prompt_that_is_wanted_at_its_second_turn_only_is_saved_then(folder: Path, tmp_path: Path) -> None:
    """By then its beginning has slid out of memory, and was written before."""
    first = request(tokens(2800), max_tokens=6, scope="1")
    engine = load(folder, tmp_path / "kv")
    run_together(engine, [first])
    second = request(np.concatenate([tokens(2800), tokens(300, 1)]), max_tokens=6)
    (turn,) = run_together(engine, [second])
    assert turn.done.cache.source == "memory"
    assert turn.done.cache.saved == "queued"
    engine.close()
    engine = load(folder, tmp_path / "kv")
    third = request(np.concatenate([tokens(2800), tokens(300, 1), tokens(20, 2)]), max_tokens=6)
    (warm,) = run_together(engine, [third])
    assert warm.done.usage.cached_tokens == 3100
    assert warm.tokens == alone(engine, third).tokens
    engine.close()


def test_what_slides_out_is_not_written_for_a_request_that_saves_nothing(engine: Engine) -> None:
    run_together(engine, [request(tokens(2800), max_tokens=6, scope="1", save=False)])
    engine.cache.settle()
    assert engine.cache.writer.flush(30)
    assert engine.cache.store.counts()["blocks"] == 0


def test_windows_that_slide_while_guesses_are_taken_back_give_the_reply_without_guesses(
    engine: Engine, folder: Path, tmp_path: Path
) -> None:
    one = request(tokens(PROMPT), max_tokens=260, temperature=1.0, seed=3)
    (expected,) = run_together(engine, [one])
    guessing = load(folder, tmp_path / "guessing", draft_model="ngram")
    guessing.clock = lambda: 0.0
    with scripted(guessing, [expected]):
        (found,) = run_together(guessing, [one])
    assert found.tokens == expected.tokens
    assert 0 < found.done.timings.accepted_tokens < found.done.timings.drafted_tokens
    (allocation,) = guessing.pool.allocations
    assert allocation.arena.complete_from > 0, "it must slide"
    (theirs,) = engine.pool.allocations
    first = max(allocation.arena.complete_from, theirs.arena.complete_from)
    last = [each.arena.read_tokens(first, each.num_computed - first) for each in (allocation, theirs)]
    assert last[0] == last[1]
    guessing.close()
