"""Bodies of the responses API in neutral words, and the errors of those that cannot be served."""

from __future__ import annotations

import json
import logging
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diskprefix.api import asked
from diskprefix.api.responses import ResponseRequest
from diskprefix.api.responses_items import ReferenceItem, SpokenItem, messages_of, stored_form
from diskprefix.chat.messages import (
    AudioPart,
    CacheMark,
    ImagePart,
    Message,
    OtherPart,
    TextPart,
    ToolCall,
)
from diskprefix.errors import InvalidRequest
from diskprefix.server.body import parse_json

USER = {"role": "user", "content": "hello"}
CALL = {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"a": 1}'}
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
    return messages_of((item, f"input.{index}") for index, item in enumerate(items_of(*items)))


def said(*items: Any) -> list[tuple[str, str]]:
    """Role and text of each message."""
    found = messages(*items)
    return [(one.role, "|".join(part.text for part in one.content if isinstance(part, TextPart))) for one in found]


def test_messages_of_every_role_become_messages_in_their_order() -> None:
    roles = ["developer", "system", "user", "assistant", "user"]
    assert said(*({"role": role, "content": role} for role in roles)) == [(role, role) for role in roles]


def test_parts_keep_their_paths_and_marks() -> None:
    mark = {"type": "ephemeral", "ttl": "1h"}
    [message] = messages(
        {
            "type": "message",
            "role": "user",
            "cache_control": {"type": "ephemeral"},
            "content": [
                {"type": "input_text", "text": "a", "cache_control": mark},
                {"type": "input_image", "image_url": "data:x", "detail": "auto"},
                {"type": "input_audio", "input_audio": {"data": "d", "format": "wav"}},
                {"type": "input_file", "file_data": "x"},
                {"type": "refusal", "refusal": "no"},
            ],
        }
    )
    path = "input.0.content"
    assert message.content == (
        TextPart("a", f"{path}.0.text", CacheMark(3600.0)),
        ImagePart("data:x", f"{path}.1", f"{path}.1.image_url"),
        AudioPart("d", f"{path}.2", f"{path}.2.input_audio.data"),
        OtherPart("file", f"{path}.3"),
        TextPart("no", f"{path}.4.refusal"),
    )
    assert (message.mark, message.path) == (CacheMark(), "input.0")


def test_what_the_assistant_did_in_one_turn_is_one_message() -> None:
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    text = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So:"}]}
    second = CALL | {"call_id": "c2", "name": "write"}
    found = messages(USER, reasoning, text, CALL, second, OUTPUT, OUTPUT | {"call_id": "c2"}, text)
    assert [message.role for message in found] == ["user", "assistant", "tool", "tool", "assistant"]
    turn = found[1]
    assert turn.reasoning == "hm"
    assert turn.content == (TextPart("So:", "input.2.content.0.text"),)
    assert turn.tool_calls == (ToolCall("c1", "read", '{"a": 1}'), ToolCall("c2", "write", '{"a": 1}'))
    assert turn.path == "input.1"
    assert [(one.tool_call_id, one.name) for one in found[2:4]] == [("c1", "read"), ("c2", "write")]


def test_what_comes_out_of_the_order_of_a_turn_begins_another_message() -> None:
    reasoning = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    text = {"role": "assistant", "content": "So:"}
    assert [bool(one.tool_calls) for one in messages(CALL, text)] == [True, False]
    assert [one.reasoning for one in messages(text, reasoning)] == [None, "hm"]
    assert [len(one.tool_calls) for one in messages(CALL, reasoning, CALL)] == [1, 1]
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
        CALL,
        OUTPUT,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:x"}]},
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
    assert [one.tool_calls for one in messages(*stored)] == [one.tool_calls for one in messages(*items)]


def test_functions_become_tools_of_the_chat_api_in_the_order_of_their_keys() -> None:
    mark = {"type": "ephemeral"}
    offered = body(
        tools=[{"type": "web_search"}, READ, {"type": "function", "name": "write", "cache_control": mark}]
    ).offered
    function = {"name": "read", "parameters": SCHEMA, "description": "Reads."}
    assert offered.functions == [
        {"type": "function", "function": function},
        {"type": "function", "function": {"name": "write"}},
    ]
    assert list(offered.functions[0]["function"]) == ["name", "parameters", "description"]
    assert list(offered.functions[0]["function"]["parameters"]["properties"]) == ["b", "a"]
    assert offered.paths == ["tools.1.parameters", "tools.2.parameters"]
    assert offered.marks == [(1, CacheMark())]


def test_tools_that_openai_would_run_are_skipped_with_one_note(caplog: pytest.LogCaptureFixture) -> None:
    asked._told.clear()
    sent = [{"type": "namespace", "name": "n", "tools": [READ]}, READ, {"type": "web_search"}, {"type": "web_search"}]
    with caplog.at_level(logging.INFO, logger="diskprefix"):
        for _ in range(3):
            assert len(body(tools=sent).offered.functions) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "[server] tools of these types are left out, OpenAI's servers run them: namespace, web_search"
    ]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


def test_without_a_choice_the_tools_are_left_out_of_the_prompt() -> None:
    assert body(tools=[READ], tool_choice="none").offered.functions == []


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


WHOLE: dict[str, Any] = {
    "input": [
        USER | {"cache_control": {"type": "ephemeral", "ttl": "5m"}},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "y"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x"}, {"type": "refusal", "refusal": "y"}]},
        CALL,
        OUTPUT | {"output": [{"type": "input_text", "text": "x"}]},
        {"id": "msg_1"},
    ],
    "instructions": "x",
    "tools": [READ, {"type": "web_search"}],
    "tool_choice": allowed("auto", "read"),
    "text": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": [LOGPROBS],
    "metadata": {"a": "b"},
}
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["function", "id"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "id", "x"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Each container within a value, with each of its keys."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places(value[key])]


@given(st.data())
@settings(max_examples=200)
def test_whatever_is_wrong_in_a_body_is_refused_with_a_param_or_says_what_it_asks_for(data: st.DataObject) -> None:
    changed = deepcopy(WHOLE)
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(places(changed)))
        if data.draw(st.booleans()) and isinstance(container, dict):
            del container[key]
        else:
            container[key] = data.draw(_JSON)
    error = error_of(changed)
    assert error is None or (error.param and "\n" not in error.message)


def error_of(fields: dict[str, Any]) -> InvalidRequest | None:
    try:
        request = parse_json(json.dumps(fields).encode(), ResponseRequest)
        _ = request.offered, request.choice, request.text_format, request.echo, request.logprobs
        if isinstance(request.input, list):
            items = [item for item in request.input if isinstance(item, SpokenItem)]
            messages_of((item, "input") for item in items)
            assert json.dumps([stored_form(item) for item in items])
    except InvalidRequest as error:
        return error
    return None
