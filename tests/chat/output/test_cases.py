"""Replies that other servers know how to read, over our parsers: whole, and cut at every character."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.chat.output.cases import CASES, Case
from tests.chat.output.replies import Reply, format_named, read, tool, tool_of

READ = [case for case in CASES if not case.miss]
MISSED = [case for case in CASES if case.miss]


def reply_of(case: Case, pieces: Iterable[str]) -> Reply:
    tools = [tool_of(name, arguments) for name, arguments in case.calls]
    tools += [tool(name) for name in (*case.tools, "another_tool")]
    return read(format_named(case.family), pieces, tools, case.opened)


def results(case: Case, reply: Reply) -> tuple[Any, ...]:
    calls = [(name, _loaded(arguments)) for name, arguments in reply.calls]
    if case.arguments is not None:
        assert [arguments for _, arguments in reply.calls] == [case.arguments]
        calls = case.calls
    return calls, reply.content.strip(), reply.reasoning.strip()


def _loaded(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return f"no JSON: {arguments}"


def expected(case: Case) -> tuple[Any, ...]:
    return case.calls, case.content, case.reasoning


@pytest.mark.parametrize("case", READ, ids=lambda case: f"{case.family}: {case.text[:60]!r}")
def test_a_reply_is_read_as_the_other_server_reads_it(case: Case) -> None:
    assert results(case, reply_of(case, [case.text])) == expected(case)


@pytest.mark.parametrize("case", READ, ids=lambda case: f"{case.family}: {case.text[:60]!r}")
def test_where_a_reply_is_cut_makes_no_difference(case: Case) -> None:
    whole = reply_of(case, [case.text])
    assert reply_of(case, case.text) == whole
    for at in range(len(case.text)):
        assert reply_of(case, [case.text[:at], case.text[at:]]) == whole, case.text[:at]


@pytest.mark.parametrize("case", MISSED, ids=lambda case: case.miss)
def test_what_is_listed_as_missed_is_missed(case: Case) -> None:
    assert results(case, reply_of(case, [case.text])) != expected(case)
