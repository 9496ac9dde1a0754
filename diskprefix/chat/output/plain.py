"""The output format of templates that know neither reasoning nor calls: everything is content."""

from __future__ import annotations

from collections.abc import Sequence

from diskprefix.chat.messages import JsonObject
from diskprefix.chat.output.events import ContentDelta, OutputDelta
from diskprefix.chat.output.format import OutputParser, ThoughtTags
from diskprefix.errors import InvalidRequest


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
