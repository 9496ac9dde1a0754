"""From the engine's events to the parts of a reply, as a stream and as a whole, and what of it is remembered."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from diskprefix.daemon.api.dialect import Head, json_text
from diskprefix.daemon.api.openai import CompletionWriter
from diskprefix.daemon.api.reply import (
    CallBegin,
    DeltaEvent,
    EndEvent,
    ReplyEvent,
    ReplyReader,
    WholeChoice,
    logprob_reply,
    whole_reply,
)
from diskprefix.daemon.chat.messages import Message, TextPart
from diskprefix.daemon.chat.output.format import ContentDelta, OutputDelta, ReasoningDelta, ToolCallBegin, ToolCallDelta
from diskprefix.daemon.chat.replay import ConversationHash, Origin, ReplyMemory, SampledTurn, Turn
from diskprefix.daemon.engine.request import Event, FinishEvent, TextEvent, TokenLogprob
from tests.daemon.chat.turns import Turns
from tests.daemon.server.scripted import done

TOKEN = TokenLogprob(5, b"x", -1.0)


class Prepared:
    """A parser that makes of each text what a test has prepared for it."""

    has_draft = False

    def __init__(self, deltas: dict[str, list[OutputDelta]], rest: Iterable[OutputDelta] = ()) -> None:
        self._deltas = deltas
        self._rest = list(rest)

    def feed(self, text: str) -> list[OutputDelta]:
        return self._deltas.get(text, [ContentDelta(text)] if text else [])

    def finish(self, *, is_whole: bool = True) -> list[OutputDelta]:  # noqa: ARG002
        return self._rest


CALLS: dict[str, list[OutputDelta]] = {
    "T": [ReasoningDelta("hm")],
    "A": [ContentDelta("so"), ToolCallBegin(0, "read")],
    "B": [ToolCallDelta(0, '{"a"')],
    "C": [ToolCallDelta(0, ": 1}"), ToolCallBegin(1, "write"), ToolCallDelta(1, "{}")],
    "half": [],
    "read": [ToolCallBegin(0, "read"), ToolCallDelta(0, '{"a": '), ToolCallDelta(0, "1}")],
    "write": [ToolCallBegin(1, "write"), ToolCallDelta(1, "{}")],
}


def read(
    texts: Iterable[str], reason: Any = "stop", rest: Iterable[OutputDelta] = (), **options: Any
) -> list[ReplyEvent]:
    reader = ReplyReader(lambda: Prepared(CALLS, rest), "call_", **options)
    events: list[Event] = [*(TextEvent(0, text, (1,)) for text in texts), FinishEvent(0, reason), done()]
    return [read for event in events for read in reader.read(event)]


def collected(events: Iterable[ReplyEvent]) -> list[WholeChoice]:
    return whole_reply([*events]).choices


@pytest.mark.parametrize(
    ("texts", "reason", "said"),
    [
        (["so"], "stop", "stop"),
        (["so"], "length", "length"),
        (["A"], "stop", "tool_calls"),
        (["A"], "length", "length"),
    ],
)
def test_only_a_complete_choice_with_calls_ends_with_tool_calls(texts: list[str], reason: Any, said: str) -> None:
    assert read(texts, reason)[-2] == EndEvent(0, said, token_ids=[1])  # type: ignore[arg-type]


def test_held_back_tokens_count_as_reasoning() -> None:
    """Three tokens before the first other part: two of the thought, and one whose text was held back."""
    [choice] = collected(read(["T", "half", "T", "A", "T", "so"]))
    assert choice.reasoning_tokens == 4


def test_held_back_text_is_sent_before_the_end() -> None:
    events = read(["so"], rest=[ContentDelta("<tool_")])
    assert events[-3:-1] == [DeltaEvent(0, (ContentDelta("<tool_"),)), EndEvent(0, "stop", token_ids=[1])]


def test_a_choice_begins_even_if_its_first_text_is_held_back() -> None:
    first, *rest = read(["half", "half", "so"])
    assert first == DeltaEvent(0, ())
    assert len(rest) == 3, "nothing for the second one"


def test_log_probabilities_are_told_with_the_tokens_not_with_the_text() -> None:
    reader = ReplyReader(lambda: Prepared(CALLS), "call_")
    reader.read(TextEvent(0, "so", (1,)))
    assert reader.read(TextEvent(0, "half", (5,), (TOKEN,))) == [DeltaEvent(0, (), (TOKEN,))]


def test_choices_are_parsed_apart_and_listed_in_order() -> None:
    reader = ReplyReader(lambda: Prepared(CALLS), "call_")
    events: list[Event] = [TextEvent(1, "A", (1,)), TextEvent(0, "so", (1,)), TextEvent(1, "B", (1,))]
    events += [FinishEvent(1, "stop"), FinishEvent(0, "length"), done()]
    choices = collected(read for event in events for read in reader.read(event))
    assert [(choice.choice, choice.content, len(choice.calls)) for choice in choices] == [(0, "so", 0), (1, "so", 1)]
    assert [choice.reason for choice in choices] == ["length", "tool_calls"]


@pytest.mark.parametrize("value", [{"a": [1, 2.5, None, True, "é\n"]}, {"a": 10**400}, {"a": -(2**64)}, {}])
def test_json_text_holds_what_it_was_made_from(value: Any) -> None:
    assert json.loads(json_text(value)) == value


END = 9


def asked() -> ConversationHash:
    conversation = ConversationHash()
    conversation.add_message(Message(role="user", content=(TextPart("Go.", ""),), path=""))
    return conversation


def remembered(events: Sequence[Event], *, many_calls: bool = True) -> tuple[list[SampledTurn], list[str], Turns]:
    """Returns what is remembered, the ids of the calls that the client is told, and the store."""
    turns = Turns()
    memory = ReplyMemory(turns, Origin.of(asked(), "Go."), frozenset({END}))
    reader = ReplyReader(lambda: Prepared(CALLS), "call_", memory, many_calls=many_calls)
    told = [read for event in events for read in reader.read(event) if isinstance(read, DeltaEvent)]
    ids = [delta.id for event in told for delta in event.deltas if isinstance(delta, CallBegin)]
    return [SampledTurn.decode(record) for record in turns.values()], ids, turns


def reply(*texts: str, choice: int = 0, reason: Any = "stop", stop: str | None = None) -> list[Event]:
    """Each text is a token, and the reply ends with `END`."""
    sampled = [TextEvent(choice, text, (number,)) for number, text in enumerate(texts, 1)]
    return [*sampled, TextEvent(choice, "", (END,)), FinishEvent(choice, reason, stop)]


def test_a_reply_is_recorded_with_its_tokens_and_call_ids() -> None:
    [sampled, again], ids, turns = remembered(reply("T", "so", "read", "write"))
    assert sampled.turn == Turn("so", "hm", (("read", '{"a": 1}'), ("write", "{}")))
    assert sampled.token_ids == (1, 2, 3, 4)
    assert again == sampled
    conversation = asked()
    conversation.add_reply(sampled.turn)
    assert list(turns) == conversation.ids(ids)


def test_each_choice_is_remembered_apart() -> None:
    first, second = reply("so", choice=0), reply("T", "so", "read", choice=1)
    mixed = [first[0], *second[:2], *first[1:], *second[2:]]
    assert {sampled.token_ids for sampled in remembered(mixed)[0]} == {(1,), (1, 2, 3)}


def test_a_reply_is_remembered_before_its_end_is_told() -> None:
    assert remembered(reply("so")[:-1])[0] == []
    assert len(remembered(reply("so", reason="length"))[0]) == 1


@pytest.mark.parametrize(
    ("events", "many_calls"),
    [(reply("so", "read", "write"), False), (reply("so", stop="!"), True)],
    ids=["a call that is not passed on", "a stop string"],
)
def test_a_reply_with_unsent_text_is_not_recorded(events: list[Event], many_calls: bool) -> None:
    assert remembered(events, many_calls=many_calls)[0] == []
    assert remembered(reply("so", "read"), many_calls=many_calls)[0] != []


def test_the_tokens_of_a_character_have_its_offset_and_names_of_their_own() -> None:
    """They had the same name, and each counted as a character."""
    parts = [TokenLogprob(at, "aé😀b".encode()[at : at + 1], -1.0) for at in range(8)]
    head = Head(id="", created=0, model="", fingerprint="", prompt_tokens=1, request_id="", clamped_to=None)
    writer = CompletionWriter(head, include_usage=False, with_logprobs=True)
    wanted = [0, 1, 1, 2, 2, 2, 2, 3]
    streamed = [writer.chunk_choices(DeltaEvent(0, (), (part,)))[0]["logprobs"] for part in parts]
    assert [logprobs["text_offset"] for logprobs in streamed] == [[at] for at in wanted]
    whole = writer.whole_choice(WholeChoice(0, "stop", content="aé😀b", tokens=tuple(parts)))["logprobs"]
    assert whole["text_offset"] == wanted
    assert whole["tokens"][:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert [*whole["top_logprobs"][2]] == ["bytes:\\xa9"]
    assert logprob_reply(parts[3])["bytes"] == [0xF0]
