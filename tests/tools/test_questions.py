"""The questions of `tools/bench questions`, and its figures."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from tests.daemon.server.scripted import ScriptedEngine, scripted_app
from tools.benchmarks.engines import HttpEngine
from tools.benchmarks.questions import Count, ask, difference, read_questions, show


def counts(engine: str, *right: int, runs: int = 5, model: str = "m") -> list[Count]:
    return [Count(model, engine, str(number), count, runs) for number, count in enumerate(right)]


def test_a_right_answer_is_told_from_a_wrong_one() -> None:
    questions = read_questions()
    assert len({question.text for question in questions}) == len(questions) == 20
    assert [asked.text for asked in questions if not asked.is_right(asked.yes) or asked.is_right(asked.no)] == []


def test_the_interval_is_the_one_of_independent_runs() -> None:
    mean, low, high = difference(counts("a", 5, 4, 3), counts("b", 5, 5, 0))
    assert mean == pytest.approx(100 * (0 - 0.2 + 0.6) / 3)
    deviation = 100 * math.sqrt(0.8 * 0.2 / 4 + 0.6 * 0.4 / 4) / 3
    assert [low, high] == pytest.approx([mean - 1.96 * deviation, mean + 1.96 * deviation])
    with pytest.raises(ValueError, match="argument 2 is longer"):
        difference(counts("a", 1), counts("b", 1, 2))


def test_each_question_is_asked_without_a_word_about_sampling(
    chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, send = list[dict[str, Any]](), httpx.Client.post

    def post(client: httpx.Client, *place: Any, json: dict[str, Any]) -> httpx.Response:
        sent.append(json)
        return send(client, *place, json=json)

    monkeypatch.setattr(httpx.Client, "post", post)
    with scripted_app(chat_model, engine) as server:
        client = HttpEngine(None, server.port, {"temperature": 0}, settle=lambda _: None)  # type: ignore[arg-type]
        with client._client:
            first, second = ask(client, read_questions()[:2], 2, ("m", "ours"))
    assert [body.keys() for body in sent] == [{"messages", "max_tokens"}] * 4
    assert (first.right, first.runs, first.question, second.question) == (
        0,
        2,
        sent[0]["messages"][0]["content"],
        second.question,
    )
    assert len(engine.requests) == 4


def test_the_table_compares_the_first_engine_with_the_others(capsys: pytest.CaptureFixture[str]) -> None:

    rows = [
        *counts("ours", 5, 5),
        *counts("theirs", 5, 0),
        *counts("ours", 0, 0, model="n"),
        *counts("theirs", 5, 5, model="n"),
    ]
    show({"counts": [asdict(row) for row in rows]}, Console(width=120))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["m", "theirs", "5", "of", "10", "+50.0", "points", "+50.0", "to", "+50.0"] in lines
    assert ["n", "theirs", "10", "of", "10", "-100.0", "points", "-100.0", "to", "-100.0"] in lines
    assert ["m", "and", "n", "theirs", "15", "of", "20", "-25.0", "points", "-25.0", "to", "-25.0"] in lines
