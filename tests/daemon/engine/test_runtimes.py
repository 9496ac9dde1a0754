"""An engine serves by both runtimes alike: the plan of a model, and transformers' modules on the grid."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.engine.request import ReadEvent, Reading
from diskprefix.runtime.grid.grid_runtime import GridRuntime
from diskprefix.runtime.load import self_check
from diskprefix.runtime.plan.plan_runner import PlanRunner
from diskprefix.runtime.plan.planned import PlanRuntime
from diskprefix.values import Scope
from tests.daemon.engine.driving import (
    BLOCK,
    Cancelled,
    Client,
    alone,
    load,
    request,
    run_request,
    run_together,
    said,
    tokens,
)
from tests.runtime.plan import tiny

RUNTIMES = {"plan": ("bfloat16", PlanRuntime), "grid": ("float16", GridRuntime)}
PROMPT = tokens(5 * BLOCK + 7, 1)
ONE = request(PROMPT, logprobs=2)
NEXT = request(np.concatenate([PROMPT[: 4 * BLOCK + 3], tokens(60, 2)]), logprobs=2)

Open = Callable[[], Engine]


@pytest.fixture(params=RUNTIMES)
def opened(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Open:
    """Opens an engine of the runtime on one store."""
    dtype, kind = RUNTIMES[request.param]

    def open_one() -> Engine:
        engine = load(folder, tmp_path / "kv", dtype=dtype)
        assert isinstance(engine.runtime, kind)
        return engine

    return open_one


def test_after_a_restart_prompts_are_restored_and_replies_are_those_of_a_cold_run(opened: Open) -> None:
    engine = opened()
    cold, other = alone(engine, ONE), alone(engine, NEXT)
    (first,) = run_together(engine, [ONE])
    engine.close()
    again, turn = run_together(engine := opened(), [ONE, NEXT])
    assert said(first) == said(again) == said(cold)
    assert (again.done.usage.cached_tokens, turn.done.usage.cached_tokens >= 4 * BLOCK) == (len(PROMPT), True)
    assert said(turn) == said(other)
    assert engine.check_memory() == []


def test_requests_that_take_turns_get_the_replies_of_each_alone(opened: Open) -> None:
    engine = opened()
    asked = [request(tokens(count, count), logprobs=2, n=n) for count, n in ((90, 2), (200, 1), (64, 1))]
    expected = [said(alone(engine, one)) for one in asked]
    assert [said(client) for client in run_together(engine, asked)] == expected


def test_a_cancelled_request_goes_on_where_it_was(opened: Open) -> None:
    engine = opened()
    expected = alone(engine, ONE)
    engine.max_rows = BLOCK
    with pytest.raises(Cancelled):
        run_request(engine, ONE, steps=3)
    (again,) = run_together(engine, [ONE])
    assert again.done.usage.cached_tokens == 3 * BLOCK
    assert said(again) == said(expected)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_hidden_states_have_the_same_bits_cold_restored_and_in_company(opened: Open, pooling: Any) -> None:
    asked = request(PROMPT, max_tokens=0)
    # As for embeddings: a mean needs all tokens.
    cache = replace(asked.cache, computes_last=True, scope=Scope("off") if pooling == "mean" else asked.cache.scope)
    one = replace(asked, reading=Reading(pooling=pooling), cache=cache)
    engine = opened()
    cold = vector(alone(engine, one))
    (saved,) = run_together(engine, [one])
    engine.close()
    again, _ = run_together(opened(), [one, ONE])
    assert vector(saved) == vector(again) == cold


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_model_that_fails_its_check_is_served_on_the_grid(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    # Checks that were passed are remembered there.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = folder if kind == "folder" else tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q8_0")

    def forgetful(plan: PlanRunner, runs: Any, ids: Any, positions: np.ndarray, *others: Any) -> None:
        run(plan, runs, ids, positions - positions[:, :1], *others)

    run, asked = PlanRunner.run, request(tokens(100, 1), logprobs=2)
    monkeypatch.setattr(self_check._passed, "get", lambda _: None)
    monkeypatch.setattr(PlanRunner, "run", forgetful)
    for num_cached in (0, 100):
        engine = load(model, tmp_path / "kv")
        assert isinstance(engine.runtime, GridRuntime)
        assert "tokens: its state depends on the steps" in caplog.text
        (client,) = run_together(engine, [asked])
        assert client.done.usage.cached_tokens == num_cached
        assert said(client) == said(alone(engine, asked))
        engine.close()
        caplog.clear()


def vector(client: Client) -> bytes:
    assert client.done
    (event,) = [event for event in client.events if isinstance(event, ReadEvent)]
    return event.values.tobytes()


def test_a_step_that_fails_leaves_nothing_of_itself(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = opened()
    expected, run, calls = said(alone(engine, ONE)), engine.runtime.run, [0]

    def failing(step: Any, **options: Any) -> Any:
        calls[0] += 1
        output = run(step, **options)
        if calls[0] == 2:
            raise RuntimeError("no more")
        return output

    with monkeypatch.context() as patch:
        patch.setattr(engine.runtime, "run", failing)
        engine.max_rows = BLOCK
        failed, beside = run_together(engine, [ONE, NEXT])
    assert [type(client.events[-1]).__name__ for client in (failed, beside)].count("ErrorEvent") == 1
    (again,) = run_together(engine, [ONE])
    assert said(again) == expected
