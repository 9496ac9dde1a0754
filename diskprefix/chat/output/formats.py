"""The formats that implement `OutputFormat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diskprefix.chat.messages import JsonObject
from diskprefix.chat.output.channels import ChannelParser, FunctionaryParser, HarmonyParser, MuseParser
from diskprefix.chat.output.families import ATEM, NONE
from diskprefix.chat.output.format import OutputParser, ThoughtTags
from diskprefix.chat.output.grammar import call_grammar
from diskprefix.chat.output.parser import FamilyParser
from diskprefix.chat.output.syntax import Body, Family, Written
from diskprefix.chat.output.tools import Tools


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
        return FamilyParser(self.family, self.thoughts, Tools(tools), prompt_end)

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
        return self.new_parser(Tools(tools), prompt_end)

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
