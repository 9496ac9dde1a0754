"""Replies with guesses that are computed: tokens, state and what is saved are those without, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from diskprefix.engine.guesser import LONGEST, Guesser
from diskprefix.engine.loop import Engine, Loop
from diskprefix.engine.request import Constraint, GenerateRequest
from diskprefix.kv.pool import KVAllocation
from diskprefix.tokens import TokenIds
from tests.engine.driving import (
    BLOCK,
    POSITIONS,
    REPLY,
    Client,
    alone,
    asked_of,
    forget_idle,
    load,
    request,
    run_together,
    said,
    some_are_wrong,
    tokens,
    write_model,
)
from tests.model import tiny

TEXT = np.tile(tokens(90, 1), 3)


class Scripted(Guesser):
    """Guesses some of the tokens that come next, and behind them some that do not."""

    def __init__(self, prompt: TokenIds, most_computed: int, replies: list[list[int]]) -> None:
        super().__init__(prompt, most_computed)
        self._replies, self._noted = replies, list[int]()
        self._chance = random.Random(len(prompt))

    def record_token(self, token: int) -> None:
        super().record_token(token)
        self._noted.append(token)

    def look_back(self) -> None:
        at = len(self._noted)
        coming = next((reply[at:] for reply in self._replies if reply[:at] == self._noted), [])
        right = coming[: self._chance.choice([0, 1, 2, 5])]
        wrong = [(token + 1) % 250 for token in coming[len(right) :][: self._chance.choice([0, 0, 1, 4])]]
        self.propose(right + wrong)

    def propose(self, token_ids: list[int]) -> None:
        self.token_ids, self._kinds = token_ids, [self.rates.of_match(LONGEST)] * len(token_ids)

    def chances(self) -> list[float]:
        return [0.9] * len(self.token_ids)


def folder_of(name: str, at: Path) -> Path:
    if name == "llama":
        return tiny.write_folder(at / name, dtype=torch.bfloat16, max_position_embeddings=POSITIONS)
    return write_model(at / name, name)


def guessing(folder: Path, kv: Path) -> Engine:
    engine = load(folder, kv, draft_model="ngram")
    # No step is measured, so that the same guesses are computed each time.
    engine.clock = lambda: 0.0
    return engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """One that does not guess, and one that does."""
    both = load(folder, tmp_path_factory.mktemp("plain")), guessing(folder, tmp_path_factory.mktemp("guessing"))
    yield both
    for engine in both:
        engine.close()


def scripted(engine: Engine, clients: Iterable[Client]) -> AbstractContextManager[Any]:
    """Within it, the engine guesses the replies of these clients, with mistakes."""
    replies = [client.tokens_of(n) for client in clients for n in range(client.ticket.request.sampling.n)]

    def guesser(one: GenerateRequest) -> Guesser:
        num_tokens = len(one.prompt.token_ids)
        return Scripted(one.prompt.token_ids, num_tokens + engine.reply_limit(one) - 1, replies)

    return patch.object(engine, "guesser", guesser)


REQUESTS = {
    **asked_of(TEXT),
    "logprobs": request(TEXT, max_tokens=REPLY, logprobs=2),
    "penalties": request(TEXT, max_tokens=REPLY, repetition_penalty=1.3, frequency_penalty=0.5),
    "constraint that ends": request(
        TEXT, constraint=Constraint(kind="lark", source="start: /(ab){5}/"), max_tokens=REPLY
    ),
    "long prompt": request(tokens(700, 4), max_tokens=REPLY),
}


@pytest.mark.parametrize("name", ["sampled", "several", "constraint that ends"])
def test_a_reply_is_the_one_without_guesses(name: str, plain: Engine, engine: Engine) -> None:
    expected = run_together(plain, [REQUESTS[name]])
    with scripted(engine, expected):
        found = run_together(engine, [REQUESTS[name]])
    assert list(map(said, found)) == list(map(said, expected))
    assert some_are_wrong(found[0])
    assert expected[0].done.timings.drafted_tokens == 0


def test_text_that_repeats_itself_is_guessed_from_itself(plain: Engine, engine: Engine) -> None:
    one = request(TEXT, max_tokens=100, repetition_penalty=1.02, frequency_penalty=0.01)
    (expected,), (found,) = run_together(plain, [one]), run_together(engine, [one])
    assert said(found) == said(expected)
    assert some_are_wrong(found)


def test_each_guess_that_is_right_saves_a_step(plain: Engine, engine: Engine) -> None:
    expected = run_together(plain, [REQUESTS["greedy"]])
    num_steps, compute = [0], Loop._compute

    def counted(loop: Loop, step: Any) -> None:
        num_steps[0] += step[0].sequence.is_decoding
        compute(loop, step)

    with scripted(engine, expected), patch.object(Loop, "_compute", counted):
        (found,) = run_together(engine, [REQUESTS["greedy"]])
    # The first token is that of the prompt's last step.
    assert len(found.tokens) == 1 + num_steps[0] + found.done.timings.accepted_tokens


def ends_of(reply: list[int]) -> Iterator[dict[str, Any]]:
    """Yields limits and stop strings that end this reply after some numbers of tokens."""
    text = tiny.tokenizer()
    for length in range(10, 16):
        yield {"max_tokens": length}
    for length in range(10, 16, 3):
        yield {"stop": (text.decode(reply[length - 4 : length]),)}


def test_a_reply_ends_in_the_middle_of_a_draft_as_it_does_without(plain: Engine, engine: Engine) -> None:
    whole = run_together(plain, [REQUESTS["sampled"]])
    for end in ends_of(whole[0].tokens):
        one = request(TEXT, **{"max_tokens": REPLY, "temperature": 1.0, "seed": 3} | end)
        for each in (plain, engine):
            forget_idle(each.pool)
        (expected,) = run_together(plain, [one])
        with scripted(engine, whole):
            (found,) = run_together(engine, [one])
        assert said(found) == said(expected), end
        assert found.done.timings.accepted_tokens > 0
        (theirs,), (ours,) = plain.pool.allocations, engine.pool.allocations
        assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert ours.arena.num_tokens == ours.num_computed == theirs.num_computed


def test_a_token_that_ends_a_reply_ends_it_in_a_draft_too(plain: Engine, engine: Engine) -> None:
    whole = run_together(plain, [REQUESTS["sampled"]])
    ends = frozenset(whole[0].tokens[20:25])
    with patch.object(plain, "end_ids", ends), patch.object(engine, "end_ids", ends), scripted(engine, whole):
        (expected,), (found,) = run_together(plain, [REQUESTS["sampled"]]), run_together(engine, [REQUESTS["sampled"]])
    assert said(found) == said(expected)
    assert len(found.tokens) <= 21
    assert found.done.timings.accepted_tokens > 0


def held(engine: Engine) -> KVAllocation:
    """The longest sequence in memory."""
    return max(engine.pool.allocations, key=lambda allocation: allocation.num_computed)


def test_what_is_kept_of_a_reply_is_that_without_guesses_in_memory_on_disk_and_after_a_restart(
    folder: Path, plain: Engine, tmp_path: Path
) -> None:
    engine = guessing(folder, tmp_path / "kv")
    one = request(TEXT, max_tokens=2 * BLOCK)
    (expected,) = run_together(plain, [one])
    with scripted(engine, [expected]):
        (found,) = run_together(engine, [one])
    assert some_are_wrong(found)
    theirs, ours = held(plain), held(engine)
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    state = theirs.arena.read_tokens(0, theirs.num_computed)
    assert ours.arena.read_tokens(0, ours.num_computed) == state
    engine.close()

    again = guessing(folder, tmp_path / "kv")
    turn = request(np.concatenate([TEXT, np.array(expected.tokens, np.int32), tokens(20, 9)]), max_tokens=REPLY)
    cold = alone(plain, turn)
    with scripted(again, [cold]):
        (warm,) = run_together(again, [turn])
        assert warm.done.usage.cached_tokens == len(TEXT) + 2 * BLOCK - 1
        assert said(warm) == said(cold)
        assert some_are_wrong(warm)
        assert held(again).arena.read_tokens(0, theirs.num_computed) == state
        (repeat,) = run_together(again, [turn])
    assert repeat.done.usage.cached_tokens == len(turn.prompt.token_ids)
    assert said(repeat) == said(cold)
    again.close()


def test_guesses_reach_neither_beyond_the_context_nor_beyond_the_memory(
    plain: Engine, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[int] = []
    compute = type(engine.pool._new_arena()).compute

    def noted(arena: Any, *args: Any) -> torch.Tensor:
        logits = compute(arena, *args)
        ends.append(arena.num_tokens)
        return logits

    text = np.tile(tokens(60, 1), 16)
    one = request(text, max_tokens=None)
    (expected,) = run_together(plain, [one])
    monkeypatch.setattr(type(engine.pool._new_arena()), "compute", noted)
    (found,) = run_together(engine, [one])
    assert said(found) == said(expected)
    assert found.done.usage.completion_tokens == POSITIONS - len(text)
    assert found.done.timings.accepted_tokens > 0
    assert max(ends) == POSITIONS - 1


def test_no_request_loses_its_memory_to_guesses(
    plain: Engine, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends shortly before it would need more than there is."""
    caplog.set_level("INFO")
    one = request(tokens(384, 5), max_tokens=200, scope="off", temperature=1.0, seed=3)
    whole = alone(plain, one)
    last = next(n for n in range(126, 110, -1) if whole.tokens.index(whole.tokens[n]) == n)
    ends = frozenset({whole.tokens[last]})
    arena = engine.pool._new_arena()
    arena._capacity_step = 512
    arena.reserve(512)
    # As beside others: a sequence alone would get memory for all of its reply at once.
    bare = patch.object(engine.pool, "_tokens_at_once", lambda num_tokens, _: num_tokens)
    memory = patch.multiple(engine.pool, _spare=[arena], limit_bytes=arena.num_bytes)
    far = patch.object(Scripted, "look_back", lambda guesser: guesser.propose([3] * 20))
    with bare, memory, scripted(engine, [whole]), far, patch.object(engine, "end_ids", ends):
        (found,) = run_together(engine, [one])
    assert found.tokens == whole.tokens[: last + 1]
    assert found.done.timings.drafted_tokens > REPLY
    assert "waits" not in caplog.text


def test_a_guess_whose_state_is_infinite_fails_no_reply(plain: Engine, engine: Engine) -> None:
    """Attention multiplies it by 0, which gives no number, in the rows before it too."""
    one = request(tokens(90, 1), max_tokens=REPLY)
    (expected,) = run_together(plain, [one])
    infinite = next(token for token in range(3, 250) if token not in {*one.prompt.token_ids, *expected.tokens})
    weight = engine.model.get_input_embeddings().weight
    before = weight[infinite].clone()
    with torch.no_grad():
        weight[infinite] = torch.inf
    wrong = patch.object(Scripted, "look_back", lambda guesser: guesser.propose([infinite]))
    with scripted(engine, [expected]), wrong:
        (found,) = run_together(engine, [one])
    with torch.no_grad():
        weight[infinite] = before
    assert said(found) == said(expected)
    assert found.done.timings.drafted_tokens > 0


def test_a_model_that_is_not_exact_at_every_token_computes_no_guesses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = guessing(folder_of("qwen3_next", tmp_path), tmp_path / "kv")
    assert "--draft-model has no effect" in caplog.text
    (client,) = run_together(engine, [request(TEXT)])
    assert client.done.timings.drafted_tokens == 0
    engine.close()
