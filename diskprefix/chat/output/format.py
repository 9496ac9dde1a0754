"""The format in which a model writes its replies: its interface, and the pieces of a reply that its parser finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from diskprefix.chat.messages import JsonObject
from diskprefix.errors import InvalidRequest


@dataclass(frozen=True)
class ReasoningDelta:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """A tool call begins. `index` counts the calls of a reply from 0; the server makes the id."""

    index: int
    name: str


@dataclass(frozen=True)
class ToolCallDelta:
    """More of a call's arguments. The pieces of a whole call, joined, are the JSON text of one object."""

    index: int
    arguments: str


OutputDelta: TypeAlias = ReasoningDelta | ContentDelta | ToolCallBegin | ToolCallDelta


class OutputParser(Protocol):
    """Parses one reply while it is written. Not thread-safe.

    It never raises: what it cannot parse is content. How the text is cut into pieces makes no difference to what the
    deltas hold when they are joined.
    """

    def feed(self, text: str) -> list[OutputDelta]:
        """Returns what the next piece of the reply, `text`, adds."""

    def finish(self) -> list[OutputDelta]:
        """Returns what was still held back. The reply has ended; it may have been cut off anywhere."""


class ThoughtTags(NamedTuple):
    """The texts around reasoning. Without `begin`, every reply has a text that ends with `end`."""

    begin: str | None
    end: str


class OutputFormat(Protocol):
    """The format of one chat template. It is chosen and verified when the model is loaded. Thread-safe."""

    @property
    def name(self) -> str:
        """A name to be shown: "hermes", "mistral", "none", …"""

    @property
    def special_tokens(self) -> frozenset[str]:
        """Special tokens that the engine must write as text, because the parser reads them."""

    @property
    def thought(self) -> ThoughtTags | None:
        """How reasoning is written; None: the template knows no reasoning."""

    def parser(self, tools: Sequence[JsonObject], prompt_end: str) -> OutputParser:
        """Returns the parser of one reply.

        `tools` are the request's tools, as OpenAI's API has them; without tools all calls are content. `prompt_end`
        is the end of the rendered prompt, at least its last 64 characters: it shows whether the template opened a
        thought.
        """

    def call_grammar(self, tools: Sequence[JsonObject], *, many: bool) -> str:
        """Returns a Lark grammar, as llguidance reads it, of one call or (`many`) of one or more calls of `tools`."""


class PlainText:
    name = "none"
    special_tokens: frozenset[str] = frozenset()
    thought: ThoughtTags | None = None

    def parser(self, tools: Sequence[JsonObject], prompt_end: str) -> OutputParser:  # noqa: ARG002 (the protocol's)
        return _Everything()

    def call_grammar(self, tools: Sequence[JsonObject], *, many: bool) -> str:  # noqa: ARG002 (the protocol's)
        raise InvalidRequest("tool_choice: this model's chat template knows no tool calls", param="tool_choice")


class _Everything:
    def feed(self, text: str) -> list[OutputDelta]:
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[OutputDelta]:
        return []
