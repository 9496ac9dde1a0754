"""Chooses the format that reads a call back from a template's text, and the form of calls that the template accepts."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import NamedTuple

import regex
from msgspec.structs import replace

from diskprefix.daemon.chat.messages import JsonObject
from diskprefix.daemon.chat.output.call_grammar import CallGrammar
from diskprefix.daemon.chat.output.call_values import OfferedTools
from diskprefix.daemon.chat.output.families import FAMILIES, NONE, THOUGHTS, Family
from diskprefix.daemon.chat.output.format import OutputParser, PlainParser, ThoughtTags, ToolCallBegin
from diskprefix.daemon.chat.output.parsers import ChannelParser, FamilyParser
from diskprefix.daemon.chat.replay import Turn
from diskprefix.daemon.chat.template_input import CallIds, MessageForm, common_chars
from diskprefix.errors import InvalidRequest
from diskprefix.values import NO_ASKER, Asker

log = logging.getLogger("diskprefix")


@dataclass(frozen=True)
class OutputFormat:
    """The format of the replies of one chat template, found when the model is loaded. Thread-safe."""

    family: Family = NONE
    thoughts: tuple[tuple[str, str], ...] = THOUGHTS[:1]
    """The pairs of tags around reasoning that the parser reads."""
    thought: ThoughtTags | None = None
    """The template's pair; None if the template has no reasoning."""
    token_ids: Mapping[str, int] = field(default_factory=dict)
    """The ids of the tokenizer's added tokens that are tags of this format."""
    written: str = ""
    """The known call in the chat template's form, if it writes calls."""
    asker: Asker = NO_ASKER
    """Whose tools these are: tenants share no compiled patterns."""

    def of(self, asker: Asker) -> OutputFormat:
        """Returns the format for the tools of an asker."""
        mine = copy(self)
        object.__setattr__(mine, "asker", asker)
        return mine

    @property
    def holds_calls(self) -> bool:
        """True if the grammar of calls accepts the known call in the template's form, or does not find its beginning.
        Another grammar would force the model out of the form that it was trained on."""
        return _holds_call(self.family, self.written)

    @property
    def name(self) -> str:
        return self.family.name

    @property
    def special_tokens(self) -> frozenset[str]:
        """The special tokens that the engine must emit as text, because the parser reads them."""
        return frozenset(self.token_ids)

    def parser(self, tools: Sequence[JsonObject], prompt_end: str) -> OutputParser:
        """Returns the parser of one reply. Without `tools`, in the form of OpenAI's API, calls are content. The last 64
        or more characters of the prompt, `prompt_end`, show whether the template opened a thought."""
        if channels := self.family.channels:
            return ChannelParser(self.family, channels, OfferedTools(tools), prompt_end, self.asker)
        return FamilyParser(self.family, self.thoughts, OfferedTools(tools), prompt_end)

    def call_grammar(self, tools: Sequence[JsonObject], *, many: bool) -> str:
        """Returns a Lark grammar, as llguidance reads it, of one call or (`many`) of one or more calls of `tools`."""
        return CallGrammar(self.family, tools, self.token_ids).forced(many=many)

    def beginning_of_calls(self, tools: Sequence[JsonObject]) -> regex.Pattern[str] | None:
        """Returns the pattern of a text with which a call of `tools` begins, None if replies have no calls."""
        return CallGrammar(self.family, tools, self.token_ids, self.asker).beginning

    def begun_grammar(self, tools: Sequence[JsonObject]) -> str:
        """Returns the grammar of calls, beginning with such a text."""
        return CallGrammar(self.family, tools, self.token_ids).begun()

    def no_call_grammar(self, tools: Sequence[JsonObject]) -> str:
        return CallGrammar(self.family, tools, self.token_ids).forbidden()


@cache
def _holds_call(family: Family, written: str) -> bool:
    from llguidance import LLMatcher, LLTokenizer

    grammar = CallGrammar(family, _TOOLS, {})
    if (match := grammar.beginning.search(written)) is None:
        return True
    matcher = LLMatcher(LLTokenizer("byte"), grammar.begun(), log_level=0)
    begun = f"{match.lastindex or match[0]}{written[match.end() :]}"
    return any(matcher.consume_token(byte) and matcher.is_accepting() for byte in begun.encode())


class PlainText(OutputFormat):
    """The format of replies without reasoning and calls."""

    def parser(self, tools: Sequence[JsonObject], prompt_end: str) -> OutputParser:  # noqa: ARG002
        return PlainParser()

    def call_grammar(self, tools: Sequence[JsonObject], *, many: bool) -> str:  # noqa: ARG002
        raise InvalidRequest.at("tool_choice", "this model's chat template has no tool calls")

    def beginning_of_calls(self, tools: Sequence[JsonObject]) -> None:  # noqa: ARG002
        return None

    def no_call_grammar(self, tools: Sequence[JsonObject]) -> str:  # noqa: ARG002
        return "start: /(?s:.*)/\n"


Render = Callable[[list[JsonObject], list[JsonObject], bool], str]
"""Renders messages and tools, with or without the beginning of a reply. Returns "" if the template refuses them."""

_NAME, _OTHER_NAME = "probe_tool", "another_one"
_ARGUMENTS: JsonObject = {"text": "some text", "count": 7}
_THOUGHT, _ANSWER = "known reasoning", "known answer"
_PROPERTIES = {"text": {"type": "string", "description": "a"}, "count": {"type": "integer", "description": "b"}}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": ["text", "count"]}
_TOOLS: list[JsonObject] = [
    {"type": "function", "function": {"name": _NAME, "description": "A tool.", "parameters": _PARAMETERS}}
]
_USER: JsonObject = {"role": "user", "content": "A question"}
_SHORT_ID, _LONG_ID = "abcdefgh1", "call_0123456789abcdef"
_RESULT: JsonObject = {"role": "tool", "tool_call_id": _SHORT_ID, "content": "a result"}
"""As clients send it: without the name of the tool."""
_CALL_IDS: tuple[CallIds, ...] = ("any", "named")
_FORMS = [
    MessageForm(null_content=null, text_arguments=text, call_ids=ids)
    for ids, null, text in product(_CALL_IDS, (False, True), (False, True))
]


class Chosen(NamedTuple):
    """The format of a model's replies, and the form of messages that its template accepts."""

    format: OutputFormat
    form: MessageForm


def choose_format(template: str, render: Render, *, special: Collection[str], added: Mapping[str, int]) -> Chosen:
    """Returns the format of a chat template. `added` has the ids of added tokens; tokens in `special` are not shown."""
    written, dropped = [], _answer_tags(render)
    for form in _FORMS:
        if not (replies := list(_replies(render, form))):
            continue
        written.append(form)
        candidates = list(_candidates(template, replies, added, dropped))
        for prompt, reply in replies:
            for format in candidates:
                if _is_verified(format, prompt, reply, special):
                    return Chosen(dataclasses.replace(format, written=reply), _completed(form, render))
    if written:
        log.warning("the chat template writes tool calls in a format that is not known; only calls as JSON are found")
        return Chosen(_family_format(NONE, template, added, dropped), _completed(written[0], render))
    shown = render([_USER], _TOOLS, True)
    family = _named_family(template, special if _NAME in shown else ())
    return Chosen(_family_format(family, template, added, dropped), MessageForm())


def _replies(
    render: Render, form: MessageForm, arguments: object = _ARGUMENTS, call_id: str = _SHORT_ID
) -> Iterator[tuple[str, str]]:
    """Yields pairs of a prompt and the call after it in the rendering, with and without reasoning and a result. Only
    the call can have the tool's name: its result has another."""
    prompt = render([_USER], _TOOLS, True)
    result: JsonObject = {**_RESULT, "tool_call_id": call_id, "name": _OTHER_NAME}
    for thoughts in ({"reasoning_content": _THOUGHT, "thinking": _THOUGHT}, {}):
        message = {**_calling(arguments, call_id), **thoughts}
        for after in ([], [result]):
            whole = render(form.applied([_USER, message, *after]), _TOOLS, False)
            before, reply = _parted(prompt, whole)
            if _NAME in reply:
                yield before, reply


def _completed(form: MessageForm, render: Render) -> MessageForm:
    """Returns the form for calls with any id and any arguments, and for results as clients send them."""
    any_text = any(_replies(render, form, arguments="no JSON"))
    any_id = any(_replies(render, form, call_id=_LONG_ID))
    messages: list[JsonObject] = [_USER, _calling(_ARGUMENTS, _SHORT_ID), _RESULT]
    without, named = (
        render(each.applied(messages), _TOOLS, False) for each in (form, replace(form, named_results=True))
    )
    ids = form.call_ids if any_id else "short"
    return replace(form, objects_only=not any_text, call_ids=ids, named_results=bool(named and not without))


def _calling(arguments: object, call_id: str) -> JsonObject:
    """Returns a message that calls the known tool."""
    call = {"id": call_id, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _parted(prompt: str, whole: str) -> tuple[str, str]:
    """Splits a text into prompt and reply: after the text shared with `prompt`, but not inside a tag. If the end of the
    prompt follows again (the name of a role, the end of a thought), it is not part of the reply."""
    if whole.startswith(prompt):
        return prompt, whole[len(prompt) :]
    common = common_chars(prompt, whole)
    cut = max(whole.rfind(char, 0, common) for char in "\n>]") + 1
    cut += next((len(prompt) - at for at in range(cut, len(prompt)) if whole.startswith(prompt[at:], cut)), 0)
    return whole[:cut], whole[cut:]


def _named_family(template: str, special: Iterable[str]) -> Family:
    """Returns the family whose tags are in a template that does not write calls, or among the special tokens. Families
    with tags at both ends come first, since others share a part of these tags."""
    named = "\n".join([template, *special])
    for family in sorted(FAMILIES, key=lambda family: not family.ends):
        wanted = [texts for texts in (family.begins, family.ends, family.signs) if texts]
        is_named = family.begins and all(any(text in named for text in texts) for texts in wanted)
        if is_named and not family.channels:
            log.info("the chat template writes no tool calls; by its tags, the format is %s", family.name)
            return family
    return NONE


def _answer_tags(render: Render) -> tuple[str, ...]:
    """Returns the tags that the template writes around each answer, as ERNIE 4.5's template does; () for none."""
    text = render([_USER, {"role": "assistant", "content": _ANSWER}], [], False)
    match = re.search(rf"(<(\w+)>)\s*{_ANSWER}\s*(</\2>)", text)
    return () if match is None else (match[1], match[3])


def _candidates(
    template: str, replies: list[tuple[str, str]], added: Mapping[str, int], dropped: tuple[str, ...]
) -> Iterator[OutputFormat]:
    written = "".join(reply for _, reply in replies)
    shown = "\n".join([template, *map("".join, replies)])
    for family in FAMILIES:
        signs = family.signs or family.begins
        if all(sign in shown for sign in signs) if family.channels else any(sign in written for sign in signs):
            yield _family_format(family, shown, added, dropped)


def _family_format(family: Family, shown: str, added: Mapping[str, int], dropped: tuple[str, ...]) -> OutputFormat:
    """Returns the format of a family, with the tags of reasoning in `shown`. `dropped` are the tags around answers."""
    family = replace(family, dropped=(*family.dropped, *dropped))
    known = tuple(
        (begin, end) for begin, end in THOUGHTS if end in shown and (begin in shown or begin == THOUGHTS[0][0])
    )
    thoughts = known if THOUGHTS[0] in known else (*known, THOUGHTS[0])
    tags = "\n".join([*family.tags, *(tag for pair in thoughts for tag in pair if not family.channels)])
    return OutputFormat(
        family,
        thoughts,
        thought=family.thought or (ThoughtTags(*known[0]) if known and not family.channels else None),
        token_ids={token: index for token, index in added.items() if token in tags},
    )


def _is_verified(format: OutputFormat, prompt: str, reply: str, special: Collection[str]) -> bool:
    """Returns whether `format` reads the known call in a reply, and before it at most the known reasoning."""
    for token in set(special) - format.special_tokens:
        reply = reply.replace(token, "")
    parser = format.parser(_TOOLS, prompt[-200:])
    deltas = [*parser.feed(reply), *parser.finish()]
    begun = next((at for at, delta in enumerate(deltas) if isinstance(delta, ToolCallBegin)), 0)
    before, whole = Turn.of_deltas(deltas[:begun]), Turn.of_deltas(deltas)
    if before.content.strip() or before.reasoning not in ("", _THOUGHT):
        return False
    try:
        return [(name, json.loads(arguments)) for name, arguments in whole.calls] == [(_NAME, _ARGUMENTS)]
    except ValueError:
        return False
