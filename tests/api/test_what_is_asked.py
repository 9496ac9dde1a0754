"""Tool choices and formats of the text, as each API says them, in neutral words."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from diskprefix.api.anthropic import MessagesRequest
from diskprefix.api.asked import TextFormat, ToolChoice
from diskprefix.api.openai_chat import ChatRequest
from diskprefix.api.responses import ResponseRequest
from diskprefix.server.body import parse_json

USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
NAMES = ("read", "write")
APIS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "chat": (ChatRequest, {"messages": [USER]}),
    "messages": (MessagesRequest, {"max_tokens": 8, "messages": [USER]}),
    "responses": (ResponseRequest, {"input": "hello"}),
}


def body(api: str, **fields: Any) -> Any:
    model, base = APIS[api]
    return parse_json(json.dumps(base | fields).encode(), model)


def tools(api: str, **fields: Any) -> list[dict[str, Any]]:
    """Two tools, the first of which has these fields."""
    described: list[dict[str, Any]] = [{"name": name} for name in NAMES]
    described[0] |= fields
    if api == "chat":
        return [{"type": "function", "function": one} for one in described]
    more: dict[str, Any] = {"input_schema": SCHEMA} if api == "messages" else {"type": "function"}
    return [one | more for one in described]


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def some_of_chat(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function(name) for name in names]}}


def some(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


AUTO, REQUIRED, NONE = ToolChoice("auto"), ToolChoice("required"), ToolChoice("none")
READ, WRITE = frozenset({"read"}), frozenset({"write"})
CHOICES: list[tuple[str, dict[str, Any], ToolChoice]] = [
    ("chat", {}, AUTO),
    ("chat", {"tool_choice": "auto", "parallel_tool_calls": True}, AUTO),
    ("chat", {"parallel_tool_calls": False}, replace(AUTO, many=False)),
    ("chat", {"tool_choice": "none"}, NONE),
    ("chat", {"tool_choice": "required"}, REQUIRED),
    ("chat", {"tool_choice": function("write")}, replace(REQUIRED, names=WRITE, many=False)),
    ("chat", {"tool_choice": some_of_chat("auto", "read")}, replace(AUTO, names=READ)),
    ("chat", {"tool_choice": some_of_chat("required", "write", "read")}, replace(REQUIRED, names=READ | WRITE)),
    ("messages", {}, AUTO),
    ("messages", {"tool_choice": {"type": "auto"}}, AUTO),
    ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, replace(AUTO, many=False)),
    ("messages", {"tool_choice": {"type": "any"}}, REQUIRED),
    ("messages", {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}, replace(REQUIRED, many=False)),
    ("messages", {"tool_choice": {"type": "tool", "name": "write"}}, replace(REQUIRED, names=WRITE, many=False)),
    ("messages", {"tool_choice": {"type": "none"}}, NONE),
    ("responses", {}, AUTO),
    ("responses", {"parallel_tool_calls": False}, replace(AUTO, many=False)),
    ("responses", {"tool_choice": "none"}, NONE),
    ("responses", {"tool_choice": "required"}, REQUIRED),
    ("responses", {"tool_choice": {"type": "function", "name": "read"}}, replace(REQUIRED, names=READ, many=False)),
    ("responses", {"tool_choice": some("auto", "read")}, replace(AUTO, names=READ)),
    ("responses", {"tool_choice": some("required", "read")}, replace(REQUIRED, names=READ)),
]


@pytest.mark.parametrize(("api", "fields", "choice"), CHOICES)
def test_a_tool_choice_says_what_may_be_called_and_whether_it_must(
    api: str, fields: dict[str, Any], choice: ToolChoice
) -> None:
    assert body(api, tools=tools(api), **fields).choice == choice
    strict = body(api, tools=tools(api, strict=True), **fields).choice.strict
    # The responses API leaves the tools out first.
    assert strict == (frozenset() if api == "responses" and choice.mode == "none" else READ)
    allowed = [tool["function"]["name"] for tool in choice.allowed(tools("chat"))]
    assert allowed == [name for name in NAMES if choice.mode != "none" and name in (choice.names or NAMES)]


@pytest.mark.parametrize(
    ("api", "choice"), [("chat", some_of_chat("auto", "read")), ("messages", {"type": "any"})], ids=["chat", "messages"]
)
def test_tools_that_may_not_be_called_stay_in_the_prompt_unless_none_may(api: str, choice: Any) -> None:
    offered = body(api, tools=tools(api)).conversation
    assert body(api, tools=tools(api), tool_choice=choice).conversation == offered
    none: Any = "none" if api == "chat" else {"type": "none"}
    assert body(api, tools=tools(api), tool_choice=none).conversation == replace(offered, tools=None, tool_paths=[])


def follows(path: str, schema: str = json.dumps(SCHEMA)) -> TextFormat:
    return TextFormat("json_schema", schema, path)


OPEN = {"schema": {"properties": SCHEMA["properties"]}}
"""That it is an object need not be said."""
CHAT_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
OWN_FORMAT = {"type": "json_schema", "schema": SCHEMA}
TEXT_FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
FORMATS: list[tuple[str, dict[str, Any], TextFormat | None]] = [
    ("chat", {}, None),
    ("chat", {"response_format": None, "structured_outputs": None}, None),
    ("chat", {"response_format": {"type": "text"}}, None),
    ("chat", {"response_format": {"type": "json_object"}}, TextFormat("json_object", "", "response_format")),
    ("chat", {"response_format": {"type": "json_object"} | OPEN}, follows("response_format.schema")),
    ("chat", {"response_format": CHAT_FORMAT}, follows("response_format.json_schema.schema")),
    ("chat", {"structured_outputs": {"json": SCHEMA, "choice": None}}, follows("structured_outputs.json")),
    ("chat", {"structured_outputs": {"json": "{}"}}, follows("structured_outputs.json", "{}")),
    ("chat", {"structured_outputs": {"choice": ["a"]}}, TextFormat("choice", '["a"]', "structured_outputs.choice")),
    (
        "chat",
        {"structured_outputs": {"json_object": True}},
        TextFormat("json_object", "", "structured_outputs.json_object"),
    ),
    ("messages", {}, None),
    ("messages", {"output_config": {"format": OWN_FORMAT}}, follows("output_config.format.schema")),
    ("messages", {"output_format": OWN_FORMAT}, follows("output_format.schema")),
    ("messages", {"structured_outputs": {"choice": ["a"]}}, TextFormat("choice", '["a"]', "structured_outputs.choice")),
    ("responses", {"text": None}, None),
    ("responses", {"text": {"verbosity": "low"}}, None),
    ("responses", {"text": {"format": {"type": "text"}}}, None),
    ("responses", {"text": {"format": {"type": "json_object"}}}, TextFormat("json_object", "", "text.format")),
    ("responses", {"text": {"format": TEXT_FORMAT}}, follows("text.format.schema")),
]


@pytest.mark.parametrize(("api", "fields", "text_format"), FORMATS)
def test_what_the_text_must_be(api: str, fields: dict[str, Any], text_format: TextFormat | None) -> None:
    assert body(api, **fields).text_format == text_format
