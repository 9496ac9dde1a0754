"""The formats that implement `OutputFormat`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diskprefix.chat.messages import JsonObject
from diskprefix.chat.output.families import NONE
from diskprefix.chat.output.format import OutputParser, ThoughtTags
from diskprefix.chat.output.grammar import call_grammar
from diskprefix.chat.output.harmony import TAGS, HarmonyParser
from diskprefix.chat.output.parser import FamilyParser
from diskprefix.chat.output.syntax import Family, Written
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


_HARMONY_CALL = Written("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS")


@dataclass(frozen=True)
class HarmonyFormat:
    """The format of gpt-oss. `token_ids` as in `FamilyFormat`."""

    token_ids: Mapping[str, int] = field(default_factory=dict)

    name = "harmony"
    # The tag that ends reasoning is followed by the header of the next message, which no schema knows.
    thought = ThoughtTags(None, "<|channel|>final<|message|>")
    special_tokens: frozenset[str] = frozenset(TAGS)

    def parser(self, tools: Sequence[JsonObject], prompt_end: str) -> OutputParser:
        return HarmonyParser(Tools(tools), prompt_end)

    def call_grammar(self, tools: Sequence[JsonObject], *, many: bool) -> str:
        del many  # A call ends the reply: this model calls one tool at a time.
        return call_grammar("json", _HARMONY_CALL, tools, self.token_ids, many=False)
