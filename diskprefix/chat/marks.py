"""Where the client wants its prompt kept: `cache_control` on tools, messages and content parts → positions in tokens.

A template says nowhere what it wrote for which message, so a mark is found by rendering again, as if the conversation
ended there. The prompt up to where that text and its own agree is the marked part, with its end-of-turn marker if the
template writes one. A template that refuses a conversation which ends there, or writes it in another way, is asked
once more with another user message behind the mark; then the mark may stand past what opens the next message, but
never in its text.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from diskprefix.chat.boundaries import Offsets, common_chars
from diskprefix.chat.conversation import PART_SEPARATOR, Conversation, another_beginning, going_on_otherwise
from diskprefix.prompt import Mark
from diskprefix.server.schemas import CacheControl, ChatRequest, Message, TextPart

log = logging.getLogger("diskprefix")

MAX_MARKS = 32
"""Of more, the last ones are looked for: each takes a rendering of the conversation before it."""

Render: TypeAlias = Callable[[Conversation], str]
"""Without the start of a reply; empty where the template refuses the conversation."""


@dataclass(frozen=True)
class ToolEnd:
    """A mark behind tool `index`."""

    index: int
    ttl_s: float | None

    @property
    def param(self) -> str:
        return f"tools.{self.index}"


@dataclass(frozen=True)
class MessageEnd:
    """A mark behind message `index`, or behind the first `num_chars` characters of its text."""

    index: int
    ttl_s: float | None
    num_chars: int | None = None

    @property
    def param(self) -> str:
        return f"messages.{self.index}"


Place: TypeAlias = ToolEnd | MessageEnd


def places_of(body: ChatRequest) -> list[Place]:
    """The last `MAX_MARKS` marks of a request, tools before messages."""
    places: list[Place] = [ToolEnd(k, mark.ttl_s) for k, mark in body.tool_marks]
    for i, message in enumerate(body.messages):
        places += _places_in(message, i)
    if len(places) > MAX_MARKS:
        log.debug("%d marks in a request: only the last %d count", len(places), MAX_MARKS)
    return places[-MAX_MARKS:]


def _places_in(message: Message, index: int) -> list[Place]:
    marks: list[tuple[int | None, CacheControl | None]] = []
    if isinstance(message.content, list):
        end, last = -len(PART_SEPARATOR), len(message.content) - 1
        for j, part in enumerate(message.content):
            if isinstance(part, TextPart):
                end += len(PART_SEPARATOR) + len(part.text)
                # The turn ends with its last part, unless tool calls follow.
                marks.append((end if j < last or message.tool_calls else None, part.cache_control))
    marks.append((None, message.cache_control))
    return [MessageEnd(index, mark.ttl_s, num_chars) for num_chars, mark in marks if mark is not None]


def find_marks(
    places: Sequence[Place],
    conversation: Conversation,
    rendered: str,
    offsets: Offsets,
    num_tokens: int,
    render: Render,
) -> tuple[Mark, ...]:
    """The positions of `places`, ascending, each once, with the longest of the times asked for there.

    `rendered` is `conversation` as the template writes it; `offsets` of its `num_tokens` tokens. What cannot be found,
    or begins the prompt, is left out.
    """
    found: dict[int, float | None] = {}
    if any(isinstance(place, ToolEnd) for place in places) and not _writes_tools(conversation, render):
        log.debug("the marks on tools have no place in the prompt: the template writes no tools")
        places = [place for place in places if not isinstance(place, ToolEnd)]
    for place in places:
        num_chars = _num_chars_before(place, conversation, rendered, render)
        position = _tokens_within(num_chars, offsets, num_tokens, len(rendered))
        if not position:
            log.debug("the mark on %s has no place in the prompt", place.param)
            continue
        times = [ttl_s for ttl_s in (found.get(position), place.ttl_s) if ttl_s is not None]
        found[position] = max(times, default=None)
    return tuple(Mark(position, found[position]) for position in sorted(found))


def _writes_tools(conversation: Conversation, render: Render) -> bool:
    # Without any, but with a list, so that it is the same template.
    return render(conversation) != render(conversation._replace(tools=[]))


def _num_chars_before(place: Place, conversation: Conversation, rendered: str, render: Render) -> int:
    """How much of `rendered` stands before the mark; 0 if that cannot be found."""
    ending, going_on = _cut(place, conversation)
    text = render(ending)
    if _shows_end(text, place, ending) and rendered.startswith(text):
        return len(text)
    return max(common_chars(rendered, text), common_chars(rendered, render(going_on)))


def _shows_end(text: str, place: Place, ending: Conversation) -> bool:
    """Whether `text`, the rendered `ending`, holds what is marked: some templates write system messages and tools only
    when they come to the first message of the user."""
    if isinstance(place, ToolEnd):
        return any(tool["function"]["name"] in text for tool in (ending.tools or [])[-1:])
    # Within a message it ends in another character than the prompt goes on with.
    return bool(text) and place.num_chars is None and ending.messages[-1]["content"].strip() in text


def _cut(place: Place, conversation: Conversation) -> tuple[Conversation, Conversation]:
    """The conversation as if it ended at the mark, and as if it went on in another way."""
    if isinstance(place, ToolEnd):
        head = conversation.leading_system
        rest = conversation.messages[len(head) :]
        conversation = conversation._replace(tools=(conversation.tools or [])[: place.index + 1])
    else:
        head, rest = conversation.messages[: place.index + 1], conversation.messages[place.index + 1 :]
        if place.num_chars is not None:
            text = head[-1]["content"]
            begin, others = text[: place.num_chars], text[place.num_chars + len(PART_SEPARATOR) :]
            content = begin + PART_SEPARATOR + another_beginning(others)
            head = [*head[:-1], {**head[-1], "content": content}]
    return conversation._replace(messages=head), conversation._replace(messages=going_on_otherwise(head, rest))


def _tokens_within(num_chars: int, offsets: Offsets, num_tokens: int, num_all_chars: int) -> int:
    """How many leading tokens end at or before character `num_chars`; all of a character's tokens end with it."""

    def end_of(index: int) -> int:
        # A token without text (0, 0) was put there by the tokenizer: before everything, or behind it.
        return offsets[index][1] or (num_all_chars + 1 if index else 0)

    return bisect_right(range(num_tokens), num_chars, key=end_of) if num_chars else 0
