"""The engine keeps a reply with its prompt: that of the first choice, and only one that ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diskprefix.engine.loop import Engine
from diskprefix.engine.request import DoneEvent, Event, FinishEvent
from diskprefix.nouns import CacheReport
from diskprefix.store.schema import decode_node
from diskprefix.store.verify import verify_index
from diskprefix.tokens import TokenIds
from tests.engine.driving import Cancelled, load, request, run_request, tokens, tokens_of

BLOCK = 16
PROMPT = 3 * BLOCK + 4
NO_END = {0: -100.0, 2: -100.0}


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = load(folder, tmp_path / "kv", block_size=BLOCK, kv_memory_entries=0)
    yield engine
    engine.close()


def run(engine: Engine, token_ids: TokenIds, *, steps: int | None = None, **options: Any) -> list[Event]:
    defaults: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 40, "logit_bias": NO_END}
    return run_request(engine, request(token_ids, **(defaults | options)), steps=steps)


def report_of(events: list[Event]) -> CacheReport:
    assert isinstance(events[-1], DoneEvent)
    return events[-1].cache


def next_turn(token_ids: TokenIds, reply: list[int]) -> TokenIds:
    return np.concatenate([token_ids, np.array([*reply, *range(3, 20)], dtype=np.int32)])


def reply_ends(engine: Engine) -> list[int]:
    """Returns the ends of the stored nodes that reach into replies. Asserts that the store is sound."""
    engine.cache.settle()
    assert engine.cache.writer.flush(30)
    assert not verify_index(engine.cache.store).problems
    with engine.cache.store.snapshot() as snapshot:
        nodes = [decode_node(name, value) for name, value in snapshot.records("nodes")]
    return sorted(node.end for node in nodes if node.end > PROMPT)


@pytest.mark.parametrize("scope", ["full", "auto:8", "500"])
def test_the_next_turn_goes_on_from_the_last_computed_token_of_the_reply(engine: Engine, scope: str) -> None:
    token_ids = tokens(PROMPT, 1)
    first = run(engine, token_ids, scope=scope)
    assert len(tokens_of(first)) == 40
    assert report_of(first).saved == "queued"
    assert reply_ends(engine) == [4 * BLOCK, 5 * BLOCK, PROMPT + 39]
    whole = next_turn(token_ids, tokens_of(first))
    second = run(engine, whole, scope=scope)
    report = report_of(second)
    assert (report.restored, report.source) == (PROMPT + 39, "disk")
    assert tokens_of(second) == tokens_of(run(engine, whole, scope="off"))


def test_a_reply_is_kept_up_to_as_many_tokens_as_the_scope_says(engine: Engine) -> None:
    run(engine, tokens(PROMPT, 7), scope=str(PROMPT + 20))
    assert reply_ends(engine) == [4 * BLOCK, PROMPT + 20]


@pytest.mark.parametrize("scope", ["off", str(PROMPT), str(2 * BLOCK)])
def test_where_the_scope_does_not_reach_beyond_the_prompt_nothing_is_kept_of_its_reply(
    engine: Engine, scope: str
) -> None:
    run(engine, tokens(PROMPT, 2), scope=scope)
    assert reply_ends(engine) == []


def test_of_several_choices_the_first_is_kept_and_the_others_are_what_they_would_be_alone(engine: Engine) -> None:
    token_ids = tokens(PROMPT, 3)
    together = run(engine, token_ids, n=3)
    assert [e.choice for e in together if isinstance(e, FinishEvent)] == [0, 1, 2]
    assert reply_ends(engine) == [4 * BLOCK, 5 * BLOCK, PROMPT + 39]
    for choice in range(3):
        alone = run(engine, token_ids, scope="off", seed=1 + choice)
        assert tokens_of(together, choice) == tokens_of(alone)
    shared = [np.argmin(np.equal(tokens_of(together), tokens_of(together, choice))) for choice in (1, 2)]
    restored = [
        report_of(run(engine, next_turn(token_ids, tokens_of(together, choice)), scope="64")).restored
        for choice in range(3)
    ]
    assert restored == [PROMPT + 39, PROMPT + shared[0], PROMPT + shared[1]]


@pytest.mark.parametrize("steps", [2, 20, 35])
def test_a_reply_that_is_cancelled_is_not_kept(engine: Engine, steps: int) -> None:
    """One step of prefill, then one for each token: the prompt is saved by then, and a block complete."""
    with pytest.raises(Cancelled):
        run(engine, tokens(PROMPT, 4), steps=steps)
    assert reply_ends(engine) == []
    assert engine.cache.stats()["pending_bytes"] == 0
    assert report_of(run(engine, tokens(PROMPT, 4))).restored == PROMPT


def test_a_reply_that_ends_by_itself_or_by_a_stop_string_is_kept_as_far_as_it_was_run(engine: Engine) -> None:
    token_ids = tokens(PROMPT, 5)
    free = run(engine, token_ids, scope="off")
    reply = tokens_of(free)
    end = reply.index(next(token for token in reply[20:] if token not in reply[:20]))
    stop = engine.tokenizer.decode(reply[end : end + 1])
    stopped = tokens_of(run(engine, token_ids, stop=(stop,)))
    last = PROMPT + len(stopped) - 1
    assert reply_ends(engine) == sorted({*range(4 * BLOCK, last, BLOCK), last})
    at_once = run(engine, tokens(PROMPT, 6), logit_bias={2: 100.0})
    assert tokens_of(at_once) == [2]
    assert reply_ends(engine) == sorted({*range(4 * BLOCK, last, BLOCK), last})
