"""Replies in Anthropic's form: the message, and the events of a stream in the order of the real service.

`anthropic_streams` holds streams of that service. `text.sse`, `tool_use.sse` and `thinking.sse` are the examples of its
documentation, word for word ("Full HTTP stream response" on platform.claude.com/docs/en/build-with-claude/streaming, in
a published copy of that page). `recorded_tool.jsonl` is `anthropic-json-tool.1.chunks.txt`, a recording among the
tests of the package `@ai-sdk/anthropic` 3.0.21 (Apache 2.0), without `cache_creation` and `service_tier` of its usage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from diskprefix.api.anthropic_writer import MessageWriter
from diskprefix.api.dialect import Head, ServerSentEvent
from diskprefix.api.reply import (
    CallBegin,
    DeltaEvent,
    EndEvent,
    EndReason,
    ReplyDelta,
    ReplyEvent,
    whole_reply,
)
from diskprefix.chat.output.format import ContentDelta, ReasoningDelta, ToolCallDelta
from diskprefix.engine.request import DoneEvent, ProgressEvent
from diskprefix.errors import DiskPrefixError
from tests.server.scripted import CHOSEN, done

HEAD = Head(id="msg_1", created=0, model="tiny", fingerprint="fp", prompt_tokens=10, request_id="req_1")
READ = CallBegin(0, "toolu_1", "read")
STREAMS = sorted((Path(__file__).parent / "anthropic_streams").iterdir())
_SDK_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def kept(num_tokens: int, **report: Any) -> DoneEvent:
    return done(selection=replace(CHOSEN, selected=num_tokens, aligned=num_tokens), **report)


def reply(
    *deltas: ReplyDelta, reason: EndReason = "stop", stop: str | None = None, end: DoneEvent | None = None
) -> list[ReplyEvent]:
    return [
        ProgressEvent(10, 0, 0, 0, 0.5),
        *(DeltaEvent(0, (delta,)) for delta in deltas),
        EndEvent(0, reason, stop),
        end or done(),
    ]


def streamed(events: Iterable[ReplyEvent], head: Head = HEAD, **options: Any) -> list[Any]:
    """The objects of the stream's events, each of which the official client's own type accepts."""
    writer = MessageWriter(head, **options)
    sent: Sequence[ServerSentEvent] = [*writer.begin(), *(found for event in events for found in writer.events(event))]
    assert [found.name for found in sent] == [found.data["type"] for found in sent if isinstance(found.data, dict)]
    for found in sent:
        _SDK_EVENT.validate_python(found.data)
    return [found.data for found in sent]


def whole(events: Iterable[ReplyEvent], head: Head = HEAD, **options: Any) -> dict[str, Any]:
    message = MessageWriter(head, **options).whole(whole_reply([*events]))
    Message.model_validate(message)
    return message


def recorded_in(path: Path) -> list[dict[str, Any]]:
    """The events of a stream without pings, which may come anywhere."""
    lines = [line.removeprefix("data: ") for line in path.read_text().splitlines() if not line.startswith("event: ")]
    return [event for event in (json.loads(line) for line in lines if line) if event["type"] != "ping"]


def neutral(events: Iterable[dict[str, Any]]) -> list[ReplyEvent]:
    """Returns a stream of the real service in neutral words."""
    deltas: list[ReplyDelta] = []
    stop_reason = None
    for event in events:
        block, delta = event.get("content_block", {}), event.get("delta", {})
        if block.get("type") == "tool_use":
            deltas.append(CallBegin(0, block["id"], block["name"]))
        elif delta.get("type") == "text_delta":
            deltas.append(ContentDelta(delta["text"]))
        elif delta.get("type") == "thinking_delta":
            deltas.append(ReasoningDelta(delta["thinking"]))
        elif delta.get("type") == "input_json_delta":
            deltas.append(ToolCallDelta(0, delta["partial_json"]))
        stop_reason = delta.get("stop_reason", stop_reason)
    return reply(*deltas, reason="tool_calls" if stop_reason == "tool_use" else "stop")


def without_values(event: dict[str, Any]) -> dict[str, Any]:
    """An event without what differs from request to request, and without what is ours."""
    event = {name: value for name, value in event.items() if name not in ("usage", "prefix_cache", "timings")}
    if "message" in event:
        event["message"] = event["message"] | {"id": "", "model": "", "usage": {}}
    if "signature" in event.get("delta", {}):
        event["delta"] = event["delta"] | {"signature": ""}
    return event


@pytest.mark.parametrize("path", STREAMS, ids=lambda path: path.stem)
def test_a_stream_is_that_of_the_real_service(path: Path) -> None:
    recorded = recorded_in(path)
    ours = streamed(neutral(recorded))
    assert [without_values(event) for event in ours] == [without_values(event) for event in recorded]
    for event, theirs in zip(ours, recorded, strict=True):
        usage, theirs = (found.get("message", found).get("usage", {}) for found in (event, theirs))
        assert theirs.keys() <= usage.keys()


def test_a_message_has_a_block_for_the_thought_the_text_and_each_call() -> None:
    calls = (READ, ToolCallDelta(0, '{"path": "a.py"}'), CallBegin(1, "toolu_2", "list"))
    message = whole(reply(ReasoningDelta("hm"), ContentDelta("so"), *calls, reason="tool_calls"))
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "msg_1"},
        {"type": "text", "text": "so"},
        {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.py"}},
        {"type": "tool_use", "id": "toolu_2", "name": "list", "input": {}},
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


@pytest.mark.parametrize("arguments", ['{"path": "a', "[1]", "null", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"])
def test_arguments_that_are_no_object_are_handed_over_as_text(arguments: str) -> None:
    message = whole(reply(READ, ToolCallDelta(0, arguments), reason="length"))
    assert message["content"][0]["input"] == {"INVALID_JSON": arguments}


def test_a_thought_that_the_client_does_not_want_is_left_out_but_signed() -> None:
    events = reply(ReasoningDelta("hm"), ContentDelta("so"))
    assert whole(events, shows_thoughts=False)["content"][0] == {
        "type": "thinking",
        "thinking": "",
        "signature": "msg_1",
    }
    deltas = [event["delta"] for event in streamed(events, shows_thoughts=False) if "delta" in event]
    assert [delta.get("type") for delta in deltas] == ["signature_delta", "text_delta", None]


@pytest.mark.parametrize(
    ("deltas", "kinds"),
    [
        ([ContentDelta("\n\n")], []),
        ([ReasoningDelta("hm"), ContentDelta("\n"), ContentDelta("\n"), READ], ["thinking", "tool_use"]),
        ([READ, ContentDelta("\n"), CallBegin(1, "toolu_2", "list")], ["tool_use", "tool_use"]),
        ([ContentDelta("\n"), ContentDelta(" so\n"), ContentDelta("\n")], ["text"]),
    ],
)
def test_there_is_no_block_of_blanks(deltas: list[ReplyDelta], kinds: list[str]) -> None:
    events = streamed(reply(*deltas))
    assert [event["content_block"]["type"] for event in events if "content_block" in event] == kinds
    assert [block["type"] for block in whole(reply(*deltas))["content"]] == kinds


@pytest.mark.parametrize("between", [(), (READ,), (ReasoningDelta("hm"),)])
def test_blanks_before_text_and_behind_it_are_part_of_it(between: tuple[ReplyDelta, ...]) -> None:
    said = reply(ContentDelta("\n"), *between, ContentDelta("\n so"), ContentDelta("\n"))
    texts = [event["delta"].get("text", "") for event in streamed(said) if event["type"] == "content_block_delta"]
    assert "".join(texts) == "\n\n so\n"
    assert [block["text"] for block in whole(said)["content"] if block["type"] == "text"] == ["\n\n so\n"]


@pytest.mark.parametrize(
    ("reason", "stop", "clamped_to", "said"),
    [
        ("stop", None, None, "end_turn"),
        ("stop", "END", None, "stop_sequence"),
        ("tool_calls", None, None, "tool_use"),
        ("length", None, None, "max_tokens"),
        ("length", None, 20, "model_context_window_exceeded"),
        ("stop", None, 20, "end_turn"),
    ],
)
def test_why_a_message_ended(reason: EndReason, stop: str | None, clamped_to: int | None, said: str) -> None:
    head, events = replace(HEAD, clamped_to=clamped_to), reply(ContentDelta("so"), reason=reason, stop=stop)
    message, delta = whole(events, head), streamed(events, head)[-2]["delta"]
    assert (message["stop_reason"], message["stop_sequence"]) == (said, stop)
    assert delta == {"stop_reason": said, "stop_sequence": stop}


@pytest.mark.parametrize(
    ("end", "read", "created", "rest"),
    [
        (kept(0), 0, 0, 10),
        (kept(8, saved="queued"), 0, 8, 2),
        (kept(8, cached_tokens=4, saved="queued"), 4, 4, 2),
        (kept(8, cached_tokens=9, saved="queued"), 9, 0, 1),
        (kept(10, cached_tokens=10, saved="stored"), 10, 0, 0),
        (kept(8, cached_tokens=4, saved="dropped"), 4, 0, 6),
    ],
)
def test_usage_adds_up_to_the_prompt(end: DoneEvent, read: int, created: int, rest: int) -> None:
    for found in (whole(reply(end=end)), streamed(reply(end=end))[-2]):
        assert found["usage"] == {
            "input_tokens": rest,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "output_tokens": 2,
            "output_tokens_details": {"thinking_tokens": 0},
        }
        assert found["prefix_cache"]["restored"] == read
        assert found["timings"]["restore_ms"] == 3.14


def test_a_stream_begins_with_the_usage_that_it_ends_with() -> None:
    """Clients add up both; some take a figure of the end only if it is above 0."""
    end = kept(8, cached_tokens=4, saved="queued")
    first, *rest = streamed([ProgressEvent(10, 4, 4, 8, 0.5), ProgressEvent(10, 4, 9, 8, 9.5), *reply(end=end)[1:]])
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert [first["message"]["usage"][name] for name in names] == [2, 4, 4]
    assert [rest[-2]["usage"][name] for name in names] == [2, 4, 4]
    assert first["message"]["usage"]["output_tokens"] == 0


def test_a_stream_that_was_told_nothing_of_the_prompt_begins_with_its_length() -> None:
    first, *_ = streamed(reply(ContentDelta("so"))[1:])
    assert first["message"]["usage"]["input_tokens"] == 10


def test_an_error_in_a_stream_has_the_form_of_the_api() -> None:
    [event] = MessageWriter(HEAD).failure(DiskPrefixError("it broke", code="device_lost"))
    details = {"error_code": "device_lost", "param": None}
    error = {"type": "api_error", "message": "it broke", "details": details}
    assert (event.name, event.data) == ("error", {"type": "error", "error": error, "request_id": "req_1"})


def test_a_keepalive_is_a_ping() -> None:
    assert MessageWriter(HEAD).keepalive() == b'event: ping\ndata: {"type":"ping"}\n\n'
