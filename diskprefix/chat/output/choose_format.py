"""Chooses the format that a chat template writes: a known call is rendered, and must be parsed back.

The same renderings show the form in which the template takes calls.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple

from diskprefix.chat.messages import JsonObject
from diskprefix.chat.output.call_grammar import call_grammar
from diskprefix.chat.output.call_values import OfferedTools
from diskprefix.chat.output.families import ATEM, FAMILIES, NONE, THOUGHTS, Body, Family, Written
from diskprefix.chat.output.format import (
    ContentDelta,
    OutputDelta,
    OutputFormat,
    OutputParser,
    ReasoningDelta,
    ThoughtTags,
    ToolCallBegin,
    ToolCallDelta,
)
from diskprefix.chat.output.parsers import ChannelParser, FamilyParser, FunctionaryParser, HarmonyParser, MuseParser
from diskprefix.chat.template_input import MessageForm, common_chars


@dataclass(frozen=True)
class FamilyFormat:
    """A format out of the table of `families.py`. `thoughts` are the tags around reasoning that are read, a begin and
    an end each; `thought` are those of the template.

    `token_ids` has the added tokens of the tokenizer that are tags of this format, special ones or not: a model
    writes the token.
    """

    family: Family = NONE
    thoughts: tuple[tuple[str, str], ...] = (("<think>", "</think>"),)
    thought: ThoughtTags | None = None
    token_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.family.name

    @property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(self.token_ids)

    def parser(self, tools: Sequence[JsonObject], prompt_end: str) -> OutputParser:
        return FamilyParser(self.family, self.thoughts, OfferedTools(tools), prompt_end)

    def call_grammar(self, tools: Sequence[JsonObject], *, many: bool) -> str:
        calls = self.family.calls
        return call_grammar(calls.body, calls.written, tools, self.token_ids, many=many)


@dataclass(frozen=True)
class ChannelFormat:
    """A format of messages with headers. `marks` stand in the template or in what it writes. Else as `FamilyFormat`."""

    name: str
    marks: tuple[str, ...]
    new_parser: type[ChannelParser]
    body: Body
    written: Written
    thought: ThoughtTags | None = None
    can_call_twice: bool = True
    token_ids: Mapping[str, int] = field(default_factory=dict)

    @property
    def special_tokens(self) -> frozenset[str]:
        return frozenset(self.new_parser.tags)

    def parser(self, tools: Sequence[JsonObject], prompt_end: str) -> OutputParser:
        return self.new_parser(OfferedTools(tools), prompt_end)

    def call_grammar(self, tools: Sequence[JsonObject], *, many: bool) -> str:
        many = many and self.can_call_twice
        return call_grammar(self.body, self.written, tools, self.token_ids, many=many)


CHANNELS = (
    ChannelFormat(
        "harmony",
        ("<|channel|>", "<|message|>"),
        HarmonyParser,
        "json",
        Written("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS"),
        # The tag that ends reasoning is followed by the header of the next message, which no schema knows.
        thought=ThoughtTags(None, "<|channel|>final<|message|>"),
        # A call ends the reply.
        can_call_twice=False,
    ),
    ChannelFormat(
        "muse",
        ("<|message|>", *ATEM.begins),
        MuseParser,
        ATEM.body,
        Written(f" to=NAME<|message|>{ATEM.written.call}", ATEM.written.argument, between="<|eom|><|start|>assistant"),
        thought=ThoughtTags(None, " to=user<|message|>"),
    ),
    ChannelFormat("functionary-3.2", (">>>all",), FunctionaryParser, "json", Written("NAME\nARGUMENTS", between=">>>")),
)


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
_SHORT_ID, _LONG_ID = "abcdefgh1", "call_0123456789abcdef"
_FORMS = [MessageForm(null_content=null, text_arguments=text) for null, text in product((False, True), repeat=2)]


class Chosen(NamedTuple):
    """The format that a model writes, and the form in which its template takes messages."""

    format: OutputFormat
    form: MessageForm


def choose_format(template: str, render: Render, *, special: Collection[str], added: Mapping[str, int]) -> Chosen:
    """Returns the format of a chat template. `added` are the added tokens of the tokenizer with their ids, of which
    `special` are not shown as text."""
    written = []
    for form in _FORMS:
        if not (replies := list(_replies(render, form))):
            continue
        written.append(form)
        candidates = list(_candidates(template, replies, added))
        for prompt, reply in replies:
            for format in candidates:
                if _is_verified(format, prompt, reply, special):
                    return Chosen(format, _completed(form, render))
    if written:
        log.warning("the chat template writes tool calls in a format that is not known; only calls as JSON are found")
        return Chosen(_family_format(NONE, template, added), _completed(written[0], render))
    shown = render([_USER], _TOOLS, True)
    family = _named_family(template, special if _NAME in shown else ())
    return Chosen(_family_format(family, template, added), MessageForm())


def _replies(
    render: Render, form: MessageForm, arguments: object = _ARGUMENTS, call_id: str = _SHORT_ID
) -> Iterator[tuple[str, str]]:
    """Yields a call as the template writes it, behind its prompt: with and without reasoning and a result."""
    prompt = render([_USER], _TOOLS, True)
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    result: JsonObject = {"role": "tool", "tool_call_id": call_id, "name": _NAME, "content": "a result"}
    for thoughts in ({"reasoning_content": _THOUGHT, "thinking": _THOUGHT}, {}):
        message: JsonObject = {"role": "assistant", "content": "", "tool_calls": [call], **thoughts}
        for after in ([], [result]):
            whole = render(form.applied([_USER, message, *after]), _TOOLS, False)
            before, reply = _parted(prompt, whole)
            if _NAME in reply:
                yield before, reply


def _completed(form: MessageForm, render: Render) -> MessageForm:
    """Adds what the template needs in order to write any call: whatever its id, and whatever the model wrote."""
    any_text = any(_replies(render, form, arguments="no JSON"))
    any_id = any(_replies(render, form, call_id=_LONG_ID))
    return replace(form, objects_only=not any_text, short_ids=not any_id)


def _parted(prompt: str, whole: str) -> tuple[str, str]:
    """Parts a text behind what it has in common with `prompt`, but not inside a tag.

    What ends the prompt and stands there again is no part of the reply: the name of a role, the end of a thought.
    """
    if whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    common = common_chars(prompt, whole)
    cut = max(whole.rfind(mark, 0, common) for mark in "\n>]") + 1
    cut += next((len(prompt) - at for at in range(cut, len(prompt)) if whole.startswith(prompt[at:], cut)), 0)
    return whole[:cut], whole[cut:]


def _named_family(template: str, special: Iterable[str]) -> Family:
    """Returns the family whose tags a template names that does not write calls, or the tokenizer as special tokens.

    The families with the most tags come first, since others have a part of them.
    """
    named = "\n".join([template, *special])
    for family in sorted(FAMILIES, key=lambda family: not family.calls.ends):
        calls = family.calls
        wanted = [texts for texts in (calls.begins, calls.ends, family.marks) if texts]
        if calls.begins and all(any(text in named for text in texts) for texts in wanted):
            log.info("the chat template writes no tool calls; by its tags, the format is %s", family.name)
            return family
    return NONE


def _candidates(template: str, replies: list[tuple[str, str]], added: Mapping[str, int]) -> Iterator[OutputFormat]:
    written = "".join(reply for _, reply in replies)
    shown = "\n".join([template, *map("".join, replies)])
    for channels in CHANNELS:
        if all(mark in shown for mark in channels.marks):
            ids = {tag: added[tag] for tag in channels.special_tokens if tag in added}
            yield replace(channels, token_ids=ids)
    for family in FAMILIES:
        if any(mark in written for mark in family.marks or family.calls.begins):
            yield _family_format(family, shown, added)


def _family_format(family: Family, shown: str, added: Mapping[str, int]) -> FamilyFormat:
    """Returns the format of a family with the tags of reasoning in `shown`: the template, and what it writes."""
    known = tuple(
        (begin, end) for begin, end in THOUGHTS if end in shown and (begin in shown or begin == THOUGHTS[0][0])
    )
    thoughts = known if THOUGHTS[0] in known else (*known, THOUGHTS[0])
    tags = "\n".join([*family.tags, *(tag for pair in thoughts for tag in pair)])
    return FamilyFormat(
        family,
        thoughts,
        thought=ThoughtTags(*known[0]) if known else None,
        token_ids={token: index for token, index in added.items() if token in tags},
    )


def _is_verified(format: OutputFormat, prompt: str, reply: str, special: Collection[str]) -> bool:
    """Whether `format` reads the known call out of a reply, and nothing but it and the known reasoning before it."""
    for token in set(special) - format.special_tokens:
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
