"""Chat bodies in neutral words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diskprefix.api.openai_chat import ChatRequest
from diskprefix.server.body import parse_json

USER = {"role": "user", "content": "hello"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("read", "write")]


def chat(**fields: Any) -> ChatRequest:
    return parse_json(json.dumps({"messages": [USER]} | fields).encode(), ChatRequest)


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


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
