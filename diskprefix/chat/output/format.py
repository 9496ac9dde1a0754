"""The interface of a reply format, and the pieces of a reply that its parser emits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from diskprefix.chat.messages import JsonObject
from diskprefix.errors import InvalidRequest


@dataclass(frozen=True)
class ReasoningDelta:
    """A piece of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """The beginning of a tool call. `index` counts the calls of a reply from 0; the server makes the id."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """A piece of a call's arguments. All pieces of a call, joined, are the JSON text of one object."""

    index: int
    arguments: str


OutputDelta: TypeAlias = ReasoningDelta | ContentDelta | ToolCallBegin | ToolCallDelta


class OutputParser(Protocol):
    """Parses one reply while it is sampled. Not thread-safe.

    A parser never raises: text that it cannot parse is content. The joined deltas do not depend on how the text is cut.
    """

    def feed(self, text: str) -> list[OutputDelta]:
        """Returns the deltas of the next piece of the reply."""

    def finish(self) -> list[OutputDelta]:
        """Returns the deltas of held text. The reply has ended; it may have been cut off anywhere."""


class ThoughtTags(NamedTuple):
    """The texts around reasoning. If `begin` is None, every reply begins with text up to `end`. `before_end` is what
    must come before an `end` that does not end a thought by itself."""

    begin: str | None
    end: str
    before_end: str = ""


class ThoughtWatch:
    """Tells whether a reply is in a thought: after a piece of reasoning, until another piece comes."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open

    def see(self, deltas: Sequence[object]) -> bool:
        """Returns whether the reply is in a thought after these deltas."""
        if deltas:
            self.is_open = isinstance(deltas[-1], ReasoningDelta)
        return self.is_open


class OutputFormat(Protocol):
    """The format of the replies of one chat template, found when the model is loaded. Thread-safe."""

    @property
    def name(self) -> str:
        """The name of the format: "hermes", "mistral", "none", …"""

    @property
    def special_tokens(self) -> frozenset[str]:
        """The special tokens that the engine must emit as text, because the parser reads them."""

    @property
    def thought(self) -> ThoughtTags | None:
        """The texts around reasoning; None if the template knows no reasoning."""

    def parser(self, tools: Sequence[JsonObject], prompt_end: str) -> OutputParser:
        """Returns the parser of one reply.

        `tools` are the request's tools in the form of OpenAI's API. Without tools, calls are content. `prompt_end` is
        at least the last 64 characters of the rendered prompt: it shows whether the template opened a thought.
        """

    def call_grammar(self, tools: Sequence[JsonObject], *, many: bool) -> str:
        """Returns a Lark grammar, as llguidance reads it, of one call or (`many`) of one or more calls of `tools`."""

    def strict_grammar(self, tools: Sequence[JsonObject], strict: Collection[str]) -> str:
        """Returns the grammar of any text in which calls of the tools named in `strict` follow their schemas."""

    def no_call_grammar(self, tools: Sequence[JsonObject]) -> str:
        """Returns the grammar of any text in which no call begins."""


class PlainText:
    name = "none"
    special_tokens: frozenset[str] = frozenset()
    thought: ThoughtTags | None = None

    def parser(self, tools: Sequence[JsonObject], prompt_end: str) -> OutputParser:  # noqa: ARG002 (the protocol's)
        return _Everything()

    def call_grammar(self, tools: Sequence[JsonObject], *, many: bool) -> str:  # noqa: ARG002 (the protocol's)
        raise InvalidRequest.at("tool_choice", "this model's chat template knows no tool calls")

    def strict_grammar(self, tools: Sequence[JsonObject], strict: Collection[str]) -> str:  # noqa: ARG002
        return "start: /(?s:.*)/\n"

    def no_call_grammar(self, tools: Sequence[JsonObject]) -> str:
        return self.strict_grammar(tools, ())


class _Everything:
    def feed(self, text: str) -> list[OutputDelta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[OutputDelta]:
        return []
