"""Parts of tests of replay: a place for turns, and a model that answers in a family's own syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from diskprefix.daemon.chat.messages import Conversation, JsonObject
from diskprefix.daemon.chat.output.choose_format import OutputFormat
from diskprefix.daemon.chat.output.format import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ThoughtTags,
    ToolCallBegin,
    ToolCallDelta,
)
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.chat.replay import Replayed, ReplyMemory, Turn
from diskprefix.tokens import TokenIds
from diskprefix.values import Prompt


class Turns(dict[str, bytes]):
    def put(self, id_: str, record: bytes) -> None:
        self[id_] = record

    def require_read(self) -> None:
        pass


class TaggedFormat(OutputFormat):
    """Thoughts between <think> tags and calls between <tool_call> tags, as Qwen writes them."""

    def __init__(self) -> None:
        super().__init__(thought=ThoughtTags("<think>", "</think>"))

    def parser(self, tools: Sequence[JsonObject], prompt_end: str) -> TaggedParser:  # noqa: ARG002
        return TaggedParser()


class TaggedParser:
    has_draft = False

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[OutputDelta]:
        self._text += text
        return []

    def finish(self, *, is_whole: bool = True) -> list[OutputDelta]:  # noqa: ARG002
        thought, tag, rest = self._text.rpartition("</think>")
        content, *calls = re.split(r"<tool_call>\n(.*?)\n</tool_call>", rest, flags=re.DOTALL)
        deltas: list[OutputDelta] = [ContentDelta(content)]
        if tag:
            deltas.insert(0, ReasoningDelta(thought.replace("<think>", "")))
        for index, call in enumerate(map(json.loads, calls[::2])):
            name, arguments = call["name"], json.dumps(call["arguments"])
            deltas += [ToolCallBegin(index, name), ToolCallDelta(index, arguments)]
        return deltas


class Model:
    """Answers with prepared texts, as the server has them remembered. Each character is a token, if it can be one."""

    def __init__(self, tokenizer: Any, renderer: PromptRenderer) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self.turns = Turns()
        self.state: list[int] = []
        """The tokens of the last prompt and of the reply to it, whose state is kept."""
        self.prompt: Prompt | None = None

    def asked(self, conversation: Conversation) -> Prompt:
        self._replayed = self._renderer.replay(conversation, self.turns)
        self.prompt = self._replayed.prompt
        self.state = self.prompt.token_ids.tolist()
        return self.prompt

    def reply(self, text: str, call_ids: Sequence[str] = ()) -> Turn:
        """Replies to the conversation that was asked last. Returns what the client is told."""
        sampled = self.tokens(text)
        self.state += sampled
        return remember(self._renderer, self._replayed, self.turns, text, sampled, call_ids)

    def tokens(self, text: str) -> list[int]:
        return [token for char in text for token in self._tokenizer.encode(char, add_special_tokens=False)]

    def restored(self, prompt: Prompt) -> int:
        """Returns how many tokens of the last state `prompt` begins with, less than all of it."""
        return common(prompt.token_ids, self.state) - len(self.state)


def remember(
    renderer: PromptRenderer,
    replayed: Replayed,
    turns: Turns,
    text: str,
    sampled: Sequence[int],
    call_ids: Sequence[str] = (),
) -> Turn:
    parser = renderer.output_format.parser((), "")
    turn = Turn.of_deltas([*parser.feed(text), *parser.finish()])
    assert replayed.origin is not None
    memory = ReplyMemory(turns, replayed.origin, renderer.end_ids)
    memory.remember(turn, call_ids, [*sampled, min(renderer.end_ids)])
    return turn


def common(a: TokenIds, b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a.tolist(), b, strict=False)) if x != y), min(len(a), len(b)))
