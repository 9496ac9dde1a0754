"""Writes tools where they came in the conversation, so that the prompt before them stays as it was.

Chat templates write tools at the beginning only. A tool that a search has found, or that a server offered later, is
written as the template writes a further tool, in the result that named it or in a system message of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property

from msgspec.structs import replace

from diskprefix.daemon.chat.content import lost_results
from diskprefix.daemon.chat.draft import PromptDraft
from diskprefix.daemon.chat.messages import JsonObject, Message, TextPart
from diskprefix.daemon.chat.template import SOME_USER, ChatTemplate
from diskprefix.daemon.chat.template_input import TemplateInput, common_chars

_ANNOUNCED = "You may call these functions, too:\n"
_WITHDRAWN = "You may no longer call these functions: "
_AGAIN = "You may call these functions again: "
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
    """Writes the tools that came late into the messages that they came with, and says which may no longer be called."""
    conversation = draft.conversation
    if not any(message.new_tools or message.withdrawn or message.redefined for message in conversation.messages):
        return draft
    late = {tool["function"]["name"]: tool for tool in conversation.tools or () if _name(tool) in conversation.late}
    are_first = not conversation.first_tools
    text_of_tools = TextOfTools(template)
    offered, withdrawn = {*conversation.tool_names}, set[str]()
    known = offered - conversation.late
    lost = lost_results(conversation)
    messages: list[Message] = []
    for message in conversation.messages:
        named = dict.fromkeys(tool.name for tool in message.new_tools)
        new = [late.pop(name) for name in named if name in late]
        new += message.redefined
        texts = [text_of_tools(new, are_first=are_first)] if new else []
        are_first = are_first and not new
        known |= named.keys() & offered
        again = [name for name in named if name in withdrawn]
        gone = [name for name in message.withdrawn if name in known]
        withdrawn.difference_update(again)
        withdrawn.update(gone)
        texts += [said + ", ".join(names) for said, names in ((_AGAIN, again), (_WITHDRAWN, gone)) if names]
        parts = tuple(TextPart(text, message.path, offers_tools=True) for text in texts)
        is_left_out = message.role == "tool" and message.tool_call_id in lost
        if parts and (message.role == "assistant" or is_left_out):
            # A search that another server ran, or its summary; or a result that is not part of the prompt.
            own = Message(role="system", content=parts, new_tools=message.new_tools, path=message.path)
            messages += [own, message]
        elif parts or message.content or message.role != "system":
            # What a tool returns is followed by tools; a question is at the end.
            content = (*parts, *message.content) if message.role == "user" else (*message.content, *parts)
            messages.append(replace(message, content=content))
    return replace(draft, conversation=replace(conversation, messages=messages))


class TextOfTools:
    """The texts with which a template offers further tools."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._before: dict[bool, str] = {}

    def __call__(self, tools: Sequence[JsonObject], *, are_first: bool) -> str:
        """Returns the text of `tools`; if they `are_first`, all that the template writes with tools, so that the model
        knows how to call them. A template that writes no tools gets them as JSON."""
        before = [] if are_first else [_OTHER]
        if are_first not in self._before:
            self._before[are_first] = self._write(before)
        without, written = self._before[are_first], self._write([*before, *tools])
        begin = common_chars(without, written)
        end = common_chars(without[begin:][::-1], written[begin:][::-1])
        text = self._special.sub("", written[begin : len(written) - end]).strip(_AROUND)
        if not all(_name(tool) in text for tool in tools):
            text = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return text if are_first else _ANNOUNCED + text

    def _write(self, offered: Sequence[JsonObject]) -> str:
        template = self._template
        messages = [SOME_USER] if template.refuses_system else [_SYSTEM, SOME_USER]
        # Some tokenizers have a template of its own for conversations with tools, which writes other instructions, too.
        no_tools: list[JsonObject] | None = None if template.source_for([]) == template.source_for(None) else []
        return template.try_render(TemplateInput(messages, [*offered] or no_tools, {}), "none")

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """The tokens of the template, which spell nothing in the text of a message."""
        tokens = sorted(filter(str.strip, self._template.special), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or "(?!)")


def _name(tool: JsonObject) -> str:
    return str(tool["function"]["name"])
