"""What `tools/bench load` takes for a failure."""

from __future__ import annotations

from typing import Any

import pytest

from tools.benchmarks.load import MIX, NUM_GOOD, Phase, figures, verdicts


def report(**changes: Any) -> dict[str, Any]:
    seen = {"requests": 100, "ttft_p50_ms": 8.0, "ttft_p99_ms": 10.0, "failures": {}}
    sound: dict[str, Any] = {
        "alone": seen,
        "beside": seen | {"ttft_p99_ms": 14.0},
        "ends": {"slow writer of a body: answered 408": 8},
        "memory_bytes": [400_000_000, 410_000_000],
        "health": "ok",
    }
    return sound | changes


def test_64_clients_are_sent() -> None:
    assert NUM_GOOD + sum(MIX.values()) == 64


def test_a_run_in_which_good_clients_notice_nothing_passes() -> None:
    assert all(row["holds"] for row in verdicts(report()))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"beside": report()["alone"] | {"ttft_p99_ms": 16.0}}, "p99 of the first token, beside / alone"),
        ({"alone": report()["alone"] | {"failures": {"503": 1}}}, "good requests that failed"),
        ({"ends": {"slow reader: cut off": 1}}, "streams that were cut off"),
        ({"ends": {"slow reader: broken: ConnectionResetError": 1}}, "streams that were cut off"),
        ({"memory_bytes": [400_000_000, 500_000_000]}, "memory at the end, MB"),
        ({"health": "degraded"}, "the daemon in the end"),
    ],
)
def test_each_thing_that_a_client_would_notice_fails_its_verdict(changes: dict[str, Any], what: str) -> None:
    assert [row["what"] for row in verdicts(report(**changes)) if not row["holds"]] == [what]


def test_a_phase_in_which_nothing_was_answered_has_figures_and_fails() -> None:
    nothing = figures(Phase())
    failed = [row["what"] for row in verdicts(report(alone=nothing)) if not row["holds"]]
    assert failed == ["p99 of the first token, beside / alone"]
