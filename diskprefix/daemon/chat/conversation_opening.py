"""The opening of a conversation: its first request, in a form that can be kept and rendered later."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from diskprefix.daemon.chat.messages import Conversation, Message, TextPart


def encode_opening(asked: Conversation) -> tuple[str, bytes] | None:
    """Returns an id and the content of an opening; None for a request that continues a conversation, and for one with
    pictures or late tools. Openings with the same system message, tools and variables have the same id."""
    if (
        asked.has_pictures
        or asked.late
        or asked.before
        or any(message.role == "assistant" for message in asked.messages)
    ):
        return None
    systems = [_fields(message) for message in asked.messages if message.is_system]
    shared: dict[str, Any] = {
        "tools": asked.tools,
        "variables": asked.template_variables,
        "effort": asked.reasoning_effort,
        "thinking": asked.thinking,
        "special_tokens_in_text": asked.special_tokens_in_text,
    }
    id_ = hashlib.blake2b(json.dumps([systems, shared]).encode(), digest_size=16).hexdigest()
    return id_, json.dumps({"messages": [_fields(message) for message in asked.messages], **shared}).encode()


def _fields(message: Message) -> list[Any]:
    return [message.role, [part.text for part in message.texts], message.name, message.tool_call_id]


def decode_opening(content: bytes) -> Conversation:
    """Returns the conversation that `encode_opening` encoded. Raises `ValueError` for other content."""
    try:
        kept = json.loads(content)
        messages = [
            Message(
                role=role,
                content=tuple(TextPart(text, "") for text in texts),
                name=name,
                tool_call_id=call_id,
                path="messages",
            )
            for role, texts, name, call_id in kept["messages"]
        ]
        return Conversation(
            messages=messages,
            tools=kept["tools"],
            template_variables=kept["variables"],
            reasoning_effort=kept["effort"],
            thinking=kept["thinking"],
            special_tokens_in_text=kept["special_tokens_in_text"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an opening: {error}") from error
