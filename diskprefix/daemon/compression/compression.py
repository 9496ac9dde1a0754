"""Leaves the oldest messages out of a conversation that has become too long. README.md has the rules and an example.

The choice depends on the conversation alone: its growth is replayed, request by request. So an exchange (a message of
the assistant with the results of its calls) that was left out once stays left out, also after a restart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from diskprefix.daemon.chat.draft import Compress, CountTokens, DraftStep, PromptDraft, run_steps
from diskprefix.daemon.chat.messages import Conversation, Message, TextPart
from diskprefix.daemon.chat.splice import recall
from diskprefix.daemon.settings import Settings
from diskprefix.errors import ContextTooLong, SettingsError
from diskprefix.values import LeftOut

PLACEHOLDER = "(Earlier messages of this conversation were left out.)"
"""The assistant's message between two messages of the user, which many templates refuse in a row."""
_AROUND_TOKENS = 16
"""An upper estimate of a template's tokens around a message or a call."""


class _Round(Struct):
    """A round as indices of messages: the user's messages that open it, and its exchanges."""

    opening: list[int] = field(default_factory=list)
    exchanges: list[list[int]] = field(default_factory=list)

    @property
    def units(self) -> list[list[int]]:
        """The messages that are left out together, the oldest first. An opening without a reply stays."""
        return [*self.exchanges[:-1], *([*self.opening, *last] for last in self.exchanges[-1:])]


def open_compression(settings: Settings, max_positions: int, served: int) -> Compress | None:
    """Returns the function that shortens conversations, None if the settings ask for none.

    Of the model's `max_positions`, KV memory has room for `served`. Raises `SettingsError` if no prompt of the model
    can exceed the threshold.
    """
    if settings.prefill_compression == "off":
        return None
    limit = max_positions * 3 // 4 if settings.prefill_compression == "auto" else int(settings.prefill_compression)
    if limit >= max_positions:
        context = f"the model's context of {max_positions} tokens"
        raise SettingsError(f"--prefill-compression: {limit} is not below {context}")
    return partial(fit, min(limit, served * 3 // 4) if served < max_positions else limit)


def fit(limit: int, write: Sequence[DraftStep], count: CountTokens, draft: PromptDraft) -> PromptDraft:
    """Runs the steps `write`. If the prompt has more than `limit` tokens, runs them again without the oldest exchanges,
    unless the conversation has images."""
    if draft.pictures:
        return run_steps(write, draft)
    written = None
    with suppress(ContextTooLong):
        written = run_steps(write, draft)
        if len(written.prompt.token_ids) <= limit:
            return written
    conversation, left_out = shortened(draft.conversation, limit, count)
    if written is not None and left_out is None:
        return written
    rewriting = draft.prompt.rewriting
    if left_out is not None:
        rewriting = replace(rewriting, left_out=(*rewriting.left_out, left_out), is_shortened=True)
        # Tools that came with a message that is left out are offered from the beginning.
        named = {tool.name for message in conversation.messages for tool in message.new_tools}
        conversation = replace(conversation, late=conversation.late & named)
    shorter = replace(draft, conversation=conversation).with_prompt(rewriting=rewriting)
    return run_steps([recall, *write], shorter)


def shortened(conversation: Conversation, threshold: int, count: CountTokens) -> tuple[Conversation, LeftOut | None]:
    """Returns the conversation without its oldest exchanges, if it has more than `threshold` tokens. Sizes are upper
    estimates from the texts of the messages."""
    messages = conversation.messages
    rounds = _rounds(messages)
    if not rounds:
        return conversation, None
    sizes = [
        size + _AROUND_TOKENS * (1 + len(message.tool_calls))
        for size, message in zip(count([_text(message) for message in messages]), messages, strict=True)
    ]
    around = count([json.dumps(conversation.tools)])[0] if conversation.tools else 0
    left_out = {index for unit in _left_out(messages, rounds, sizes, around, threshold) for index in unit}
    if not left_out:
        return conversation, None
    first, last = messages[min(left_out)].path, messages[max(left_out)].path
    return replace(conversation, messages=_without(messages, left_out)), LeftOut("message", len(left_out), first, last)


def _rounds(messages: Sequence[Message]) -> list[_Round]:
    """Returns the rounds from the first reply on. Messages before it always stay: the first round has no opening."""
    rounds: list[_Round] = []
    for index, message in enumerate(messages):
        exchanges = rounds[-1].exchanges if rounds else []
        if message.role == "assistant":
            rounds = rounds or [_Round()]
            if messages[index - 1].role == "assistant" and exchanges:
                exchanges[-1].append(index)
            else:
                rounds[-1].exchanges.append([index])
        elif message.role == "user" and exchanges:
            rounds.append(_Round([index]))
        elif rounds:
            (exchanges[-1] if exchanges else rounds[-1].opening).append(index)
    return rounds


def _left_out(
    messages: Sequence[Message], rounds: Sequence[_Round], sizes: Sequence[int], around: int, threshold: int
) -> list[list[int]]:
    """Returns the units that are left out, by replaying the requests of this conversation."""
    units = [unit for round_ in rounds for unit in round_.units]
    starts = {part[0] for round_ in rounds for part in (round_.opening, *round_.exchanges) if part}
    total, newest, num_left_out = around, 0, 0
    for index, message in enumerate(messages):
        total += sizes[index]
        newest = index if index in starts else newest
        is_last = index + 1 == len(messages) or messages[index + 1].role == "assistant"
        if message.role == "assistant" or not is_last or total <= threshold:
            continue
        while total > threshold // 2 and num_left_out < len(units) and units[num_left_out][-1] < newest:
            total -= sum(sizes[left_out] for left_out in units[num_left_out])
            num_left_out += 1
    return units[:num_left_out]


def _without(messages: Sequence[Message], left_out: set[int]) -> list[Message]:
    remaining = [message for index, message in enumerate(messages) if index not in left_out]
    gap = min(left_out)
    if remaining[gap].role != "assistant":
        path = messages[gap].path
        remaining.insert(gap, Message(role="assistant", content=[TextPart(PLACEHOLDER, path)], path=path))
    return remaining


def _text(message: Message) -> str:
    calls = [
        call.name + (call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments))
        for call in message.tool_calls
    ]
    return "\n".join([*(part.text for part in message.texts), message.reasoning or "", *calls])
