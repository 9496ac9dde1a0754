"""A thought that is ended: where, with which tokens, and that the reply goes on as if the model had written them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from diskprefix.engine.loop import Engine
from diskprefix.engine.request import Constraint, FreeText, GenerateRequest
from diskprefix.engine.thought_limit import ThoughtBudget, ThoughtLimit
from tests.engine.driving import load, request, run_request, run_together, said, tokens, tokens_of

PROMPT = tokens(200, 3)
LIMIT = 9
CLOSING = (40, 41, 42)


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = load(folder, tmp_path_factory.mktemp("kv"))
    yield engine
    engine.close()


def watch_for(end: str) -> Callable[[], Callable[[str], bool]]:
    """Returns what makes watches of replies that are one thought up to `end`."""

    def new_watch() -> Callable[[str], bool]:
        seen = ""

        def see(text: str) -> bool:
            nonlocal seen
            seen += text
            return end not in seen

        return see

    return new_watch


def limited(engine: Engine, one: GenerateRequest, limit: int = LIMIT) -> GenerateRequest:
    end = engine.tokenizer.decode(CLOSING)
    return replace(one, thought_budget=ThoughtBudget(max_tokens=limit, closing=CLOSING, new_watch=watch_for(end)))


def test_a_thought_has_as_many_tokens_as_its_budget_and_the_reply_goes_on_behind_it(engine: Engine) -> None:
    free = tokens_of(run_request(engine, request(PROMPT, max_tokens=24)))
    for _ in range(2):  # computed, and restored
        ended = tokens_of(run_request(engine, limited(engine, request(PROMPT, max_tokens=24))))
        assert ended[:LIMIT] == [*free[: LIMIT - 3], *CLOSING]
    behind = np.concatenate([PROMPT, np.array(ended[:LIMIT], np.int32)])
    assert ended[LIMIT:] == tokens_of(run_request(engine, request(behind, max_tokens=24 - LIMIT)))


def test_a_budget_of_less_than_the_tag_leaves_the_tag(engine: Engine) -> None:
    ended = tokens_of(run_request(engine, limited(engine, request(PROMPT, max_tokens=8), limit=1)))
    assert ended[:3] == list(CLOSING)
    assert ended.count(CLOSING[1]) == 1


def test_each_choice_has_the_budget(engine: Engine) -> None:
    (client,) = run_together(engine, [limited(engine, request(PROMPT, n=3, temperature=1.0, seed=5, max_tokens=16))])
    replies = [client.tokens_of(choice) for choice in range(3)]
    assert all(reply[LIMIT - 3 : LIMIT] == list(CLOSING) for reply in replies)
    assert len({tuple(reply[: LIMIT - 3]) for reply in replies}) == 3


def test_guesses_change_nothing(engine: Engine, folder: Path, tmp_path: Path) -> None:
    repeated = np.tile(tokens(40, 1), 5)
    one = limited(engine, request(repeated, max_tokens=40, logit_bias={}))
    guessing = load(folder, tmp_path, draft_model="ngram")
    try:
        (client,), (plain,) = run_together(guessing, [one]), run_together(engine, [one])
        assert said(client) == said(plain)
        assert client.done.timings.accepted_tokens
    finally:
        guessing.close()


def test_what_is_constrained_begins_behind_the_ended_thought(engine: Engine) -> None:
    end = engine.tokenizer.decode(CLOSING)
    constraint = Constraint(kind="lark", source="start: /[ab]{4}/", before=FreeText(end=end))
    one = limited(engine, request(PROMPT, max_tokens=24, logit_bias={}, constraint=constraint))
    reply = tokens_of(run_request(engine, one))
    assert reply[LIMIT - 3 : LIMIT] == list(CLOSING)
    answer = engine.tokenizer.decode(reply[LIMIT:])
    assert len(answer) >= 4
    assert set(answer[:4]) <= {"a", "b"}


def test_a_second_thought_has_what_the_first_one_left() -> None:
    budget = ThoughtBudget(max_tokens=4, closing=(7,), new_watch=lambda: lambda text: text.startswith("t"))
    limit = ThoughtLimit(budget)
    forced = []
    for text in ["t1", "t2", "an answer", "t3", "t4", "t5", "more", "t6", "t7"]:
        forced.append(limit.forced)
        limit.record(text)
    # The 7 before `t4` ends the thought; nothing is forced again until something else has come.
    assert forced == [None, None, None, None, 7, None, None, None, 7]


def test_a_thought_that_the_prompt_opened_is_ended_at_once_where_nothing_is_left() -> None:
    limit = ThoughtLimit(ThoughtBudget(max_tokens=1, closing=(7, 8), new_watch=lambda: lambda _text: True))
    assert limit.forced == 7
    limit.record("</")
    assert limit.forced == 8
