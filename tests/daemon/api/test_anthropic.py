"""Anthropic's API: bodies in neutral words, and replies as a message and as the events of a stream.

`anthropic_streams` holds streams of that service. `text.sse`, `tool_use.sse` and `thinking.sse` are the examples of its
documentation, word for word ("Full HTTP stream response" on platform.claude.com/docs/en/build-with-claude/streaming, in
a published copy of that page). `recorded_tool.jsonl` is `anthropic-json-tool.1.chunks.txt`, a recording among the
tests of the package `@ai-sdk/anthropic` 3.0.21 (Apache 2.0), without `cache_creation` and `service_tier` of its usage.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message as SDKMessage
from anthropic.types import RawMessageStreamEvent
from msgspec.structs import replace
from pydantic import TypeAdapter

from diskprefix.daemon.api.anthropic import CountTokensRequest, MessagesRequest
from diskprefix.daemon.api.anthropic_writer import MessageWriter
from diskprefix.daemon.api.dialect import Head, ServerSentEvent, json_text
from diskprefix.daemon.api.reply import CallBegin, DeltaEvent, EndEvent, EndReason, ReplyDelta, ReplyEvent, whole_reply
from diskprefix.daemon.chat.messages import CacheMark, Conversation, ImagePart, Message, TextPart, ToolCall, joined
from diskprefix.daemon.chat.output.format import ContentDelta, ReasoningDelta, ToolCallDelta
from diskprefix.daemon.engine.request import DoneEvent, ProgressEvent
from diskprefix.daemon.server.body import parse_json
from diskprefix.errors import DiskPrefixError
from tests.daemon.server.scripted import CHOSEN, done

USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
TOOLS = [{"name": name, "input_schema": SCHEMA} for name in ("read", "write")]
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
MARK = {"cache_control": {"type": "ephemeral"}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a.py"}}


def body(**fields: Any) -> MessagesRequest:
    return parse_json(json.dumps({"max_tokens": 8, "messages": [USER]} | fields).encode(), MessagesRequest)


def conversation(*messages: dict[str, Any], **fields: Any) -> Conversation:
    return body(messages=list(messages), **fields).conversation


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def text(said: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **fields}


def result(content: Any = "print(1)", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}


def said(message: Message) -> list[str]:
    return [part.text for part in message.content if isinstance(part, TextPart)]


@pytest.mark.parametrize(
    ("messages", "system", "expected"),
    [
        *(([USER], system, [("user", ["hello"])]) for system in (None, "", list[Any]())),
        ([USER], "Be brief.", [("system", ["Be brief."]), ("user", ["hello"])]),
        ([USER], [text("Be"), text("brief.")], [("system", ["Be", "brief."]), ("user", ["hello"])]),
        (
            [USER, {"role": "system", "content": "Now in French."}, USER],
            "Be brief.",
            [("system", ["Be brief."]), ("user", ["hello"]), ("system", ["Now in French."]), ("user", ["hello"])],
        ),
        (
            [USER, user(text("there")), assistant(text("hi")), assistant(CALL), user(result()), USER],
            None,
            [("user", ["hello", "there"]), ("assistant", ["hi"]), ("tool", ["print(1)"]), ("user", ["hello"])],
        ),
        (
            [assistant(CALL), user(text("a"), result(), result([text("one"), text("two")]), text("b"))],
            None,
            [
                ("assistant", []),
                ("user", ["a"]),
                ("tool", ["print(1)"]),
                ("tool", ["one", "two"]),
                ("user", ["b"]),
            ],
        ),
    ],
)
def test_messages_keep_their_roles_and_order(
    messages: list[Any], system: Any, expected: list[tuple[str, list[str]]]
) -> None:
    """Messages of one role that follow each other are one, and each result of a tool is one of its own."""
    neutral = conversation(*messages, system=system).messages
    assert [(message.role, said(message)) for message in neutral] == expected
    calls = [call for message in neutral for call in message.tool_calls]
    assert calls == [ToolCall("toolu_1", "read", {"path": "a.py"})] * len(calls)
    assert {message.tool_call_id for message in neutral if message.role == "tool"} <= {"toolu_1"}


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        (result(is_error=True), ["Error:", "print(1)"]),
        (result(None, is_error=True), ["Error:"]),
        (result(None), []),
        (result(""), [""]),
        (result([{"type": "tool_reference", "tool_name": "grep"}]), ["grep"]),
    ],
)
def test_a_result_is_rendered_as_its_text_with_errors_marked(sent: dict[str, Any], read: list[str]) -> None:
    assert said(conversation(USER, assistant(CALL), user(sent)).messages[2]) == read


def test_thoughts_are_reasoning_and_redacted_ones_are_left_out() -> None:
    redacted = {"type": "redacted_thinking", "data": "EqQB"}
    [_, message, _] = conversation(USER, assistant(redacted, THOUGHT, text("so")), USER).messages
    assert (message.reasoning, said(message)) == ("hm", ["so"])


@pytest.mark.parametrize(
    ("source", "uri", "path"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "aGk="}, "data:image/png;base64,aGk=", "data"),
        ({"type": "url", "url": "https://example.com/a.png"}, "https://example.com/a.png", "url"),
    ],
)
def test_images_keep_the_path_for_errors(source: Any, uri: str, path: str) -> None:
    image = {"type": "image", "source": source}
    for parsed, place, in_history in (
        (conversation(user(text("see"), image)), "messages.0.content.1", False),
        (conversation(user(result([image]))), "messages.0.content.0.content.0", True),
    ):
        [*_, part] = parsed.messages[0].content
        assert part == ImagePart(uri, place, f"{place}.source.{path}", in_history=in_history)


def test_documents_of_text_and_search_results_are_text() -> None:
    document = {
        "type": "document",
        "title": "a.txt",
        "source": {"type": "text", "media_type": "text/plain", "data": "A"},
    }
    nested = {"type": "document", "source": {"type": "content", "content": [text("B")]}}
    search = {"type": "search_result", "title": "C", "source": "https://c", "content": [text("D")]}
    assert said(conversation(user(document, nested, search)).messages[0]) == ["a.txt", "A", "B", "C", "https://c", "D"]


@pytest.mark.parametrize(
    ("fields", "ttl_s"), [({}, None), ({"ttl": "5m", "scope": "global"}, 300.0), ({"ttl": "1h"}, 3600.0)]
)
def test_marks_are_those_of_the_blocks(fields: dict[str, str], ttl_s: float | None) -> None:
    """A mark may say more than is known: Claude Code sends a `scope`."""
    mark, neutral = {"cache_control": {"type": "ephemeral"} | fields}, CacheMark(ttl_s)
    parsed = conversation(
        user(text("a", **mark), text("b")),
        assistant(CALL | MARK, CALL | mark),
        user(result() | mark),
        system=[text("s", **mark)],
        tools=[TOOLS[0], SEARCH, TOOLS[1] | mark],
    )
    parts = [part for message in parsed.messages[:2] for part in message.content if isinstance(part, TextPart)]
    assert [part.mark for part in parts] == [neutral, neutral, None]
    assert [message.mark for message in parsed.messages] == [None, None, neutral, neutral]
    assert parsed.tool_marks == ((1, neutral),), "counted without the tool that is left out"
    of_body = conversation(USER, assistant(CALL), user(result()), **mark)
    assert [message.mark for message in of_body.messages] == [None, None, neutral], "that of its last message"


def test_tools_get_the_template_form_without_tools_of_anthropics_servers() -> None:
    described = TOOLS[0] | {"description": "Reads.", "type": "custom", "strict": True, "eager_input_streaming": True}
    parsed = conversation(USER, tools=[SEARCH, described, TOOLS[1]])
    assert parsed.tools == [
        {"type": "function", "function": {"name": "read", "description": "Reads.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "write", "parameters": SCHEMA}},
    ]
    assert list(parsed.tools[0]["function"]["parameters"]["properties"]) == ["b", "a"], "in the client's order"
    assert parsed.tool_paths == ["tools.1.input_schema", "tools.2.input_schema"]


@pytest.mark.parametrize(
    ("sent", "thinking"),
    [
        (None, None),
        ({"type": "enabled", "budget_tokens": 1024}, True),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, None),
        ({"type": "between_tools"}, None),
    ],
)
def test_thinking_is_switched_where_the_client_says_so(sent: Any, thinking: bool | None) -> None:
    assert body(thinking=sent).conversation.thinking is thinking


@pytest.mark.parametrize(
    ("last", "ending"),
    [
        (USER, "reply"),
        ({"role": "assistant", "content": "The best answer is ("}, "continue"),
        (assistant(text("The best answer is (")), "continue"),
        ({"role": "assistant", "content": ""}, "reply"),
        (assistant(text("I look."), CALL), "reply"),
        (assistant(THOUGHT), "reply"),
    ],
)
def test_the_reply_goes_on_with_the_text_of_a_last_assistant_message(last: Any, ending: str) -> None:
    assert conversation(USER, last).ending == ending


def test_output_config_sets_the_effort_and_counting_needs_no_max_tokens() -> None:
    parsed = body(output_config={"effort": "high", "task_budget": None}).conversation
    assert parsed == replace(body().conversation, reasoning_effort="high")
    assert parse_json(json.dumps({"messages": [USER]}).encode(), CountTokensRequest).conversation == body().conversation


def test_a_long_run_of_messages_is_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined one after the other, each copies all those before it: nine seconds for 30 MiB."""
    joins = []
    monkeypatch.setattr(
        "diskprefix.daemon.chat.messages.joined",
        lambda run: joins.append(len(run)) or joined(run),  # type: ignore[func-returns-value]
    )
    parsed = conversation(USER, *[assistant(THOUGHT)] * 50, USER)
    assert joins == [1, 50, 1]
    assert parsed.messages[1].reasoning == "\n".join(["hm"] * 50)


HEAD = Head(id="msg_1", created=0, model="tiny", fingerprint="fp", prompt_tokens=10, request_id="req_1")
READ = CallBegin(0, "read", "toolu_1")
STREAMS = sorted((Path(__file__).parent / "anthropic_streams").iterdir())
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


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
    sent: Sequence[ServerSentEvent] = [*writer.begin(), *(each for event in events for each in writer.events(event))]
    assert [event.name for event in sent] == [event.data["type"] for event in sent if isinstance(event.data, dict)]
    for event in sent:
        SDK_EVENT.validate_python(event.data)
    return [event.data for event in sent]


def whole(events: Iterable[ReplyEvent], head: Head = HEAD, **options: Any) -> dict[str, Any]:
    """The message. The stream of the same reply makes the same, but for the order of text and calls."""
    message: dict[str, Any] = json.loads(
        json_text(MessageWriter(head, **options).whole(whole_reply([*(events := [*events])])))
    )
    SDKMessage.model_validate(message)
    made = assembled(streamed(events, head, **options))
    assert made | {"content": sorted(made["content"], key=lambda block: block["type"])} == message | {
        "content": sorted(message["content"], key=lambda block: block["type"])
    }
    return message


def assembled(events: Sequence[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {}
    for event in events:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            message["content"].append({**event["content_block"]})
        elif event["type"] == "content_block_delta":
            block = message["content"][event["index"]]
            for name, value in event["delta"].items():
                if name != "type":
                    block[name] = block.get(name, "") + value
        elif event["type"] == "message_delta":
            message |= event["delta"] | {name: event[name] for name in ("usage", "prefix_cache", "timings")}
    for block in message["content"]:
        if "input" in block:
            block["input"] = json.loads(block.pop("partial_json", "") or "{}")
    return message


def recorded_in(path: Path) -> list[dict[str, Any]]:
    """The events of a stream without pings, which may come anywhere."""
    lines = [line.removeprefix("data: ") for line in path.read_text().splitlines() if not line.startswith("event: ")]
    return [event for event in (json.loads(line) for line in lines if line) if event["type"] != "ping"]


def neutral(events: Iterable[dict[str, Any]]) -> list[ReplyEvent]:
    deltas: list[ReplyDelta] = []
    stop_reason = None
    for event in events:
        block, delta = event.get("content_block", {}), event.get("delta", {})
        if block.get("type") == "tool_use":
            deltas.append(CallBegin(0, block["name"], block["id"]))
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
    assert whole(neutral(recorded))["content"]
    for event, theirs in zip(ours, recorded, strict=True):
        usage, theirs = (data.get("message", data).get("usage", {}) for data in (event, theirs))
        assert theirs.keys() <= usage.keys()


@pytest.mark.parametrize("arguments", ['{"path": "a', "[1]", "null", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"])
def test_arguments_that_are_no_object_are_handed_over_as_text(arguments: str) -> None:
    message = MessageWriter(HEAD).whole(whole_reply(reply(READ, ToolCallDelta(0, arguments), reason="length")))
    assert message["content"][0]["input"] == {"INVALID_JSON": arguments}


def test_a_thought_that_the_client_does_not_want_is_left_out_but_signed() -> None:
    events = reply(ReasoningDelta("hm"), ContentDelta("so"))
    [block, _] = whole(events, shows_thoughts=False)["content"]
    assert block == {"type": "thinking", "thinking": "", "signature": "msg_1"}


@pytest.mark.parametrize(
    ("deltas", "kinds"),
    [
        ([ContentDelta("\n\n")], []),
        ([ReasoningDelta("hm"), ContentDelta("\n"), ContentDelta("\n"), READ], ["thinking", "tool_use"]),
        ([READ, ContentDelta("\n"), CallBegin(1, "list", "toolu_2")], ["tool_use", "tool_use"]),
        ([ContentDelta("\n"), ContentDelta(" so\n"), ContentDelta("\n")], ["text"]),
    ],
)
def test_there_is_no_block_of_blanks(deltas: list[ReplyDelta], kinds: list[str]) -> None:
    assert [block["type"] for block in whole(reply(*deltas))["content"]] == kinds


@pytest.mark.parametrize("between", [(), (READ,), (ReasoningDelta("hm"),)])
def test_blanks_before_text_and_behind_it_are_part_of_it(between: tuple[ReplyDelta, ...]) -> None:
    said = reply(ContentDelta("\n"), *between, ContentDelta("\n so"), ContentDelta("\n"))
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
    message = whole(events, head)
    assert (message["stop_reason"], message["stop_sequence"]) == (said, stop)


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
    message = whole(reply(end=end))
    assert message["usage"] == {
        "input_tokens": rest,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": read,
        "output_tokens": 2,
        "output_tokens_details": {"thinking_tokens": 0},
    }
    assert (message["prefix_cache"]["restored"], message["timings"]["restore_ms"]) == (read, 3.14)


def test_a_stream_begins_with_the_usage_that_it_ends_with() -> None:
    """Clients add up both; some take a figure of the end only if it is above 0."""
    end = kept(8, cached_tokens=4, saved="queued")
    first, *rest = streamed([ProgressEvent(10, 4, 4, 8, 0.5), ProgressEvent(10, 4, 9, 8, 9.5), *reply(end=end)[1:]])
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    for usage in (first["message"]["usage"], rest[-2]["usage"]):
        assert [usage[name] for name in names] == [2, 4, 4]
    assert first["message"]["usage"]["output_tokens"] == 0
    told_nothing, *_ = streamed(reply(ContentDelta("so"))[1:])
    assert told_nothing["message"]["usage"]["input_tokens"] == 10


def test_a_keepalive_is_a_ping_and_an_error_names_its_request() -> None:
    writer = MessageWriter(HEAD)
    assert writer.keepalive() == b'event: ping\ndata: {"type":"ping"}\n\n'
    [event] = writer.failure(DiskPrefixError("it broke", code="device_lost"))
    details = {"error_code": "device_lost", "param": None}
    error = {"type": "api_error", "message": "it broke", "details": details}
    assert (event.name, event.data) == ("error", {"type": "error", "error": error, "request_id": "req_1"})
