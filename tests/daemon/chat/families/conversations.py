"""A conversation of an agent with tools, and what clients make of it before they send it again."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.server.body import parse_json
from diskprefix.values import Prompt
from tests.daemon.chat.families.families import Family, renderer_of, tokenizer_of
from tests.daemon.chat.rendering import rendered

Message: TypeAlias = dict[str, Any]
Client: TypeAlias = Callable[[list[Message]], list[Message]]

SYSTEM = {"role": "system", "content": "You are a weather assistant. Answer in one line."}
_PROPERTIES = {
    "city": {"type": "string", "description": "Its name."},
    "day": {"type": "string", "description": "today or tomorrow"},
}
WEATHER_FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather of a city on a day.",
    "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["city", "day"]},
}
WEATHER = {"type": "function", "function": WEATHER_FUNCTION}
THOUGHT = "The user wants the weather.\nI look at the city first."


def call(city: str, call_id: str) -> Message:
    arguments = json.dumps({"city": city, "day": "today"})
    function = {"name": "get_weather", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [_tool_call(call_id, function)]}


def _tool_call(call_id: str, function: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": function}


def result(text: str, call_id: str) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def thinking(reply: str) -> Message:
    return {"role": "assistant", "content": f"<think>\n{THOUGHT}\n</think>\n\n{reply}"}


def body_of(family: Family, messages: list[Message], *, tools: bool = False, **fields: Any) -> ChatRequest:
    if not family.takes_system:
        messages = [message for message in messages if message["role"] != "system"]
    offered = {"tools": [WEATHER]} if tools and family.takes_tools else {}
    return parse_json(json.dumps({"messages": messages} | offered | fields).encode(), ChatRequest)


def prompt_of(family: Family, messages: list[Message], *, tools: bool = False, **fields: Any) -> Prompt:
    return rendered(renderer_of(family), body_of(family, messages, tools=tools, **fields).conversation)


def text_of(family: Family, prompt: Prompt, end: int | None = None) -> str:
    return str(tokenizer_of(family).decode(prompt.token_ids[:end].tolist()))


def token_at(family: Family, prompt: Prompt, position: int) -> str:
    """The token that a cut at `position` follows."""
    return str(tokenizer_of(family).backend_tokenizer.id_to_token(int(prompt.token_ids[position - 1])))


# What clients do to a conversation.


def as_it_is(messages: list[Message]) -> list[Message]:
    return messages


def without_thoughts(messages: list[Message]) -> list[Message]:
    """The client shows the reasoning and sends back the rest."""

    def change(message: Message) -> None:
        message.pop("reasoning_content", None)
        if isinstance(message["content"], str):
            message["content"] = message["content"].rpartition("</think>")[2].lstrip("\n")

    return _changed(messages, change)


def with_arguments_as_objects(messages: list[Message]) -> list[Message]:
    def change(message: Message) -> None:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])

    return _changed(messages, change)


def with_compact_arguments(messages: list[Message]) -> list[Message]:
    def change(message: Message) -> None:
        for call in message.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))

    return _changed(messages, change)


def with_arguments_in_another_order(messages: list[Message]) -> list[Message]:
    def change(message: Message) -> None:
        for call in message.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())))

    return _changed(messages, change)


def trimmed(messages: list[Message]) -> list[Message]:
    def change(message: Message) -> None:
        if isinstance(message["content"], str):
            message["content"] = message["content"].strip()

    return _changed(messages, change)


def in_parts(messages: list[Message]) -> list[Message]:
    def change(message: Message) -> None:
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]

    return _changed(messages, change)


def _changed(messages: Iterable[Message], change: Callable[[Message], None]) -> list[Message]:
    changed = copy.deepcopy(list(messages))
    for message in changed:
        if message["role"] == "assistant":
            change(message)
    return changed


CLIENTS = [
    as_it_is,
    without_thoughts,
    with_arguments_as_objects,
    with_compact_arguments,
    with_arguments_in_another_order,
    trimmed,
    in_parts,
]
