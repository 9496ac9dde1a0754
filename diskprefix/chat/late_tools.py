"""Writes tools where they came in the conversation, so that the prompt before them stays as it was.

Chat templates write tools at the beginning only. A tool that a search has found, or that a server offered later, is
written as the template writes a further tool, in the result that named it or in a system message of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from msgspec.structs import replace

from diskprefix.chat.draft import PromptDraft
from diskprefix.chat.messages import JsonObject, Message, TextPart
from diskprefix.chat.template import SOME_USER, ChatTemplate
from diskprefix.chat.template_input import TemplateInput, common_chars

_ANNOUNCED = "You may call these functions, too:\n"
_OTHER: JsonObject = {
    "type": "function",
    "function": {
        "name": "diskprefix",
        "description": "Nothing.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
    },
}
"""A tool before those whose text is wanted."""
_SYSTEM: JsonObject = {"role": "system", "content": "Rules."}
_AROUND = " \t\r\n,;"
"""Characters that templates write between tools."""


def place_tools(template: ChatTemplate, draft: PromptDraft) -> PromptDraft:
    """Writes the tools that came late into the messages that they came with."""
    conversation = draft.conversation
    if not any(message.new_tools for message in conversation.messages):
        return draft
    late = {tool["function"]["name"]: tool for tool in conversation.tools or () if _name(tool) in conversation.late}
    are_first = not conversation.first_tools
    messages: list[Message] = []
    for message in conversation.messages:
        new = [late.pop(name) for name in dict.fromkeys(message.new_tools) if name in late]
        if not new:
            # One that brought nothing but tools which the template writes.
            messages += [message] if message.content or message.role != "system" else []
            continue
        part = TextPart(text_of_tools(template, new, are_first=are_first), message.path)
        are_first = False
        if message.role == "assistant":
            # A search that another server ran.
            messages += [Message(role="system", content=(part,), path=message.path), message]
        else:
            messages.append(replace(message, content=(*message.content, part)))
    return replace(draft, conversation=replace(conversation, messages=messages))


def text_of_tools(template: ChatTemplate, tools: Sequence[JsonObject], *, are_first: bool) -> str:
    """Returns the text with which a template offers further tools; if they `are_first`, all that it writes with tools,
    so that the model knows how to call them. A template that writes no tools gets them as JSON."""
    before = [] if are_first else [_OTHER]
    messages = [SOME_USER] if template.refuses_system else [_SYSTEM, SOME_USER]

    # Some tokenizers have a template of its own for conversations with tools, which writes other instructions, too.
    no_tools: list[JsonObject] | None = None if template.source_for([]) == template.source_for(None) else []

    def write(offered: Sequence[JsonObject]) -> str:
        return template.try_render(TemplateInput(messages, [*offered] or no_tools, {}), "none")

    without, written = write(before), write([*before, *tools])
    begin = common_chars(without, written)
    end = common_chars(without[begin:][::-1], written[begin:][::-1])
    # Tokens of the template spell nothing in the text of a message.
    special = "|".join(map(re.escape, sorted(filter(str.strip, template.special), key=len, reverse=True))) or "(?!)"
    text = re.sub(special, "", written[begin : len(written) - end]).strip(_AROUND)
    if not all(_name(tool) in text for tool in tools):
        text = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return text if are_first else _ANNOUNCED + text


def _name(tool: JsonObject) -> str:
    return str(tool["function"]["name"])
