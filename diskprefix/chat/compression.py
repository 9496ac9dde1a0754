"""Leaves aged messages out of a conversation that has become too long, so that its session can go on.

What is left out depends on the conversation alone: its growth is gone through again, request by request. When it
exceeds the threshold at one of them, the oldest exchanges are left out until half of the threshold remains. These
requests are the same in every later conversation. So what was left out once stays left out, also after a restart, and
the turns in between only add to the prompt: they are found in the cache.

An exchange is a message of the assistant with the results of its calls. System prompt, tools and what the user said
before the first reply stay, and so does the newest exchange. What a user said later goes with the last exchange that
answers it. README.md has an example.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from diskprefix.chat.draft import DraftStep, PromptDraft, run_steps
from diskprefix.chat.messages import Conversation, Message, TextPart
from diskprefix.errors import ContextTooLong
from diskprefix.nouns import LeftOut

PLACEHOLDER = "(Earlier messages of this conversation were left out.)"
"""Said by the assistant where two messages of the user would meet: many templates refuse that."""
_AROUND_TOKENS = 16
"""At least what templates write around a message, or around a call."""

CountTokens = Callable[[Sequence[str]], Sequence[int]]
"""Returns the numbers of tokens of texts."""


@dataclass
class _Round:
    """Indices of messages: those that open a turn, and its exchanges."""

    opening: list[int] = field(default_factory=list)
    exchanges: list[list[int]] = field(default_factory=list)

    @property
    def units(self) -> list[list[int]]:
        """What is left out together, the oldest first. The opening of a turn without a reply stays."""
        if not self.exchanges:
            return []
        return [*self.exchanges[:-1], [*self.opening, *self.exchanges[-1]]]


def fit(write: Sequence[DraftStep], limit: int, count: CountTokens, draft: PromptDraft) -> PromptDraft:
    """Runs the steps `write`. If they make more than `limit` tokens, runs them again without aged exchanges."""
    written = None
    with suppress(ContextTooLong):
        written = run_steps(write, draft)
        if len(written.prompt.token_ids) <= limit:
            return written
    conversation, left_out = shortened(draft.conversation, limit, count)
    if written is not None and left_out is None:
        return written
    rewriting = replace(draft.prompt.rewriting, left_out=left_out)
    return run_steps(write, replace(draft, conversation=conversation).with_prompt(rewriting=rewriting))


def shortened(conversation: Conversation, threshold: int, count: CountTokens) -> tuple[Conversation, LeftOut | None]:
    """Returns the conversation without its aged exchanges, if it has more than `threshold` tokens. Sizes are
    estimated from the texts of the messages, rather too large than too small."""
    messages = conversation.messages
    turns = _turns(messages)
    if not turns:
        return conversation, None
    sizes = [
        size + _AROUND_TOKENS * (1 + len(message.tool_calls))
        for size, message in zip(count([_text(message) for message in messages]), messages, strict=True)
    ]
    around = count([json.dumps(conversation.tools)])[0] if conversation.tools else 0
    units = [unit for turn in turns for unit in turn.units]
    left_out = {index for unit in units[: _num_left_out(messages, turns, sizes, around, threshold)] for index in unit}
    if not left_out:
        return conversation, None
    first, last = messages[min(left_out)].path, messages[max(left_out)].path
    kept = _joined(messages, left_out)
    return replace(conversation, messages=kept), LeftOut(len(left_out), first, last)


def _turns(messages: Sequence[Message]) -> list[_Round]:
    """Returns the turns from the first reply on. What stands before it always stays: the first turn has no opening."""
    turns: list[_Round] = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            turns = turns or [_Round()]
            if messages[index - 1].role == "assistant" and turns[-1].exchanges:
                turns[-1].exchanges[-1].append(index)
            else:
                turns[-1].exchanges.append([index])
        elif not turns:
            continue
        elif message.role == "user" and turns[-1].exchanges:
            turns.append(_Round([index]))
        elif turns[-1].exchanges:
            turns[-1].exchanges[-1].append(index)
        else:
            turns[-1].opening.append(index)
    return turns


def _num_left_out(
    messages: Sequence[Message], turns: Sequence[_Round], sizes: Sequence[int], around: int, threshold: int
) -> int:
    """Returns how many units are left out, by going through the requests of this conversation."""
    units = [unit for turn in turns for unit in turn.units]
    starts = {part[0] for turn in turns for part in (turn.opening, *turn.exchanges) if part}
    total, newest, num_left_out = around, 0, 0
    for index, message in enumerate(messages):
        total += sizes[index]
        newest = index if index in starts else newest
        is_request = message.role != "assistant" and (
            index + 1 == len(messages) or messages[index + 1].role == "assistant"
        )
        if not is_request or total <= threshold:
            continue
        while total > threshold // 2 and num_left_out < len(units) and units[num_left_out][-1] < newest:
            total -= sum(sizes[left_out] for left_out in units[num_left_out])
            num_left_out += 1
    return num_left_out


def _joined(messages: Sequence[Message], left_out: set[int]) -> list[Message]:
    kept = [message for index, message in enumerate(messages) if index not in left_out]
    gap = min(left_out)
    if kept[gap].role != "assistant":
        path = messages[gap].path
        kept.insert(gap, Message(role="assistant", content=[TextPart(PLACEHOLDER, path)], path=path))
    return kept


def _text(message: Message) -> str:
    said = [part.text for part in message.content if isinstance(part, TextPart)]
    called = [
        call.name + (call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments))
        for call in message.tool_calls
    ]
    return "\n".join([*said, message.reasoning or "", *called])
