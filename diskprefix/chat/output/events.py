"""What a model's reply consists of, as pieces that come while it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


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
