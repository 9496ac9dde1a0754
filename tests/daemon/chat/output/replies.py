"""Parts that tests of the parsers share: whole replies, and replies in pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diskprefix.daemon.chat.output.choose_format import OutputFormat
from diskprefix.daemon.chat.output.families import FAMILIES, NONE, THOUGHTS
from diskprefix.daemon.chat.output.format import ContentDelta, OutputDelta, ReasoningDelta, ToolCallBegin

_FORMATS: dict[str, OutputFormat] = {family.name: OutputFormat(family, THOUGHTS) for family in (*FAMILIES, NONE)}
NAMES = list(_FORMATS)
REPLIES = [json.loads(line) for line in Path(__file__).with_name("replies.jsonl").read_text("utf-8").splitlines()]
"""Replies that other servers know, see `test_parsers.py`."""


@dataclass
class Reply:
    """The reply that was read, joined. `calls` are names and the text of arguments."""

    reasoning: str = ""
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)

    @property
    def parsed_calls(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def format_named(name: str) -> OutputFormat:
    return _FORMATS[name]


def joined(deltas: Iterable[OutputDelta]) -> Reply:
    reply = Reply()
    for delta in deltas:
        if isinstance(delta, ReasoningDelta):
            reply.reasoning += delta.text
        elif isinstance(delta, ContentDelta):
            reply.content += delta.text
        elif isinstance(delta, ToolCallBegin):
            assert delta.index == len(reply.calls), "calls are counted from 0"
            reply.calls.append([delta.name, ""])
        else:
            assert delta.index == len(reply.calls) - 1, "arguments are of the newest call"
            reply.calls[-1][1] += delta.arguments
    return reply


def read(format: OutputFormat, pieces: Iterable[str], tools: list[dict[str, Any]], prompt_end: str = "") -> Reply:
    parser = format.parser(tools, prompt_end)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return joined([*deltas, *parser.finish()])


def tool(name: str, /, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_TYPES |= {type(None): "null"}


def tool_of(name: str, arguments: Any) -> dict[str, Any]:
    known = arguments if isinstance(arguments, dict) else {}
    return tool(name, **{key: {"type": _TYPES[type(value)]} for key, value in known.items()})
