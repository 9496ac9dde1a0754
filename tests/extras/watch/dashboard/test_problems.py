"""What an owner is told to look at."""

from __future__ import annotations

from typing import Any

import pytest

from diskprefix.extras.remote.counts import Counts
from diskprefix.extras.watch.dashboard.problems import Problem, problems
from diskprefix.server.recent import EndedRequest
from tests.server.scripted import STATS

WELL = dict(STATS) | {"quarantined": 0, "errors": 0, "dropped": 0, "unaffordable": 0, "evicted_blocks": 0}

REMOTE = Counts().as_dict() | {"url": "s3://b", "state": "ok"}


def failed(number: int, status: int = 400, error: str | None = "top_p: too large", **changes: Any) -> EndedRequest:
    figures: dict[str, Any] = {
        "ended_at": float(number),
        "elapsed_s": 0.1,
        "id": "r",
        "route": "/v1/messages",
    } | changes
    return EndedRequest(number=number, caller=None, status=status, error=error, **figures)


def test_a_daemon_that_is_well_has_no_problems() -> None:
    assert problems(WELL, [], []) == []
    assert problems(WELL | {"remote": REMOTE}, [], []) == []
    assert problems(None, [], []) == []


@pytest.mark.parametrize(
    ("change", "level", "what", "todo"),
    [
        ({"state": "degraded", "error": "the disk is full"}, "error", "the disk is full", "tries again"),
        ({"state": "unsupported"}, "warning", "without the cache", "list --architectures"),
        ({"quarantined": 3}, "error", "damaged records", "diskprefix verify"),
        ({"errors": 3}, "warning", "became misses", "log"),
        ({"dropped": 3}, "warning", "not saved whole", "--kv-cache-budget"),
        ({"dropped": 3, "full_disk": "the disk is full"}, "warning", "not saved whole", "the disk is full"),
        ({"unaffordable": 3}, "hint", "left out", "--kv-cache-write-budget"),
        ({"gate": {"state": "closed"}}, "hint", "computing is faster", "--kv-cache-gate off"),
        ({"remote": REMOTE | {"state": "failing"}}, "warning", "s3://b does not answer", "access keys"),
        ({"remote": REMOTE | {"refused": {"mac": 2, "foreign": 0}}}, "warning", "refused: mac", "plants state"),
        ({"remote": REMOTE | {"dropped": 3}}, "hint", "could not be uploaded to s3://b", "--remote-write off"),
        ({"evicted_blocks": 3, "used_bytes": 95, "budget_bytes": 100}, "hint", "full", "--kv-cache-budget"),
    ],
)
def test_each_trouble_of_the_cache_is_told_with_what_to_do(
    change: dict[str, Any], level: str, what: str, todo: str
) -> None:
    [problem] = problems(WELL | change, [], [])
    assert problem.level == level
    assert what in problem.what
    assert todo in problem.todo


def test_evictions_are_no_problem_while_there_is_room() -> None:
    assert problems(WELL | {"evicted_blocks": 3, "used_bytes": 50, "budget_bytes": 100}, [], []) == []


def test_lines_that_break_prefixes_are_told_with_the_normaliser_that_helps() -> None:
    small, known, unknown = (
        {"line": line, "normalisers": names, "requests": 2, "tokens": tokens}
        for line, names, tokens in (("a", [], 10), ("cch=a0a", ["billing-header"], 5000), ("Today is 0000", [], 3000))
    )
    found = problems(WELL, [small, unknown, known], [])
    assert [problem.todo for problem in found] == [
        "start with --normalise billing-header=on",
        "move the line to the end of the prompt",
    ]
    assert "5,000 tokens" in found[0].what
    [said] = problems(WELL, [known | {"text": "cch=b7e"}], [])
    assert said.what.endswith(": cch=b7e"), "where texts are shown"


def test_requests_that_failed_alike_are_one_problem_and_the_worst_come_first() -> None:
    ended = [failed(1), failed(2), failed(3, 500, None), failed(4, 503, "full"), failed(5, 499, None)]
    found = problems(WELL, [], ended)
    assert [(problem.level, problem.count, problem.last_at) for problem in found] == [
        ("error", 1, 3.0),
        ("warning", 1, 4.0),
        ("warning", 2, 2.0),
    ]
    assert isinstance(found[0], Problem)
    assert "log" in found[0].todo
    assert found[2].what == "/v1/messages answered 400: top_p: too large"
