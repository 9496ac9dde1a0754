"""Chooses the format that a chat template writes: a known call is rendered, and must be parsed back."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from diskprefix.chat.boundaries import common_chars
from diskprefix.chat.messages import JsonObject
from diskprefix.chat.output.events import ContentDelta, OutputDelta, ReasoningDelta, ToolCallBegin, ToolCallDelta
from diskprefix.chat.output.families import FAMILIES, NONE, THOUGHTS
from diskprefix.chat.output.format import OutputFormat, ThoughtTags
from diskprefix.chat.output.formats import FamilyFormat, HarmonyFormat
from diskprefix.chat.output.harmony import TAGS
from diskprefix.chat.output.syntax import Family

log = logging.getLogger("diskprefix")

Render = Callable[[list[JsonObject], list[JsonObject], bool], str]
"""Renders messages and tools, with or without the beginning of a reply. Returns "" if the template refuses them."""

_NAME = "probe_tool"
_ARGUMENTS: JsonObject = {"text": "some text", "count": 7}
_THOUGHT = "known reasoning"
_PROPERTIES = {"text": {"type": "string", "description": "a"}, "count": {"type": "integer", "description": "b"}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["text", "count"]}
_TOOLS: list[JsonObject] = [
    {"type": "function", "function": {"name": _NAME, "description": "A tool.", "parameters": _PARAMETERS}}
]
_USER: JsonObject = {"role": "user", "content": "A question"}
_RESULT: JsonObject = {"role": "tool", "tool_call_id": "abcdefgh1", "name": _NAME, "content": "a result"}


def choose_format(template: str, render: Render, special: Mapping[str, int]) -> OutputFormat:
    """Returns the format of a chat template. `special`: the special tokens of the tokenizer, with their ids."""
    replies = list(_replies(render))
    candidates = {family.name: format for family, format in _candidates(template, replies, special)}
    for prompt, reply in replies:
        for format in candidates.values():
            if _is_verified(format, prompt, reply, special):
                return format
    if replies:
        log.warning("the chat template writes tool calls in a format that is not known; only calls as JSON are found")
    return _family_format(NONE, template, special)


def _replies(render: Render) -> Iterator[tuple[str, str]]:
    """Yields the known call as the template writes it, behind its prompt. Templates take it in several forms."""
    prompt = render([_USER], _TOOLS, True)
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
        call = {"id": "abcdefgh1", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        for thoughts in ({"reasoning_content": _THOUGHT, "thinking": _THOUGHT}, {}):
            message: JsonObject = {"role": "assistant", "content": "", "tool_calls": [call], **thoughts}
            for after in ([], [_RESULT]):
                whole = render([_USER, message, *after], _TOOLS, False)
                before, reply = _parted(prompt, whole)
                if _NAME in reply:
                    yield before, reply


def _parted(prompt: str, whole: str) -> tuple[str, str]:
    """Parts a text behind what it has in common with `prompt`, and not inside a tag."""
    if whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    common = common_chars(prompt, whole)
    cut = max(whole.rfind(mark, 0, common) for mark in "\n>]") + 1
    return whole[:cut], whole[cut:]


def _candidates(
    template: str, replies: list[tuple[str, str]], special: Mapping[str, int]
) -> Iterator[tuple[Any, OutputFormat]]:
    written = "".join(reply for _, reply in replies)
    if "<|channel|>" in written and "<|message|>" in written:
        yield NONE, HarmonyFormat({tag: special[tag] for tag in TAGS if tag in special})
    for family in FAMILIES:
        if any(mark in written for mark in family.marks or family.calls.begins):
            yield family, _family_format(family, template, special)


def _family_format(family: Family, template: str, special: Mapping[str, int]) -> FamilyFormat:
    known = tuple(pair for pair in THOUGHTS if pair[0] in template or (pair == THOUGHTS[0] and pair[1] in template))
    thoughts = known if THOUGHTS[0] in known else (*known, THOUGHTS[0])
    tags = "\n".join([*family.tags, *(tag for pair in thoughts for tag in pair)])
    return FamilyFormat(
        family,
        thoughts,
        thought=ThoughtTags(*known[0]) if known else None,
        token_ids={token: index for token, index in special.items() if token in tags},
    )


def _is_verified(format: OutputFormat, prompt: str, reply: str, special: Mapping[str, int]) -> bool:
    """Whether `format` reads the known call out of a reply, and nothing but it and the known reasoning before it."""
    for token in special.keys() - format.special_tokens:
        reply = reply.replace(token, "")
    parser = format.parser(_TOOLS, prompt[-200:])
    deltas = [*parser.feed(reply), *parser.finish()]
    begun = next((at for at, delta in enumerate(deltas) if isinstance(delta, ToolCallBegin)), 0)
    return _calls(deltas) == [(_NAME, _ARGUMENTS)] and _is_reasoning(deltas[:begun])


def _is_reasoning(deltas: list[OutputDelta]) -> bool:
    reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    content = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
    return reasoning in ("", _THOUGHT) and not content.strip()


def _calls(deltas: list[OutputDelta]) -> list[tuple[str, object]]:
    begun = {delta.index: delta.name for delta in deltas if isinstance(delta, ToolCallBegin)}
    texts = dict.fromkeys(begun, "")
    for delta in deltas:
        if isinstance(delta, ToolCallDelta):
            texts[delta.index] += delta.arguments
    try:
        return [(name, json.loads(texts[index])) for index, name in begun.items()]
    except ValueError:
        return []
