"""A reply is remembered while its events are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from diskprefix.api.reply import CallBegin, DeltaEvent
from diskprefix.chat.messages import Message, TextPart
from diskprefix.chat.output.format import ContentDelta, OutputDelta, ReasoningDelta, ToolCallBegin, ToolCallDelta
from diskprefix.chat.replay import ConversationHash, Origin, ReplyMemory, SampledTurn, Turn
from diskprefix.engine.request import Event, FinishEvent, TextEvent
from diskprefix.server.remembering import RememberingReader
from tests.chat.turns import Turns

END = 9
PARTS: dict[str, list[OutputDelta]] = {
    "think": [ReasoningDelta("Hm")],
    "say": [ContentDelta("So ")],
    "read": [ToolCallBegin(0, "read"), ToolCallDelta(0, '{"a": '), ToolCallDelta(0, "1}")],
    "write": [ToolCallBegin(1, "write"), ToolCallDelta(1, "{}")],
}


class Prepared:
    """A parser that makes of each text what a test has prepared for it."""

    def feed(self, text: str) -> list[OutputDelta]:
        return PARTS.get(text, [])

    def finish(self) -> list[OutputDelta]:
        return []


def asked() -> ConversationHash:
    conversation = ConversationHash()
    conversation.add_message(Message(role="user", content=(TextPart("Go.", ""),), path=""))
    return conversation


def read(events: Sequence[Event], *, many_calls: bool = True) -> tuple[list[SampledTurn], list[str], Turns]:
    """Returns what is remembered, the ids of the calls that the client is told, and the store."""
    turns = Turns()
    memory = ReplyMemory(turns, Origin.of(asked(), "Go."), frozenset({END}))
    reader = RememberingReader(Prepared, "call_", memory, many_calls=many_calls)
    told = [found for event in events for found in reader.read(event) if isinstance(found, DeltaEvent)]
    ids = [delta.id for event in told for delta in event.deltas if isinstance(delta, CallBegin)]
    return [SampledTurn.decode(record) for record in turns.values()], ids, turns


def reply(*texts: str, choice: int = 0, reason: Any = "stop", stop: str | None = None) -> list[Event]:
    """Each text is a token, and the reply ends with `END`."""
    sampled = [TextEvent(choice, text, (number,)) for number, text in enumerate(texts, 1)]
    return [*sampled, TextEvent(choice, "", (END,)), FinishEvent(choice, reason, stop)]


def test_a_reply_is_remembered_with_its_tokens_under_the_ids_that_the_client_gets() -> None:
    [sampled, again], ids, turns = read(reply("think", "say", "read", "write"))
    assert sampled.turn == Turn("So ", "Hm", (("read", '{"a": 1}'), ("write", "{}")))
    assert sampled.token_ids == (1, 2, 3, 4)
    assert again == sampled
    conversation = asked()
    conversation.add_reply(sampled.turn)
    assert list(turns) == conversation.ids(ids)


def test_each_choice_is_remembered_apart() -> None:
    one, other = reply("say", choice=0), reply("think", "say", "read", choice=1)
    mixed = [one[0], *other[:2], *one[1:], *other[2:]]
    remembered, _, _ = read(mixed)
    assert {sampled.token_ids for sampled in remembered} == {(1,), (1, 2, 3)}


def test_a_reply_is_remembered_before_its_end_is_told() -> None:
    remembered, _, _ = read(reply("say")[:-1])
    assert remembered == []
    assert len(read(reply("say", reason="length"))[0]) == 1


@pytest.mark.parametrize(
    ("events", "many_calls"),
    [(reply("say", "read", "write"), False), (reply("say", stop="!"), True)],
    ids=["a call that is not passed on", "a stop string"],
)
def test_a_reply_whose_tokens_say_more_than_the_client_is_told_is_not_remembered(
    events: list[Event], many_calls: bool
) -> None:
    assert read(events, many_calls=many_calls)[0] == []
    assert read(reply("say", "read"), many_calls=many_calls)[0] != []
