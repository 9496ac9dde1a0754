"""The interface of a reply's parser, and the pieces of a reply that it emits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

from msgspec import Struct


class ReasoningDelta(Struct, frozen=True):
    """A piece of the reasoning."""

    text: str


class ContentDelta(Struct, frozen=True):
    """A piece of the answer."""

    text: str


class ToolCallBegin(Struct, frozen=True):
    """The beginning of a tool call. `index` counts the calls of a reply from 0; the server makes the id."""

    index: int
    name: str


class ToolCallDelta(Struct, frozen=True):
    """A piece of a call's arguments. All pieces of a call, joined, are the JSON text of one object."""

    index: int
    arguments: str


OutputDelta: TypeAlias = ReasoningDelta | ContentDelta | ToolCallBegin | ToolCallDelta


class OutputParser(Protocol):
    """Parses one reply while it is sampled. Not thread-safe.

    A parser never raises: text that it cannot parse is content. The joined deltas do not depend on how the text is cut.
    """

    has_draft: bool
    """True in a call that a thought contains, and after it until the thought or the reply continues."""

    def feed(self, text: str) -> list[OutputDelta]:
        """Returns the deltas of the next piece of the reply."""

    def finish(self, *, is_whole: bool = True) -> list[OutputDelta]:
        """Returns the deltas of held text. The reply has ended: the model ended it, or it was cut off anywhere."""


class ThoughtTags(NamedTuple):
    """The texts around reasoning. If `begin` is None, every reply begins with reasoning. `before_end` is the text that
    must precede `end`, if `end` alone does not end a thought."""

    begin: str | None
    end: str
    before_end: str = ""


class ThoughtWatch:
    """Tracks whether a reply is in a thought: after a piece of reasoning, until another kind of piece follows, but not
    in a call and right after it, where the reply may end."""

    def __init__(self, *, is_open: bool = False) -> None:
        self.is_open = is_open

    def see(self, deltas: Sequence[object], parser: OutputParser) -> bool:
        """Returns whether the reply is in a thought after these deltas of `parser`."""
        if deltas:
            self.is_open = isinstance(deltas[-1], ReasoningDelta)
        return self.is_open and not parser.has_draft


class PlainParser:
    """Takes all text for content."""

    has_draft = False

    def feed(self, text: str) -> list[OutputDelta]:
        return [ContentDelta(text)] if text else []

    def finish(self, *, is_whole: bool = True) -> list[OutputDelta]:  # noqa: ARG002
        return []
