"""Two texts that part get the cause in words that a person would give."""

from __future__ import annotations

import pytest

from diskprefix.extras.watch.browse.causes import cause_between, line_at

TOOL_A = '{"type": "function", "function": {"name": "read", "parameters": {"path": "string"}}}'
TOOL_B = '{"type": "function", "function": {"name": "write", "parameters": {"path": "string"}}}'
REST = "\nBe brief.\nNever guess.\n"
BILLING = "x-anthropic-billing-header: cc_version=2.1.39; cch={};"
CASES = {
    "value": ("Today is Saturday, November 21, 2026.", "Today is Sunday, November 22, 2026."),
    "clock": ("The current time is 05:04.", "The current time is 05:05."),
    "billing-header": (BILLING.format("00c6e"), BILLING.format("ff12a")),
    "total-tokens": (
        "<total_tokens>14999436 tokens left</total_tokens>",
        "<total_tokens>14999012 tokens left</total_tokens>",
    ),
    "hoisted-nudges": ("Be short.\n\nPlan mode is active. The user does not want you to execute yet.", "Be short."),
    "tool-order": (f"{TOOL_A}\n{TOOL_B}", f"{TOOL_B}\n{TOOL_A}"),
    "schema-keys": ('{"name": "read", "strict": true}', '{"strict": true, "name": "read"}'),
    "order": ("first\nsecond", "second\nfirst"),
    "value of an id": ("session 3f2a90bc-1d22", "session 99aabbcc-ff00"),
    "value of a number": ("There are 12 files open.", "There are 134 files open."),
    "inserted": ("A note.\nYou are a helper.", "You are a helper."),
    "removed": ("You are a helper.", "A note.\nYou are a helper."),
    "text": ("You are a pirate.", "You were a sailor once."),
}


@pytest.mark.parametrize("kind", list(CASES))
def test_the_cause_is_named(kind: str) -> None:
    new, old = CASES[kind]
    cause = cause_between(f"Head\n{new}{REST}", f"Head\n{old}{REST}")
    assert cause.kind == kind.partition(" ")[0]
    assert cause.text
    assert cause.advice or kind == "text"


def test_the_line_around_a_place_is_found() -> None:
    assert [line_at("one\ntwo\nthree", index) for index in (0, 4, 12, 13)] == ["one", "two", "three", "three"]


@pytest.mark.parametrize("line", ["Write {}", "{} or so"])
def test_a_normaliser_is_named_only_where_it_would_change_the_line(line: str) -> None:
    counts = (line.format(f"<total_tokens>{number} tokens left</total_tokens>") for number in (17, 18))
    assert cause_between(*(f"Head\n{count}{REST}" for count in counts)).kind == "value"
    assert cause_between(f"Head\n<system-reminder> tags carry hints.{REST}", f"Head{REST}").kind == "inserted"
