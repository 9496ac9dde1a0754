"""The report of `tools/bench hostile`: figures, verdicts and tables."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from tools.faults.hostile.bad_clients import CLOSED, CUT_OFF, HUNG_UP
from tools.faults.hostile.crowd import Health
from tools.faults.hostile.requests import SLOW_READER
from tools.faults.hostile.watch import NUM_SHOWN_FAILURES
from tools.measuring.report import at_most, new_table, none_of, say, show_machine, verdict, verdict_table

TTFT_GOAL, HEALTH_GOAL_S, STOP_GOAL_S = 1.5, 0.5, 10.0
FLAT_GOAL, FLAT_SLACK_BYTES = 1.05, 64 << 20
MEMORY_GOAL_BYTES = 4 << 30
COLUMNS = ("2xx", "4xx", "429", "503", "5xx", HUNG_UP, CLOSED, CUT_OFF)
_TRACEBACK_LINES = 8


def memory_figures(samples: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the most, and the medians of the first and the last third."""
    own = [sample["own_mb"] for sample in samples]
    third = max(1, len(own) // 3)
    return {
        "max_mb": max(own),
        "resident_max_mb": max(sample["resident_mb"] for sample in samples),
        "first_third_mb": statistics.median(own[:third]),
        "last_third_mb": statistics.median(own[-third:]),
    }


def tracebacks(log: Path) -> list[str]:
    """Returns the ends of the tracebacks in a log: a failure in a stream comes after its 200."""
    _, *rests = log.read_text(encoding="utf-8", errors="replace").split("Traceback (most recent call last):\n")
    ends = []
    for rest in rests:
        # The error is the first line that is not indented.
        lines = rest.splitlines()
        last = next((i for i, line in enumerate(lines) if not line.startswith(" ")), len(lines) - 1)
        ends.append("\n".join(lines[max(0, last - _TRACEBACK_LINES) : last + 1]))
    return ends


def health_figures(health: Sequence[Health], told: float) -> dict[str, Any]:
    """Returns the figures of the answers before SIGTERM."""
    asked = [one for one in health if one.at + one.seconds < told]
    slow = [one for one in asked if one.seconds > HEALTH_GOAL_S]
    return {
        "requests": len(asked),
        "max_s": round(max((one.seconds for one in asked), default=0.0), 3),
        "p99_ms": round(float(np.percentile([one.seconds for one in asked], 99)) * 1e3, 1) if asked else 0.0,
        "slow": len(slow),
        "not_200": sum(one.status != 200 for one in asked),
        "late_max_s": round(max((one.late_s for one in asked), default=0.0), 3),
    }


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the verdicts, a row each."""
    alone, beside, health, memory = report["alone"], report["beside"], report["health"], report["memory"]["beside"]
    stop, restored = report["stop"], report["restored"]
    # Without a first token there is nothing to compare.
    known = alone["ttft_p99_ms"] and beside["ttft_p99_ms"]
    ratio = beside["ttft_p99_ms"] / alone["ttft_p99_ms"] if known else float("inf")
    failed = sum(beside["failures"].values()) + sum(alone["failures"].values())
    cut_off = report["kinds"].get(SLOW_READER, {"ends": {}})["ends"].get(CUT_OFF, 0)
    flat_mb = memory["first_third_mb"] * FLAT_GOAL + FLAT_SLACK_BYTES / 1e6
    return [
        at_most("p99 of the first token, beside / alone", ratio, TTFT_GOAL),
        none_of("good requests that failed", failed),
        none_of("answers with 500", report["failed_answers"]),
        none_of("tracebacks in the log", len(report["tracebacks"])),
        at_most("slowest /health, s", health["max_s"], HEALTH_GOAL_S),
        none_of("answers of /health without 200", health["not_200"]),
        at_most("most memory, MB", memory["max_mb"], MEMORY_GOAL_BYTES / 1e6),
        at_most("memory in the last third, median MB", memory["last_third_mb"], flat_mb),
        none_of("streams of slow readers that were cut off", cut_off),
        at_most("from SIGTERM to the end, s", stop["seconds"], STOP_GOAL_S),
        verdict("exit code", str(stop["exit_code"]), "0", stop["exit_code"] == 0),
        verdict("saved prompts", f"{restored['prompts']}", "≥ 1", restored["prompts"] > 0),
        none_of("saved prompts that are not restored", len(restored["lost"])),
    ]


def columns_of(ends: dict[str, int]) -> dict[str, int]:
    """Returns the ends of a kind by the columns of the table."""
    columns = dict.fromkeys(COLUMNS, 0)
    for end, number in ends.items():
        columns[end if end in columns else f"{end[0]}xx"] += number
    return columns


def show(report: dict[str, Any], console: Console) -> None:
    show_machine(report["machine"], console)
    table = new_table(
        "First token of the good clients",
        left=("",),
        right=("requests", "median ms", "p99 ms", "most ms", "failed", "busy processors"),
    )
    for name in ("alone", "beside"):
        seen = report[name]
        times = (seen["ttft_p50_ms"], seen["ttft_p99_ms"], seen["ttft_max_ms"])
        failed = sum(seen["failures"].values())
        row = (seen["requests"], *times, failed, seen["busy_processors"])
        table.add_row(name, *map(str, row))
    console.print(table)
    say(console, f"What became of the bad ones in {report['minutes']:g} minutes")
    table = new_table("", left=("",), right=("times", *(name.replace(" ", "\n") for name in COLUMNS), "most\ns"))
    for name, kind in report["kinds"].items():
        columns = columns_of(kind["ends"])
        numbers = [str(number or "") for number in columns.values()]
        table.add_row(name, str(sum(columns.values())), *numbers, f"{kind['slowest_s']:.1f}")
    console.print(table)
    for failed in report["first_failed_answers"]:
        say(console, f"{failed['kind']}: {failed['answer'].splitlines()[0]} … {failed['answer'][-300:]}")
    for failure, number in (report["alone"]["failures"] | report["beside"]["failures"]).items():
        say(console, f"a good client, {number} times: {failure}")
    for lost in report["restored"]["lost"]:
        say(console, f"not restored: {json.dumps(lost)}")
    for trace in report["tracebacks"][:NUM_SHOWN_FAILURES]:
        say(console, f"a traceback:\n{trace}")
    for name, memory in report["memory"].items():
        figures_of = ", ".join(f"{key} {value:.0f}" for key, value in memory.items())
        say(console, f"memory {name}: {figures_of}")
    health = report["health"]
    say(
        console,
        f"/health: {health['requests']} requests, p99 {health['p99_ms']} ms, {health['slow']} above the goal; "
        f"its process was late by at most {health['late_max_s']:.2f} s",
    )
    console.print(verdict_table(f"Verdicts ({report['reloads']} reloads)", report["verdicts"]))
