"""Conversations as clients send them to OpenAI's chat API, for comparisons of chat templates."""

from __future__ import annotations

import base64
import json
from typing import Any, TypeAlias

import msgspec

from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.server.body import parse_json

Message: TypeAlias = dict[str, Any]

SYSTEM = {"role": "system", "content": "You are a weather assistant. Answer in one line."}
NUDGE = {"role": "system", "content": "The user is in a hurry."}
_CITY = {"type": "string", "description": 'Its name, such as "Zürich".'}
WEATHER: Message = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city on a day, <b>without</b> its wind & waves.",
        "parameters": {
            "type": "object",
            "properties": {"city": _CITY, "day": {"type": "string", "enum": ["today", "tomorrow"]}},
            "required": ["city"],
        },
    },
}
_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsYWUkAAAAABJRU5ErkJggg=="
)
PICTURE = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(_PIXEL).decode()}"}}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def reply(text: str, thoughts: str | None = None) -> Message:
    return {"role": "assistant", "content": text} | ({} if thoughts is None else {"reasoning_content": thoughts})


def call(*cities: str, thoughts: str | None = None) -> Message:
    calls = [
        {
            "id": f"call_{city.lower()}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": json.dumps({"city": city, "day": "today"})},
        }
        for city in cities
    ]
    return reply("", thoughts) | {"content": None, "tool_calls": calls}


def result(city: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{city.lower()}", "content": text}


def parts(text: str, *others: Message) -> Message:
    return {"role": "user", "content": [{"type": "text", "text": text}, *others]}


QUESTION = user("How is the weather in my cities? I live in Oslo and work in Rome.")
GREETING = [SYSTEM, user("Hello"), reply("Hi! How can I help?")]
LOOP = [*GREETING, QUESTION, call("Oslo"), result("Oslo", '{"sky": "rain", "degrees": 4.0}')]
THOUGHTFUL = [
    *(SYSTEM, user("Hello"), reply("Hi! How can I help?", "They greet me.\nI greet them."), QUESTION),
    *(call("Oslo", thoughts="Oslo first."), result("Oslo", "rain"), call("Rome", thoughts="Now Rome.")),
    result("Rome", "sun"),
]


class Case(msgspec.Struct, frozen=True):
    """A conversation, and whether tools are offered."""

    messages: list[Message]
    has_tools: bool = False

    @property
    def tools(self) -> list[Message] | None:
        return [WEATHER] if self.has_tools else None

    @property
    def conversation(self) -> Conversation:
        """The conversation as the daemon reads it from a client's body."""
        body = {"messages": self.messages} | ({"tools": self.tools} if self.has_tools else {})
        return parse_json(json.dumps(body).encode(), ChatRequest).conversation


CASES = {
    "chat": Case([*GREETING, QUESTION]),
    "no system message": Case([*GREETING[1:], QUESTION]),
    "tools": Case([SYSTEM, QUESTION], True),
    "call and result": Case(LOOP, True),
    "two calls at once": Case(
        [SYSTEM, QUESTION, call("Oslo", "Rome"), result("Oslo", "rain"), result("Rome", "sun")], True
    ),
    "after the results": Case([*LOOP, reply("Rain."), user("And tomorrow?")], True),
    "thoughts": Case(THOUGHTFUL, True),
    "thoughts of earlier turns": Case(
        [*THOUGHTFUL, reply("Rain and sun.", "Both known."), user("And tomorrow?")], True
    ),
    "late system message": Case([*GREETING, NUDGE, QUESTION]),
    "text in parts": Case([*GREETING, parts("How is the weather", {"type": "text", "text": "in my cities?"})]),
    "picture": Case([*GREETING, parts("What is the weather here?", PICTURE)]),
}
"""Conversations that end where a reply begins."""
