"""The events of a stream, and the response as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response as SDKResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from diskprefix.api.dialect import Head, Json, ServerSentEvent
from diskprefix.api.reply import (
    CallBegin,
    DeltaEvent,
    EndEvent,
    ReplyDelta,
    ReplyEvent,
    whole_reply,
)
from diskprefix.api.responses import ResponseRequest
from diskprefix.api.responses_writer import ResponseWriter
from diskprefix.chat.output.format import ContentDelta, ReasoningDelta, ToolCallDelta
from diskprefix.engine.request import TokenLogprob
from diskprefix.errors import DiskPrefixError
from diskprefix.server.body import parse_json
from tests.server.scripted import done

HEX = "0123456789abcdef0123456789abcdef"
HEAD = Head(id=f"resp_{HEX}", created=5, model="m", fingerprint="fp", prompt_tokens=10, request_id="req")
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SCHEMA = {"type": "object"}


def body(**fields: Any) -> ResponseRequest:
    return parse_json(json.dumps({"input": "hi"} | fields).encode(), ResponseRequest)


def writer(kept: list[Json] | None = None, **fields: Any) -> ResponseWriter:
    request = body(**fields)
    keep = None if kept is None else kept.append
    echo = {name: json.loads(bytes(value)) for name, value in request.echo.items()}
    return ResponseWriter(HEAD, echo, reasoning_is_summary=request.summary is not None, keep=keep)


def events_of(parts: Iterable[Sequence[ReplyDelta]], reason: Any = "stop", tokens: int = 0) -> list[ReplyEvent]:
    return [*(DeltaEvent(0, tuple(part)) for part in parts), EndEvent(0, reason, None, tokens), done()]


def test_a_keepalive_is_an_event_that_clients_count_and_ignore() -> None:
    """Codex does not count comments."""
    one = writer()
    [*_, before] = one.begin()
    name, _, data = one.keepalive().decode().removesuffix("\n\n").partition("\ndata: ")
    sent = json.loads(data)
    SDK_EVENT.validate_python(sent)
    assert isinstance(before.data, dict)
    assert (name, sent["type"]) == ("event: response.in_progress", "response.in_progress")
    assert sent["sequence_number"] == before.data["sequence_number"] + 1


def streamed(events: Iterable[ReplyEvent], **fields: Any) -> list[Json]:
    """The data of the events of a stream. Each is named as its type says."""
    one = writer(**fields)
    sent: list[ServerSentEvent] = [*one.begin(), *(found for event in events for found in one.events(event))]
    data = [event.data for event in sent if not isinstance(event.data, str)]
    assert [event.name for event in sent] == [event["type"] for event in data]
    return data


def whole(events: Iterable[ReplyEvent], **fields: Any) -> Json:
    return writer(**fields).whole(whole_reply([*events]))


def kinds(events: Iterable[Json]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


HELLO: list[list[ReplyDelta]] = [[ContentDelta("stream")], [ContentDelta("ed")]]
_PIECES: list[list[ReplyDelta]] = [[ToolCallDelta(0, "x")] for _ in range(12)]
CALL: list[list[ReplyDelta]] = [[CallBegin(0, "call_1", "get_weather")], *_PIECES]
THOUGHT: list[list[ReplyDelta]] = [[ReasoningDelta("hm")] for _ in range(26)]


ADDED, DONE = "output_item.added", "output_item.done"
PART_ADDED, PART_DONE = "content_part.added", "content_part.done"
TEXT = [ADDED, PART_ADDED, *["output_text.delta"] * 2, "output_text.done", PART_DONE, DONE]
CALLED = [ADDED, *["function_call_arguments.delta"] * 12, "function_call_arguments.done", DONE]
THOUGHT_OF = [ADDED, PART_ADDED, *["reasoning_text.delta"] * 26, "reasoning_text.done", PART_DONE, DONE]


@pytest.mark.parametrize(
    ("parts", "said"),
    [(HELLO, TEXT), (CALL, CALLED), ([*THOUGHT, *HELLO], [*THOUGHT_OF, *TEXT])],
    ids=["text", "a call", "reasoning and text"],
)
def test_the_events_of_a_stream_come_in_the_order_of_openai_s(parts: Any, said: list[str]) -> None:
    """Recorded of gpt-4.1, gpt-5 and OpenRouter's gpt-oss-20b. `test_specifications.py` reads their fields."""
    events = streamed(events_of(parts))
    assert kinds(events) == ["created", "in_progress", *said, "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[0]["response"]["status"] == "in_progress"
    assert not events[2]["item"].get("content")


def test_reasoning_is_the_summary_where_a_summary_is_asked_for() -> None:
    events = streamed(events_of([[ReasoningDelta("h")], [ReasoningDelta("m")], *HELLO]), reasoning={"summary": "auto"})
    assert kinds(events)[2:9] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    item = events[-1]["response"]["output"][0]
    assert item["summary"] == [{"type": "summary_text", "text": "hm"}]
    assert "content" not in item


CASES: dict[str, tuple[list[list[ReplyDelta]], str]] = {
    "text": (HELLO, "stop"),
    "text that is cut": (HELLO, "length"),
    "nothing": ([], "stop"),
    "nothing, cut": ([[]], "length"),
    "blanks alone": ([[ContentDelta(" \n")]], "stop"),
    "a call": (CALL, "tool_calls"),
    "a call that is cut": (CALL, "length"),
    "a call without arguments": ([[CallBegin(0, "call_1", "f")]], "length"),
    "reasoning alone": (THOUGHT, "length"),
    "all of it": ([*THOUGHT, [ContentDelta("\n\n")], *HELLO, *CALL, [CallBegin(1, "call_2", "g")]], "tool_calls"),
    "all at once": ([[ReasoningDelta("a"), ContentDelta("b"), CallBegin(0, "c", "f"), ToolCallDelta(0, "{}")]], "stop"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("summary", [None, "auto"])
def test_the_sdk_reads_every_event_and_the_last_one_holds_all_items(case: str, summary: str | None) -> None:
    parts, reason = CASES[case]
    events = streamed(events_of(parts, reason), reasoning={"summary": summary})
    for event in events:
        parsed = SDK_EVENT.validate_python(event)
        assert parsed.type == event["type"]
    finished = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert last["output"] == finished
    assert [item["id"].endswith(f"_{HEX}_{index}") for index, item in enumerate(finished)] == [True] * len(finished)
    assert last["status"] == ("incomplete" if reason == "length" else "completed")
    assert finished[-1]["status"] == last["status"]
    assert all(item["status"] == "completed" for item in finished[:-1])


@pytest.mark.parametrize("case", CASES)
def test_a_whole_response_is_the_last_one_of_the_stream(case: str) -> None:
    parts, reason = CASES[case]
    events = events_of(parts, reason, tokens=4)
    last = streamed(events)[-1]["response"]
    response = whole(events)
    assert response | {"completed_at": None} == last | {"completed_at": None}
    assert SDKResponse.model_validate(response).usage is not None
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}


def test_white_space_between_calls_is_no_message_and_before_a_text_it_belongs_to_it() -> None:
    blank: list[ReplyDelta] = [ContentDelta("\n\n")]
    calls: list[list[ReplyDelta]] = [[CallBegin(n, f"call_{n}", "f"), ToolCallDelta(n, "{}")] for n in range(2)]
    output = whole(events_of([blank, calls[0], blank, calls[1], blank]))["output"]
    assert [item["type"] for item in output] == ["function_call", "function_call"]
    [message] = whole(events_of([blank, *HELLO, blank]))["output"]
    assert message["content"][0]["text"] == "\n\nstreamed\n\n"
    [message] = whole(events_of([blank]))["output"]
    assert message["content"][0]["text"] == "\n\n"


deltas = st.one_of(
    st.builds(ContentDelta, st.sampled_from(["", " ", "a", "b\n"])),
    st.builds(ReasoningDelta, st.sampled_from(["", "r"])),
    st.tuples(st.just("call"), st.sampled_from(["", "{", "{}"])),
)


@given(st.lists(st.lists(deltas, max_size=4), max_size=6))
def test_items_open_and_close_one_after_the_other_whatever_the_model_does(parts: list[list[Any]]) -> None:
    num_calls, sent = 0, []
    for part in parts:
        mapped: list[ReplyDelta] = []
        for delta in part:
            if isinstance(delta, tuple):
                mapped += [CallBegin(num_calls, f"call_{num_calls}", "f"), ToolCallDelta(num_calls, delta[1])]
                num_calls += 1
            else:
                mapped.append(delta)
        sent.append(mapped)
    open_item = None
    for event in streamed(events_of(sent)):
        kind = event["type"]
        if kind == "response.output_item.added":
            assert open_item is None
            open_item = event["item"]["id"]
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == open_item
            open_item = None
        elif "item_id" in event:
            assert event["item_id"] == open_item
    assert open_item is None


def test_log_probabilities_come_with_the_text_whose_tokens_they_are() -> None:
    token = TokenLogprob(5, "x", -1.0, (TokenLogprob(6, "�", -2.0),))
    events: list[ReplyEvent] = [
        DeltaEvent(0, (ReasoningDelta("hm"),), (token,)),
        DeltaEvent(0, (), (token,)),
        DeltaEvent(0, (ContentDelta("x"),), (token,)),
        *events_of([])[-2:],
    ]
    data = streamed(events)
    [delta] = [event for event in data if event["type"] == "response.output_text.delta"]
    wanted = {"token": "x", "logprob": -1.0, "bytes": [120]}
    wanted["top_logprobs"] = [{"token": "�", "logprob": -2.0, "bytes": []}]
    assert delta["logprobs"] == [wanted, wanted]
    assert data[-1]["response"]["output"][1]["content"][0]["logprobs"] == delta["logprobs"]


def test_a_failure_ends_the_stream_with_a_failed_response() -> None:
    one = writer()
    one.begin()
    [failed] = one.failure(DiskPrefixError("the disk burns"))
    assert failed.name == "response.failed"
    assert not isinstance(failed.data, str)
    parsed = SDK_EVENT.validate_python(failed.data)
    assert (parsed.response.status, parsed.response.error.message) == ("failed", "the disk burns")
    assert failed.data["sequence_number"] == 2


def test_a_response_is_kept_once_it_is_complete_and_not_before() -> None:
    kept: list[Json] = []
    one = writer(kept)
    one.begin()
    *events, last = events_of(HELLO)
    for event in events:
        one.events(event)
    assert kept == []
    [completed] = one.events(last)
    assert not isinstance(completed.data, str)
    assert kept == [completed.data["response"]]
    assert kept[0]["store"] is True


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
    assert (plain["tool_choice"], plain["tools"], plain["temperature"]) == ("auto", [], 1.0)
