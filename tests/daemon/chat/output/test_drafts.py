"""Calls in a thought: calls if nothing but the end of the thought follows them, else drafts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from diskprefix.daemon.chat.output.families import FAMILIES, Family
from tests.daemon.chat.output.replies import Reply, format_named, joined, read, tool
from tools.benchmarks.call_texts import call_text

TOOLS = [tool("get_weather", city={"type": "string"}), tool("look", place={"type": "string"})]
CALL = ("get_weather", {"city": "Oslo"})
OTHER = ("look", {"place": "Rome"})
TAGGED = [
    family
    for family in FAMILIES
    if not family.channels and any(tag in family.before + family.whole_call for tag in family.begins)
]
"""The families whose calls begin with a tag: other texts of a thought are never calls."""


def drafted(family: Family, *calls: tuple[str, Any]) -> str:
    """Calls at the beginning of a line, without what the family writes between a thought and its calls."""
    return "\n" + call_text(replace(family, lead=""), calls)


def of(family: Family, text: str, *, opened: bool) -> Iterator[Reply]:
    """The reply, whole, in single characters, and cut in two at each character."""
    thought = text if opened else f"<think>{text}"
    for pieces in ([thought], thought, *([thought[:at], thought[at:]] for at in range(1, len(thought)))):
        yield read(format_named(family.name), pieces, TOOLS, "<think>\n" if opened else "")


@pytest.mark.cases(10)
@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("more", ["", "\nBut wait."])
def test_a_draft_is_a_part_of_its_thought_if_more_follows(family: Family, opened: bool, more: str) -> None:
    thought = f"I could write{drafted(family, CALL)}{more}"
    for reply in of(family, f"{thought}\n</think>\n\nDone", opened=opened):
        assert (reply.reasoning, reply.content, reply.calls) == (thought.rstrip(), "Done", [])
    for reply in of(family, f"{thought}\n</think>\n\n{call_text(family, [OTHER])}", opened=opened):
        assert (reply.reasoning, reply.content.strip(), reply.parsed_calls) == (thought.rstrip(), "", [OTHER])


@pytest.mark.cases(10)
@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("end", ["", "\n", "\n</think>", "</think>\n\n"])
def test_calls_that_end_a_thought_and_the_reply_are_calls(family: Family, opened: bool, end: str) -> None:
    calls = drafted(family, CALL) + drafted(family, OTHER) if family.each else drafted(family, CALL, OTHER)
    for reply in of(family, f"I look.{calls}{end}", opened=opened):
        assert (reply.reasoning, reply.content, reply.parsed_calls) == ("I look.", "", [CALL, OTHER])


@pytest.mark.cases(10)
@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
@pytest.mark.parametrize("end", ["", "\n</think>\n"])
def test_a_call_that_the_thought_goes_on_after_is_text(family: Family, end: str) -> None:
    thought = f"Perhaps{drafted(family, CALL)} No, never do that."
    for reply in of(family, thought + end, opened=True):
        assert (reply.reasoning, reply.content, reply.calls) == (thought, "", [])


@pytest.mark.cases(10)
@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
def test_of_several_calls_in_a_thought_those_that_end_it_are_calls(family: Family) -> None:
    thought = f"Perhaps{drafted(family, CALL)}{drafted(family, CALL)} No. Rather"
    for reply in of(family, f"{thought}{drafted(family, OTHER)}\n</think>\n", opened=True):
        assert (reply.reasoning, reply.content, reply.parsed_calls) == (thought, "", [OTHER])


@pytest.mark.cases(10)
@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
@pytest.mark.parametrize("after", ["Done", "call"])
def test_a_draft_that_lacks_its_end_ends_with_its_thought(family: Family, after: str) -> None:
    draft = drafted(family, CALL)
    answer, calls = (call_text(family, [OTHER]), [OTHER]) if after == "call" else (after, [])
    for at in range(1, len(draft)):
        thought = f"I could write{draft[:at]}"
        rest = f"nk>\n\n{answer}"
        for pieces in ([f"{thought}\n</thi{rest}"], [f"{thought}\n</thi", rest], [f"{thought}\n", "</thi", rest]):
            reply = read(format_named(family.name), pieces, TOOLS, "<think>\n")
            assert reply.reasoning == thought.rstrip()
            assert (reply.content.strip(), reply.parsed_calls) == ("" if calls else "Done", calls)


@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
def test_a_thought_that_was_cut_off_has_no_calls(family: Family) -> None:
    thought = f"Perhaps{drafted(family, CALL)}"
    for at in range(1, len(thought) + 1):
        parser = format_named(family.name).parser(TOOLS, "<think>\n")
        reply = joined([*parser.feed(thought[:at]), *parser.finish(is_whole=False)])
        assert (reply.reasoning, reply.content, reply.calls) == (thought[:at], "", [])


@pytest.mark.parametrize("family", TAGGED, ids=lambda family: family.name)
@pytest.mark.parametrize("after", ["Done", "call", ""])
def test_drafts_of_each_family_are_read_alike_in_pieces(family: Family, after: str) -> None:
    """Whole and in single characters only, so that all families are always read."""
    after = call_text(family, [OTHER]) if after == "call" else after
    text = f"I could write{drafted(family, CALL)}\nBut wait.\n</think>\n\n{after}"
    whole = read(format_named(family.name), [text], TOOLS, "<think>\n")
    assert read(format_named(family.name), text, TOOLS, "<think>\n") == whole
    assert whole.parsed_calls == ([] if after in ("", "Done") else [OTHER])
