"""The messages of Anthropic's API, and the neutral messages that they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from pydantic import Field

from diskprefix.chat.messages import CacheMark, Message, TextPart, ToolCall, joined
from diskprefix.server.protocols.anthropic_blocks import (
    Block,
    Content,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    mark_of,
    parts_of,
    require_in_role,
)
from diskprefix.server.protocols.strict import Body

_JOINED = ("system", "user", "assistant")


class AnthropicMessageBody(Body):
    """One message of the conversation. A `system` message may stand anywhere, and stays there."""

    role: Literal["user", "assistant", "system"] = Field(description="Who speaks.")
    content: Content = Field(description="Text, or a list of content blocks.")

    def neutral(self, path: str) -> Iterator[Message]:
        """Returns the messages that it is: one for each tool result, and one for what stands between them."""
        if isinstance(self.content, str):
            yield Message(role=self.role, content=(TextPart(self.content, f"{path}.content"),), path=path)
            return
        said: list[tuple[Block, str]] = []
        for index, block in enumerate(self.content):
            block_path = f"{path}.content.{index}"
            require_in_role(block, block_path, self.role)
            if not isinstance(block, ToolResultBlock):
                said.append((block, block_path))
                continue
            if said:
                yield self._message(said, path)
                said = []
            yield _result(block, block_path)
        if said:
            yield self._message(said, path)

    def _message(self, said: Sequence[tuple[Block, str]], path: str) -> Message:
        blocks = [block for block, _ in said]
        thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock) and block.thinking]
        calls = (block for block in blocks if isinstance(block, ToolUseBlock))
        return Message(
            role=self.role,
            content=tuple(part for block, block_path in said for part in parts_of(block, block_path)),
            tool_calls=tuple(ToolCall(call.id, call.name, call.input) for call in calls),
            reasoning="\n".join(thoughts) or None,
            mark=mark_of(blocks),
            path=path,
        )

    @property
    def is_begun_reply(self) -> bool:
        """Whether it is an assistant's text alone, with which the reply goes on."""
        if self.role != "assistant" or isinstance(self.content, str):
            return self.role == "assistant" and bool(self.content)
        blocks = [block for block in self.content if not isinstance(block, ThinkingBlock | RedactedThinkingBlock)]
        return bool(blocks) and all(isinstance(block, TextBlock) and block.text for block in blocks)


def _result(block: ToolResultBlock, path: str) -> Message:
    return Message(
        role="tool", content=tuple(block.parts(path)), tool_call_id=block.tool_use_id, mark=block.mark, path=path
    )


def neutral_messages(
    system: str | Sequence[TextBlock] | None, messages: Sequence[AnthropicMessageBody], end_mark: CacheMark | None
) -> list[Message]:
    """Returns the conversation. `end_mark` is a mark on its last message."""
    found = [*_system(system)]
    for index, message in enumerate(messages):
        found.extend(message.neutral(f"messages.{index}"))
    found = list(_joined(found))
    if end_mark is not None:
        found[-1] = replace(found[-1], mark=end_mark)
    return found


def _system(system: str | Sequence[TextBlock] | None) -> Iterator[Message]:
    if isinstance(system, str):
        if system:
            yield Message(role="system", content=(TextPart(system, "system"),), path="system")
    elif system:
        parts = tuple(part for index, block in enumerate(system) for part in block.parts(f"system.{index}"))
        yield Message(role="system", content=parts, path="system")


def _joined(messages: Sequence[Message]) -> Iterator[Message]:
    """Joins messages of one role that follow each other, as Anthropic's API does. Tool results stay apart."""
    for role, run in groupby(messages, lambda message: message.role):
        if role in _JOINED:
            yield joined(list(run))
        else:
            yield from run
