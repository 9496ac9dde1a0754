"""Chat bodies in neutral words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diskprefix.api.asked import TextFormat, ToolChoice
from diskprefix.api.openai_chat import ChatRequest
from diskprefix.server.body import parse_json

USER = {"role": "user", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


def chat(**fields: Any) -> ChatRequest:
    return parse_json(json.dumps({"messages": [USER]} | fields).encode(), ChatRequest)


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [function(name) for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.parametrize(
    ("sent", "choice", "callable_tools"),
    [
        (None, ToolChoice("auto"), ["read", "write"]),
        ("auto", ToolChoice("auto"), ["read", "write"]),
        ("none", ToolChoice("none"), []),
        ("required", ToolChoice("required"), ["read", "write"]),
        (function("write"), ToolChoice("required", frozenset({"write"}), many=False), ["write"]),
        (allowed("auto", "read"), ToolChoice("auto", frozenset({"read"})), ["read"]),
        (allowed("required", "write", "read"), ToolChoice("required", frozenset({"read", "write"})), ["read", "write"]),
    ],
)
def test_a_tool_choice_says_what_may_be_called_and_whether_it_must(
    sent: Any, choice: ToolChoice, callable_tools: list[str]
) -> None:
    body = chat(tools=TOOLS, tool_choice=sent)
    assert body.choice == choice
    assert [tool["function"]["name"] for tool in body.choice.allowed(TOOLS)] == callable_tools


def test_allowed_tools_leave_the_prompt_as_it_is() -> None:
    assert chat(tools=TOOLS, tool_choice=allowed("auto", "read")).conversation == chat(tools=TOOLS).conversation


@pytest.mark.parametrize("many", [None, True, False])
def test_parallel_calls_are_allowed_unless_they_are_refused(many: bool | None) -> None:
    assert chat(tools=TOOLS, parallel_tool_calls=many).choice.many is (many is not False)


@pytest.mark.parametrize(
    ("fields", "text_format"),
    [
        ({}, None),
        ({"response_format": None, "structured_outputs": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, TextFormat("json_object", "", "response_format")),
        (
            {"response_format": {"type": "json_object", "schema": {"properties": {"b": {}, "a": {}}}}},
            TextFormat("json_schema", json.dumps(SCHEMA), "response_format.schema"),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
                }
            },
            TextFormat("json_schema", json.dumps(SCHEMA), "response_format.json_schema.schema"),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "choice": None}},
            TextFormat("json_schema", json.dumps(SCHEMA), "structured_outputs.json"),
        ),
        ({"structured_outputs": {"json": "{}"}}, TextFormat("json_schema", "{}", "structured_outputs.json")),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            TextFormat("choice", '["a", "b"]', "structured_outputs.choice"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            TextFormat("json_object", "", "structured_outputs.json_object"),
        ),
    ],
)
def test_what_the_text_must_be_is_said_in_two_ways(fields: dict[str, Any], text_format: TextFormat | None) -> None:
    assert chat(**fields).text_format == text_format


BEGUN = [USER, {"role": "assistant", "content": "The answer is"}]
CALLED = [USER, {"role": "assistant", "content": "So:", "tool_calls": [function("read") | {"id": "1"}]}]
CALLED[1]["tool_calls"][0]["function"]["arguments"] = "{}"  # type: ignore[index]


@pytest.mark.parametrize(
    ("fields", "ending"),
    [
        ({}, "reply"),
        ({"add_generation_prompt": False}, "none"),
        ({"messages": BEGUN}, "continue"),
        ({"messages": BEGUN, "continue_final_message": True}, "continue"),
        ({"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}, "continue"),
        ({"messages": BEGUN, "continue_final_message": False}, "reply"),
        ({"messages": BEGUN, "add_generation_prompt": True}, "reply"),
        ({"messages": BEGUN, "add_generation_prompt": False}, "none"),
        ({"messages": [*BEGUN, USER]}, "reply"),
        ({"messages": CALLED}, "reply"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "reply"),
    ],
)
def test_an_assistants_text_at_the_end_is_gone_on_with(fields: dict[str, Any], ending: str) -> None:
    assert chat(**fields).conversation.ending == ending


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_comes_back_by_either_name_and_needs_no_content(name: str) -> None:
    conversation = chat(messages=[USER, {"role": "assistant", name: "hm"}, USER]).conversation
    assert conversation.messages[1].reasoning == "hm"
    assert conversation.messages[1].content == ()


def test_each_part_knows_its_path() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    conversation = chat(messages=[USER, {"role": "user", "content": parts}], tools=TOOLS).conversation
    assert [part.path for message in conversation.messages for part in message.content] == [
        "messages.0.content",
        "messages.1.content.0.text",
        "messages.1.content.1",
    ]
    assert list(conversation.tool_paths) == ["tools.0.function.parameters", "tools.1.function.parameters"]
