"""OpenAI's responses: bodies in neutral words, and replies as a response and as the events of a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import count, groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response as SDKResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from diskprefix.daemon.api.anthropic import CountTokensRequest
from diskprefix.daemon.api.dialect import Head, Json, ServerSentEvent
from diskprefix.daemon.api.reply import CallBegin, DeltaEvent, EndEvent, ReplyDelta, ReplyEvent, whole_reply
from diskprefix.daemon.api.responses import ResponseRequest
from diskprefix.daemon.api.responses_items import ReferenceItem, messages_of, stored_form
from diskprefix.daemon.api.responses_writer import OutputItems, ResponseWriter
from diskprefix.daemon.chat.messages import CacheMark, ImagePart, Message, OtherPart, TextPart, ToolCall
from diskprefix.daemon.chat.output.format import ContentDelta, ReasoningDelta, ToolCallDelta
from diskprefix.daemon.engine.request import TokenLogprob
from diskprefix.daemon.server.body import parse_json
from tests.daemon.server.scripted import done

USER = {"role": "user", "content": "hello"}
CALLED = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
READ = {"type": "function", "name": "read", "parameters": SCHEMA, "description": "Reads.", "strict": True}


def body(**fields: Any) -> ResponseRequest:
    return parse_json(json.dumps({"input": "hi"} | fields).encode(), ResponseRequest)


def items_of(*items: Any) -> list[Any]:
    parsed = body(input=list(items)).input
    assert isinstance(parsed, list)
    return parsed


def messages(*items: Any) -> list[Message]:
    return messages_of((item, f"input.{index}") for index, item in enumerate(items_of(*items)))[0]


def said(*items: Any) -> list[tuple[str, str]]:
    parsed = messages(*items)
    return [(each.role, "|".join(part.text for part in each.content if isinstance(part, TextPart))) for each in parsed]


def test_messages_of_every_role_become_messages_in_their_order() -> None:
    roles = ["developer", "system", "user", "assistant", "user"]
    assert said(*({"role": role, "content": role} for role in roles)) == [(role, role) for role in roles]


def test_parts_keep_their_paths_and_marks() -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    [message] = messages(
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "a", "cache_control": mark},
                {"type": "input_image", "image_url": "data:x", "detail": "low"}
                | {"prompt_cache_breakpoint": {"mode": "explicit"}},
                {"type": "input_audio", "input_audio": {"data": "d", "format": "wav"}},
                {"type": "input_file", "file_data": "x"},
                {"type": "refusal", "refusal": "no"},
            ],
        }
    )
    path = "input.0.content"
    assert message.content == (
        TextPart("a", f"{path}.0.text", CacheMark(3600.0)),
        ImagePart("data:x", f"{path}.1", f"{path}.1.image_url", "low"),
        OtherPart("audio", f"{path}.2"),
        OtherPart("file", f"{path}.3"),
        TextPart("no", f"{path}.4.refusal"),
    )
    assert (message.mark, message.path) == (CacheMark(), "input.0")


def test_screenshots_follow_function_calls_and_computer_actions() -> None:
    image = {"type": "input_image", "image_url": "data:x", "detail": "original"}
    action = {"type": "computer_call", "call_id": "c2", "action": {"type": "click", "x": 1, "y": 2}}
    screenshot = {"type": "computer_screenshot", "image_url": "data:y"}
    moved = {"type": "computer_call_output", "call_id": "c2", "output": screenshot}
    _, called, output, acted, seen = messages(USER, CALLED, OUTPUT | {"output": [image]}, action, moved)
    assert output.content == (ImagePart("data:x", "input.2.output.0", "input.2.output.0.image_url", "high", True),)
    assert seen.content == (ImagePart("data:y", "input.4.output", "input.4.output.image_url", in_history=True),)
    assert [(message.role, message.name) for message in (output, seen)] == [
        ("tool", CALLED["name"]),
        ("tool", "computer"),
    ]
    assert called.tool_calls[0].name == CALLED["name"]
    assert acted.tool_calls == (ToolCall("c2", "computer", {"type": "click", "x": 1, "y": 2}),)


def test_items_of_one_assistant_turn_become_one_message() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So:"}]}
    second = CALLED | {"call_id": "c2", "name": "write"}
    parsed = messages(USER, reasoning, text, CALLED, second, OUTPUT, OUTPUT | {"call_id": "c2"}, text)
    assert [message.role for message in parsed] == ["user", "assistant", "tool", "tool", "assistant"]
    turn = parsed[1]
    assert turn.reasoning == "hm"
    assert turn.content == (TextPart("So:", "input.2.content.0.text"),)
    assert turn.tool_calls == (ToolCall("c1", "read", '{"a": 1}'), ToolCall("c2", "write", '{"a": 1}'))
    assert turn.path == "input.1"
    assert [(message.tool_call_id, message.name) for message in parsed[2:4]] == [("c1", "read"), ("c2", "write")]


def test_an_item_out_of_turn_order_begins_another_message() -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    text = {"role": "assistant", "content": "So:"}
    assert [bool(message.tool_calls) for message in messages(CALLED, text)] == [True, False]
    assert [message.reasoning for message in messages(text, reasoning)] == [None, "hm"]
    assert [len(message.tool_calls) for message in messages(CALLED, reasoning, CALLED)] == [1, 1]
    assert said(text, text) == [("assistant", "So:"), ("assistant", "So:")]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"summary": [{"type": "summary_text", "text": "s"}], "content": None}, "s"),
        ({"summary": [{"type": "summary_text", "text": "s"}], "content": []}, "s"),
        ({"summary": [{"type": "summary_text", "text": "s"}], "content": [{"type": "text", "text": "c"}]}, "c"),
        ({"summary": [], "encrypted_content": "gAAA"}, None),
    ],
)
def test_the_content_of_a_reasoning_wins_over_its_summary(fields: dict[str, Any], text: str | None) -> None:
    [message] = messages({"type": "reasoning", "id": "rs_1"} | fields)
    assert message.reasoning == text


def test_an_object_with_an_id_and_no_role_is_a_reference() -> None:
    assert items_of({"id": "msg_1"}) == [ReferenceItem(id="msg_1")]
    assert items_of({"type": "item_reference", "id": "msg_1"}) == [ReferenceItem(id="msg_1")]


def test_the_stored_form_of_an_item_is_an_input_again_that_says_the_same() -> None:
    items = [
        USER,
        {"role": "assistant", "content": "So:", "id": "msg_1"},
        CALLED,
        OUTPUT,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]},
        *({"role": role, "content": ["bare", {"type": "new", "text": "t"}, 5]} for role in ("assistant", "user")),
    ]
    stored = [stored_form(item) for item in items_of(*items)]
    assert stored[0] == {
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "hello"}],
    }
    assert stored[1]["id"] == "msg_1"
    assert stored[1]["content"] == [{"type": "output_text", "text": "So:", "annotations": []}]
    assert said(*stored) == said(*items)
    assert [message.tool_calls for message in messages(*stored)] == [message.tool_calls for message in messages(*items)]


def test_functions_become_tools_of_the_chat_api_in_the_order_of_their_keys() -> None:
    mark = {"type": "ephemeral"}
    offered = body(
        tools=[{"type": "web_search"}, READ, {"type": "function", "name": "write", "cache_control": mark}]
    ).offered()
    function = {"name": "read", "parameters": SCHEMA, "description": "Reads."}
    assert [tool.tool for tool in offered.tools] == [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "write"}},
    ]
    first = offered.tools[0].tool["function"]
    assert list(first) == ["name", "parameters", "description"]
    assert list(first["parameters"]["properties"]) == ["b", "a"]
    assert [tool.path for tool in offered.tools] == ["tools.1.parameters", "tools.2.parameters"]
    assert [tool.mark for tool in offered.tools] == [None, CacheMark()]


def test_tools_that_others_would_run_are_left_out_and_named() -> None:
    of_openai = [READ, *[{"type": "web_search"}] * 2, {"type": "namespace", "name": "n", "tools": [{"type": "code"}]}]
    of_anthropic = [{"name": "read", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
    other = CountTokensRequest.model_validate({"messages": [USER], "tools": of_anthropic}).conversation
    offered = body(tools=of_openai).offered()
    assert len(offered.tools) == len(other.tools or ()) == 1
    assert offered.left_out == [
        OtherPart("web_search", "tools.1"),
        OtherPart("web_search", "tools.2"),
        OtherPart("code", "tools.3.tools.0"),
    ]
    assert other.left_out == [OtherPart("web_search_20250305", "tools.1")]


def test_functions_of_a_namespace_are_offered_and_called_by_both_names() -> None:
    tools = [{"type": "namespace", "name": "mcp__files", "tools": [READ]}, READ]
    offered = body(tools=tools).offered()
    assert [(tool.name, tool.path) for tool in offered.tools] == [
        ("mcp__files__read", "tools.0.tools.0.parameters"),
        ("read", "tools.1.parameters"),
    ]
    parts: list[list[ReplyDelta]] = [[CallBegin(0, "mcp__files__read", "c1")], [CallBegin(1, "read", "c2")]]
    calls = whole(events_of(parts), tools=tools)["output"]
    assert [(call["name"], call.get("namespace")) for call in calls] == [("read", "mcp__files"), ("read", None)]
    [called] = messages(*calls)
    assert [call.name for call in called.tool_calls] == ["mcp__files__read", "read"]


LOGPROBS = "message.output_text.logprobs"


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"top_logprobs": 3}, None),
        ({"include": ["reasoning.encrypted_content"]}, None),
        ({"include": [LOGPROBS]}, 0),
        ({"include": [LOGPROBS], "top_logprobs": 3}, 3),
    ],
)
def test_log_probabilities_are_given_where_they_are_included(fields: dict[str, Any], logprobs: int | None) -> None:
    assert body(**fields).logprobs == logprobs


HEX = "0123456789abcdef0123456789abcdef"
HEAD = Head(id=f"resp_{HEX}", created=5, model="m", fingerprint="fp", prompt_tokens=10, request_id="req")
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def writer(**fields: Any) -> ResponseWriter:
    request = body(**fields)
    echo = {name: json.loads(bytes(value)) for name, value in request.echo.items()}
    summary, namespaces = request.summary is not None, request.offered().namespaces
    return ResponseWriter(HEAD, echo, OutputItems(HEAD.id, reasoning_is_summary=summary, namespaces=namespaces))


def events_of(parts: Iterable[Sequence[ReplyDelta]], reason: Any = "stop", tokens: int = 0) -> list[ReplyEvent]:
    return [*(DeltaEvent(0, tuple(part)) for part in parts), EndEvent(0, reason, None, tokens), done()]


def streamed(events: Iterable[ReplyEvent], **fields: Any) -> list[Json]:
    """The data of the events of a stream. Each is named as its type says, and of the official client's own type."""
    own = writer(**fields)
    sent: list[ServerSentEvent] = [*own.begin(), *(written for event in events for written in own.events(event))]
    data = [event.data for event in sent if not isinstance(event.data, str)]
    assert [event.name for event in sent] == [SDK_EVENT.validate_python(event).type for event in data]
    return data


def whole(events: Iterable[ReplyEvent], **fields: Any) -> Json:
    return writer(**fields).whole(whole_reply([*events]))


HELLO: list[list[ReplyDelta]] = [[ContentDelta("stream")], [ContentDelta("ed")]]
ORDER = ["reasoning", "message", "function_call"]
"""The order of a whole response; a stream has the items as they come."""


def of_part(part: str, text: str) -> str:
    return f"{part}.added ({text}.delta )*{text}.done {part}.done "


CALL = "(function_call_arguments.delta )*function_call_arguments.done "
TEXT = of_part("content_part", "output_text")
THOUGHTS = {
    None: of_part("content_part", "reasoning_text"),
    "auto": of_part("reasoning_summary_part", "reasoning_summary_text"),
}
"""The events of a thought, by the summary that is asked for."""


def numbered(parts: list[list[Any]]) -> list[list[ReplyDelta]]:
    """Parts of a reply, in which a text stands for a call with these arguments."""
    calls = count()
    return [
        [delta for piece in part for delta in (call(next(calls), piece) if isinstance(piece, str) else [piece])]
        for part in parts
    ]


def call(index: int, arguments: str) -> list[ReplyDelta]:
    return [CallBegin(index, "f", f"call_{index}"), ToolCallDelta(index, arguments)]


DELTAS = (
    st.builds(ContentDelta, st.sampled_from(["", "a", "b\n"]))
    | st.builds(ReasoningDelta, st.sampled_from(["r", "s"]))
    | st.sampled_from(["", "{", "{}"])
)


@settings(max_examples=80)
@given(
    st.lists(st.lists(DELTAS, max_size=4), max_size=6).map(numbered),
    st.sampled_from(["stop", "length", "tool_calls"]),
    st.sampled_from([None, "auto"]),
)
def test_a_stream_has_openais_events_and_ends_with_the_response(
    parts: list[list[ReplyDelta]], reason: str, summary: str | None
) -> None:
    """Recorded of gpt-4.1, gpt-5 and OpenRouter's gpt-oss-20b. `test_specifications.py` reads their fields."""
    events = streamed(events_of(parts, reason, tokens=4), reasoning={"summary": summary})
    status = "incomplete" if reason == "length" else "completed"
    kinds = " ".join(event["type"].removeprefix("response.") for event in events)
    item = f"output_item.added ({TEXT}|{CALL}|{THOUGHTS[summary]})output_item.done "
    assert re.fullmatch(f"created in_progress ({item})+{status}", kinds)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["status"] == "in_progress"

    last = events[-1]["response"]
    finished = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert last["output"] == finished
    assert [item["id"].partition("_")[2] for item in finished] == [f"{HEX}_{index}" for index in range(len(finished))]
    assert [item["status"] for item in finished] == ["completed"] * (len(finished) - 1) + [status]
    assert (last["status"], last["incomplete_details"]) == (
        status,
        {"reason": "max_output_tokens"} if status == "incomplete" else None,
    )
    of_items = [event.get("item_id") or event["item"]["id"] for event in events[2:-1]]
    assert [id_ for id_, _ in groupby(of_items)] == [item["id"] for item in finished]
    for item in finished:
        if item["type"] == "reasoning":
            assert ("content" in item, bool(item["summary"])) == (summary is None, summary is not None)

    response = whole(events_of(parts, reason, tokens=4), reasoning={"summary": summary})
    in_turn = [kind for kind, _ in groupby(item["type"] for item in finished)]
    if in_turn == [kind for kind in ORDER if kind in in_turn]:
        assert response["output"] == finished
    changing = {"completed_at": None, "output": None}
    assert response | changing == last | changing
    assert SDKResponse.model_validate(response).usage is not None
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}


def test_a_keepalive_is_an_event_that_clients_count_and_ignore() -> None:
    """Codex does not count comments."""
    response_writer = writer()
    [*_, before] = response_writer.begin()
    name, _, data = response_writer.keepalive().decode().removesuffix("\n\n").partition("\ndata: ")
    sent = json.loads(data)
    SDK_EVENT.validate_python(sent)
    assert isinstance(before.data, dict)
    assert (name, sent["type"]) == ("event: response.in_progress", "response.in_progress")
    assert sent["sequence_number"] == before.data["sequence_number"] + 1


def test_white_space_makes_no_message_but_stays_before_a_text() -> None:
    blank: list[ReplyDelta] = [ContentDelta("\n\n")]
    calls: list[list[ReplyDelta]] = [[CallBegin(n, "f", f"call_{n}"), ToolCallDelta(n, "{}")] for n in range(2)]
    output = whole(events_of([blank, calls[0], blank, calls[1], blank]))["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call"]
    [message] = whole(events_of([blank, *HELLO, blank]))["output"]
    assert message["content"][0]["text"] == "\n\nstreamed\n\n"
    [message] = whole(events_of([blank]))["output"]
    assert message["content"][0]["text"] == "\n\n"


def test_log_probabilities_come_with_the_text_whose_tokens_they_are() -> None:
    token = TokenLogprob(5, b"x", -1.0, (TokenLogprob(6, b"\xf0\x9f", -2.0),))
    events: list[ReplyEvent] = [
        DeltaEvent(0, (ReasoningDelta("hm"),), (token,)),
        DeltaEvent(0, (), (token,)),
        DeltaEvent(0, (ContentDelta("x"),), (token,)),
        *events_of([])[-2:],
    ]
    data = streamed(events)
    [delta] = [event for event in data if event["type"] == "response.output_text.delta"]
    wanted = {"token": "x", "logprob": -1.0, "bytes": [120]}
    wanted["top_logprobs"] = [{"token": "�", "logprob": -2.0, "bytes": [240, 159]}]
    assert delta["logprobs"] == [wanted, wanted]
    assert data[-1]["response"]["output"][1]["content"][0]["logprobs"] == delta["logprobs"]


def test_a_response_repeats_what_was_asked_for() -> None:
    schema = {"type": "json_schema", "name": "n", "description": "d", "schema": SCHEMA, "strict": True}
    text = {"format": schema, "verbosity": "low"}
    tool = {"type": "function", "name": "f", "description": "g", "parameters": SCHEMA, "strict": True}
    fields: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 7,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "previous_response_id": "resp_1",
        "reasoning": {"effort": "low", "summary": "auto"},
        "temperature": 0.5,
        "text": text,
        "tool_choice": {"type": "function", "name": "f"},
        "tools": [tool],
        "top_p": 0.9,
        "prompt_cache_key": "k",
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "max_tool_calls": 3,
        "safety_identifier": "s",
    }
    response = whole(events_of(HELLO), **fields)
    assert {name: response[name] for name in fields} == fields
    assert response["store"] is False
    plain = whole(events_of(HELLO))
    assert plain["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert (plain["tool_choice"], plain["tools"]) == ("auto", [])
