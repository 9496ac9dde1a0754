"""`tools/bench calls`: what counts as executed with less than was written."""

from __future__ import annotations

import random
from typing import Any

import pytest
from click.testing import CliRunner

from diskprefix.daemon.chat.output.families import FAMILIES
from tools.__main__ import main
from tools.benchmarks import calls
from tools.benchmarks.call_cases import FIRST, LAST, NAME, Case, arguments_with
from tools.benchmarks.call_texts import call_text
from tools.benchmarks.calls import Read, damaged, fault_of
from tools.benchmarks.calls import run as calls_run

HERMES = next(family for family in FAMILIES if family.name == "hermes")
CALL = (NAME, arguments_with("x"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (call_text(HERMES, [CALL]), ""),
        (call_text(HERMES, [(NAME, {"first": FIRST})]), "less than was written"),
        ("write_file", "shown"),
    ],
)
def test_a_call_is_read_shown_or_has_less(text: str, fault: str) -> None:
    assert fault_of(Case(HERMES, "lines", "as written", text, [CALL]), random.Random(0)) == fault


def test_a_damaged_text_has_pieces_less_or_twice() -> None:
    texts = {damaged(call_text(HERMES, [CALL]), random.Random(seed)) for seed in range(20)}
    assert len(texts) > 10


@pytest.mark.parametrize(("executed", "code"), [(f'{{"first": "{FIRST}{LAST}"}}', 0), ("", 1)])
def test_it_fails_if_a_damaged_call_is_executed_without_its_words(
    monkeypatch: pytest.MonkeyPatch, executed: str, code: int
) -> None:
    found = Read([CALL], executed * 9, "")
    monkeypatch.setattr(calls, "read", lambda *_, **__: found)
    monkeypatch.setattr(calls, "VALUES", {"lines": "x"})
    monkeypatch.setattr(calls, "FAMILIES", [HERMES])
    case = Case(HERMES, "lines", "as written", call_text(HERMES, [CALL]), [CALL])
    monkeypatch.setattr(calls, "cases_of", lambda *_: [case])
    monkeypatch.setattr(calls, "run", lambda seeds, families: calls_run(seeds, families, ["lines"]))
    result: Any = CliRunner().invoke(main, ["calls"])
    assert result.exit_code == code, result.output
