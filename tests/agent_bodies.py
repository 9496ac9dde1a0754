"""Conversations in the form in which agents were seen to send them. The texts are made up; shapes and sizes are theirs.

Claude Code 2.1 sends three system texts, of which the first is a billing header that differs in every request, and 24
tools; each turn adds to the messages of the turn before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from diskprefix.daemon.chat.messages import Conversation, JsonObject, Message, TextPart

WORDS = "a the file test path shell line code tool reads writes runs output error when must not user task list"


def words(seed: int, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS.split(), k=count))


def billing_header(request: int) -> str:
    digits = random.Random(request)
    return f"x-anthropic-billing-header: cc_version=2.1.39.{digits.randrange(4096):03x}; cc_entrypoint=cli; " + (
        f"cch={digits.randrange(1 << 20):05x};"
    )


def tool(name: str, seed: int) -> JsonObject:
    properties = {
        "file_path": {"type": "string", "description": words(seed, 8)},
        "content": {"type": "string", "description": words(seed + 1, 8)},
        "limit": {"type": "integer", "minimum": 1, "default": 10},
    }
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": words(seed + 2, 30),
            "parameters": {"type": "object", "properties": properties, "required": ["file_path", "content"]},
        },
    }


TOOLS = [tool(name, 10 * index) for index, name in enumerate(["Read", "Write", "Bash", "Grep", "Task", "WebFetch"])]


def said(role: Any, text: str, path: str = "messages.1") -> Message:
    return Message(role=role, content=[TextPart(text, path)], path=path)


def asked(system: Sequence[str], *texts: str, tools: list[JsonObject] | None = None) -> Conversation:
    """A conversation with a system message of several texts; users and the assistant speak in turn."""
    parts = [TextPart(text, f"system.{index}") for index, text in enumerate(system)]
    messages = [
        said("assistant" if index % 2 else "user", text, f"messages.{index}") for index, text in enumerate(texts)
    ]
    return Conversation(messages=[Message(role="system", content=parts, path="system"), *messages], tools=tools)


def shuffled(value: Any, order: random.Random) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(value[key], order) for key in order.sample(list(value), len(value))}
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value
