"""The rows of prompts in a step beside replies keep the pace, and no bit of a reply depends on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.engine.forward import forward
from diskprefix.engine.scheduler import LEAST_ROWS, Pace
from tests.engine.driving import load, request, run_together, tokens

MOST_ROWS = 256


def settled(pace: Pace, decoding_s: float, row_s: float, num_steps: int = 40) -> float:
    """Has a machine compute steps of a reply and a prompt, and returns what the last one took."""
    for _ in range(5):
        pace.record_step(1, 0, decoding_s)
    seconds = 0.0
    for _ in range(num_steps):
        most = pace.most_rows()
        rows = MOST_ROWS if most is None else min(MOST_ROWS, most)
        if rows:
            seconds = decoding_s + rows * row_s
        pace.record_step(1, rows, decoding_s + rows * row_s)
    return seconds


@pytest.mark.parametrize("row_s", [0.0002, 0.0005, 0.002])
def test_a_step_with_replies_and_prompts_takes_the_target(row_s: float) -> None:
    assert settled(Pace(0.05), 0.015, row_s) == pytest.approx(0.05, abs=row_s)


def test_the_pace_follows_a_machine_that_gets_slower_and_faster() -> None:
    pace = Pace(0.05)
    for row_s in (0.0003, 0.0015, 0.0003):
        assert settled(pace, 0.015, row_s) == pytest.approx(0.05, abs=row_s)


def test_replies_that_take_turns_do_not_make_rows_seem_to_cost_nothing() -> None:
    """Of 64 replies, 8 are in a step with prompts."""
    pace = Pace(0.1)
    pace.record_step(64, 0, 0.3)
    for _ in range(5):
        pace.record_step(8, 250, 0.0375 + 250 * 0.001)
    assert pace.most_rows() == pytest.approx(300, abs=1), "half of the time is for prompts"
    pace.record_step(8, 0, 0.0375)
    assert pace.most_rows() == pytest.approx(62, abs=1)


def test_where_decoding_alone_takes_the_target_prompts_have_half_of_the_time() -> None:
    assert settled(Pace(0.05), 0.4, 0.01) == pytest.approx(0.8, abs=0.01)


def test_a_prompt_always_has_some_rows() -> None:
    pace = Pace(0.05)
    pace.record_step(0, MOST_ROWS, 1000.0)
    assert pace.most_rows() == LEAST_ROWS


def test_prompts_get_on_where_every_step_takes_long_whatever_is_in_it() -> None:
    """As beside other programs that use the processors: small steps would make them wait for nothing."""
    pace = Pace(0.05)
    settled(pace, 0.015, 0.0005)
    rows = 0
    for _ in range(90):
        most = pace.most_rows()
        step_rows = MOST_ROWS if most is None else min(MOST_ROWS, most)
        rows += step_rows
        pace.record_step(1, step_rows, 0.3 + step_rows * 0.001)
    assert rows / 90 > MOST_ROWS / 2


def test_now_and_then_a_step_only_decodes_so_that_this_is_measured() -> None:
    pace = Pace(0.05)
    pace.record_step(0, MOST_ROWS, 0.1)
    steps = list[int]()
    for _ in range(21):
        most = pace.most_rows()
        assert most is not None
        steps.append(most)
        pace.record_step(1, most, 0.02 + most * 0.0004)
    assert steps.count(0) == 3


@pytest.mark.parametrize("pace", [Pace(0.0), Pace(0.05)], ids=["no target", "nothing measured"])
def test_without_a_target_or_a_measurement_the_step_is_full(pace: Pace) -> None:
    pace.record_step(1, 0, 0.1)
    assert pace.most_rows() is None


def test_the_first_step_beside_a_reply_goes_by_the_steps_of_prompts_before_it() -> None:
    pace = Pace(0.05)
    pace.record_step(0, MOST_ROWS, 0.128)
    assert pace.most_rows() == pytest.approx(100, abs=1)


def test_steps_beside_replies_keep_the_pace_and_the_replies_are_those_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folder, tmp_path / "kv", block_size=256)
    steps = list[tuple[int, int]]()

    def noted(model: object, step: list[object]) -> object:
        decoding = [chunk for chunk in step if chunk.sequence.is_decoding]  # type: ignore[attr-defined]
        steps.append((len(decoding), sum(chunk.num_rows for chunk in step) - len(decoding)))  # type: ignore[attr-defined]
        return forward(model, step)  # type: ignore[arg-type]

    def seconds() -> float:
        """A machine on which a step takes 20 ms, and each row of a prompt 1 ms."""
        return sum(0.02 + 0.001 * rows for _, rows in steps)

    monkeypatch.setattr("diskprefix.engine.loop.forward", noted)
    engine.clock = seconds
    requests = [request(tokens(60, 1), scope="off", max_tokens=60), request(tokens(2000, 2), scope="off")]
    unpaced = [run_together(engine, [one])[0].tokens for one in requests]
    steps.clear()
    assert [client.tokens for client in run_together(engine, requests)] == unpaced
    beside = [rows for num_decoding, rows in steps if num_decoding and rows]
    assert len(beside) > 20
    assert all(25 <= rows <= 30 for rows in beside[10:-1]), "of the 50 ms, 20 are for the reply"
    engine.close()
