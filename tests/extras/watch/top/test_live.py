"""What the lines and tables of `top` say."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console, RenderableType

from diskprefix.extras.watch.top import live
from diskprefix.units import format_part
from tests.extras.watch.top.states import NOW, ended, request, saved, state


def said(what: RenderableType, width: int = 76) -> str:
    console = Console(width=width, no_color=True, color_system=None)
    with console.capture() as printed:
        console.print(what)
    return printed.get()


def words(what: RenderableType, width: int = 76) -> list[list[str]]:
    return [line.split() for line in said(what, width).splitlines()]


def test_what_was_restored_computed_and_is_left_has_a_shape_of_its_own() -> None:
    assert live.bar([25, 50], 100, 8).plain == "██▒▒▒▒··"
    assert live.bar([0], 100, 4).plain == "····"
    assert live.bar([10], 0, 4).plain == "····"
    assert live.bar([500, 5], 100, 4).plain == "████"


def test_each_request_has_its_progress_and_its_figures_on_one_line_of_a_small_terminal() -> None:
    prefilling = request("b", state="prefilling", ready_tokens=950, reply_tokens=0, ttft_s=None, tokens_per_s=None)
    waiting = request("c", state="waiting", restored_tokens=0, ready_tokens=0, reply_tokens=0, ttft_s=None)
    lines = said(live.requests(state(requests=[request(), prefilling, waiting]), 76)).splitlines()
    assert len(lines) == 4
    assert all(len(line.rstrip()) <= 76 for line in lines)
    assert lines[1].split()[0] == "decoding"
    assert lines[1].split()[2:] == ["1,000/1,000", "250", "ms", "20", "31.2", "2.5", "s"]
    assert "▒" in lines[2]
    assert lines[2].split()[2:5] == ["950/1,000", "–", "0"]
    assert "█" not in lines[3]
    assert said(live.requests(state(), 76)).strip() == "nothing runs"


def test_a_decision_tells_what_was_restored_and_kept_and_why_and_the_latest_comes_first() -> None:
    failed = ended(3, status=400, error="top_p: too large\x1b[31m" * 9, prefix_cache=None, timings=None)
    lines = words(live.decisions([ended(1), ended(2, restored=0), failed], NOW, 76))
    assert lines[0] == ["ago", "prompt", "restored", "why", "kept", "why", "TTFT"]
    assert lines[1][:4] == ["1", "min", "–", "–"]
    assert "400" in lines[1]
    assert lines[2] == ["1", "min", "1,000", "0.0%", "not", "stored", "990", "continues", "4.0", "s"]
    assert lines[3] == ["1", "min", "1,000", "90.0%", "disk", "990", "continues", "200", "ms"]
    assert words(live.decisions([ended(1)], NOW, 90))[1][-1] == "30.0"
    assert "\x1b" not in said(live.decisions([failed], NOW, 76))


def test_the_longest_reasons_fit_into_a_small_terminal() -> None:
    cache = {
        "restored": 0,
        "miss_reason": "faster_to_compute",
        "boundary": 123456,
        "boundary_reason": "new_system_prompt",
    }
    lines = said(live.decisions([ended(1, prompt_tokens=123456, prefix_cache=cache)], NOW, 76)).splitlines()
    assert "…" not in lines[1]
    assert len(lines[1].rstrip()) <= 76


def test_the_figures_compare_cold_with_restored() -> None:
    short = ended(4, prompt_tokens=0, restored=0, outcome="short", timings={"ttft_ms": 9.0})
    text = said(live.figures(state(), [ended(1), ended(2, restored=0), ended(3), short], 76))
    assert "compute saved 90.0 s today, 2.0 h in all · restored 60.0%" in text
    assert "first token 4.0 s cold, 200 ms restored (20×)" in text
    assert "3.0 of 4.0 MiB" in text
    empty = said(live.figures(state(cache=None, memory=None), [], 76))
    assert "compute saved – today, – in all · restored –" in empty


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (7.52 * 2**30, 9.4 * 2**30, "7.5 of 9.4 GiB"),
        (2**30 - 1, 2**30, "1.0 of 1.0 GiB"),
        (3 << 20, 4 << 30, "3.0 MiB of 4.0 GiB"),
        (0, 1 << 40, "0.0 of 1.0 TiB"),
        (100, 900, "100 of 900 B"),
        (0, 0, "0 of 0 B"),
    ],
)
def test_two_sizes_have_one_unit_unless_one_is_much_smaller(part: float, whole: float, text: str) -> None:
    assert format_part(part, whole) == text


def test_the_hottest_prefixes_come_first_with_the_end_of_a_prompt() -> None:
    previews = {one["id"]: one["preview"] for one in saved()["entries"]}
    lines = words(live.hottest(saved()["trees"], previews, NOW, 60), 60)
    assert [line[0] for line in lines[1:]] == ["9", "7", "5", "1"]
    assert lines[2][3:] == ["15", "min", "into", "German"]


def test_a_problem_says_what_to_do() -> None:
    problem = {"level": "error", "what": "nothing is saved", "todo": "make room", "count": 2}
    text = said(live.problems(state(problems=[problem])))
    assert "error  nothing is saved (2 times)" in text
    assert "→ make room" in text


def test_the_header_says_who_is_watched_and_how_it_is() -> None:
    def line(now: dict[str, Any] | None, trouble: str | None = None) -> str:
        return live.header(now, "http://x", trouble).plain

    assert line(state()) == "diskprefix tiny-chat · auto:30 · ok · http://x"
    loading = state(status="loading", message="reading weights", model=None)
    assert line(loading) == "diskprefix … · auto:30 · reading weights · http://x"
    assert line(None) == "diskprefix no daemon: the store alone · http://x"
    assert line(state(), "no daemon answers") == "diskprefix no daemon answers"


def test_each_model_of_several_has_a_line_with_its_state_and_there_are_sums() -> None:
    place = {"model": "ash", "phase": "ready", "needed_bytes": 1 << 30, "num_active": 2, "is_pinned": True}
    other = place | {"model": "birch", "phase": "loading", "num_active": 1, "is_pinned": False}
    lines = words(live.figures(state(models=[place, other]), [], 76))[-3:]
    assert lines == [
        ["ash", "ready", "·", "pinned", "1.0", "GiB", "2"],
        ["birch", "loading", "1.0", "GiB", "1"],
        ["all", "2", "2.0", "GiB", "3"],
    ]
