"""What a chat template is given: messages, tools and variables, in the form in which templates take them."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from diskprefix.server.schemas import Content, JsonObject, Message, TextPart, ToolCall

log = logging.getLogger("diskprefix")

PART_SEPARATOR = "\n"
"""Between the text parts of a message."""


class Conversation(NamedTuple):
    """Everything that a template is given."""

    messages: list[JsonObject]
    tools: list[JsonObject] | None
    variables: JsonObject

    @property
    def leading_system(self) -> list[JsonObject]:
        """The system and developer messages before the conversation proper."""
        return list(takewhile(_is_system, self.messages))


def message_for_template(message: Message, developer_is_known: bool) -> JsonObject:
    role = "system" if message.role == "developer" and not developer_is_known else message.role
    rendered: JsonObject = {"role": role, "content": _text_of(message.content)}
    if message.tool_calls:
        rendered["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            rendered[name] = value
    return rendered


def _text_of(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return PART_SEPARATOR.join(part.text for part in content if isinstance(part, TextPart))


def _tool_call(call: ToolCall) -> JsonObject:
    """Templates iterate over the arguments or dump them as JSON, so they get an object where the text is one."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            log.debug("tool call arguments are no JSON; the template gets the text")
    rendered = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return rendered if call.id is None else {"id": call.id, **rendered}


def going_on_otherwise(messages: Sequence[JsonObject], rest: Sequence[JsonObject]) -> list[JsonObject]:
    """`messages`, then a user message that begins differently from `rest`, which really follows them."""
    return [*messages, {"role": "user", "content": another_beginning(rest[0]["content"] if rest else "")}]


def another_beginning(text: str) -> str:
    """A character that `text`, with or without blanks around it, does not begin with."""
    return "y" if text.lstrip().startswith("x") else "x"


def _is_system(message: JsonObject) -> bool:
    return message["role"] in ("system", "developer")
