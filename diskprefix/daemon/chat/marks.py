"""Finds the positions that a client marks with `cache_control`: on tools, messages and content parts.

The conversation is rendered once more, cut off at the mark, or with another user message after it; `README.md` gives
the reason. In the second case the position may include the header of the next message, but never its text.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, TypeAlias

from msgspec import Struct

from diskprefix.daemon.chat.boundaries import Offsets
from diskprefix.daemon.chat.draft import PromptDraft
from diskprefix.daemon.chat.messages import CacheMark, Conversation, Message, TextPart
from diskprefix.daemon.chat.template import ChatTemplate
from diskprefix.daemon.chat.template_input import (
    PART_SEPARATOR,
    TemplateInput,
    common_chars,
    other_first_character,
    text_for_template,
    texts_of,
    with_other_user_message,
)
from diskprefix.values import MAX_MARKS, Mark

log = logging.getLogger("diskprefix")

Render: TypeAlias = Callable[[TemplateInput], str]
"""Renders without the beginning of a reply. Returns an empty text if the template refuses its input."""


class MarkTarget(Struct, frozen=True):
    """The marked object: tool or message `index`, or the first `end` characters (with images: parts) of a message."""

    kind: Literal["tools", "messages"]
    index: int
    ttl_s: float | None
    end: int | None = None


def mark(template: ChatTemplate, draft: PromptDraft) -> PromptDraft:
    """Finds the positions that the client marked."""
    targets = mark_targets(draft.replayed_conversation)
    if not targets:
        return draft
    # With stand-ins: the text of a message must not pass for the template's end of a message.
    template_input, written = draft.rendering.template_input, draft.rendering.written
    render = partial(template.try_render, ending="none")
    return draft.with_prompt(marks=find_marks(targets, template_input, written, draft.offsets, render))


def mark_targets(conversation: Conversation) -> list[MarkTarget]:
    """Returns the targets of the last `MAX_MARKS` marks, tools before messages."""
    targets = [MarkTarget("tools", k, mark.ttl_s) for k, mark in conversation.tool_marks]
    for i, message in enumerate(conversation.messages):
        targets += _targets_in(message, i)
    if len(targets) > MAX_MARKS:
        log.debug("%d marks in a request: only the last %d count", len(targets), MAX_MARKS)
    return targets[-MAX_MARKS:]


def _targets_in(message: Message, index: int) -> list[MarkTarget]:
    marks: list[tuple[int | None, CacheMark | None]] = []
    end, last = -len(PART_SEPARATOR), len(message.content) - 1
    for j, part in enumerate(message.content):
        if isinstance(part, TextPart):
            end += len(PART_SEPARATOR) + len(part.text)
            end_of_part = j + 1 if message.pictures else end
            # The last part ends with its message, unless tool calls follow.
            marks.append((end_of_part if j < last or message.tool_calls else None, part.mark))
    marks.append((None, message.mark))
    return [MarkTarget("messages", index, mark.ttl_s, end) for end, mark in marks if mark is not None]


def find_marks(
    targets: Sequence[MarkTarget], template_input: TemplateInput, rendered: str, offsets: Offsets, render: Render
) -> tuple[Mark, ...]:
    """Returns the positions after `targets`, ascending and distinct, each with its longest time to live. Skips a target
    without a position. `rendered` is the rendering of `template_input`, and `offsets` belong to its tokens."""
    ttl_of: dict[int, float | None] = {}
    of_messages = [target for target in targets if target.kind == "messages"]
    # An empty list, not None: some tokenizers have separate templates for requests with tools and without.
    if len(of_messages) < len(targets) and render(template_input) == render(template_input._replace(tools=[])):
        log.debug("marks on tools are ignored: the chat template writes no tools")
        targets = of_messages
    for target in targets:
        num_chars = _num_chars_before(target, template_input, rendered, render)
        position = _tokens_within(num_chars, offsets, len(rendered))
        if not position:
            log.debug("the mark on %s.%d is ignored: its place cannot be found", target.kind, target.index)
            continue
        times = [ttl_s for ttl_s in (ttl_of.get(position), target.ttl_s) if ttl_s is not None]
        ttl_of[position] = max(times, default=None)
    return tuple(Mark(position, ttl_of[position]) for position in sorted(ttl_of))


def _num_chars_before(target: MarkTarget, template_input: TemplateInput, rendered: str, render: Render) -> int:
    """Returns the number of characters of `rendered` before the mark; 0 if it cannot be found."""
    ending, continued = _cut(target, template_input)
    text = render(ending)
    if _contains_target(text, target, ending) and rendered.startswith(text):
        return len(text)
    return max(common_chars(rendered, text), common_chars(rendered, render(continued)))


def _contains_target(text: str, target: MarkTarget, ending: TemplateInput) -> bool:
    """Returns whether `text`, rendered from `ending`, has the marked object. Some templates write system messages and
    tools only with the first user message."""
    if target.kind == "tools":
        return any(tool["function"]["name"] in text for tool in (ending.tools or [])[-1:])
    # A message that is cut inside its text ends with a character that the prompt does not have there.
    texts = texts_of(ending.messages[-1]["content"])
    return bool(text) and target.end is None and all(content.strip() in text for content in texts)


def _cut(target: MarkTarget, template_input: TemplateInput) -> tuple[TemplateInput, TemplateInput]:
    """Returns the input cut off at the mark, and the input with another user message after the mark."""
    if target.kind == "tools":
        head = template_input.leading_system
        rest = template_input.messages[len(head) :]
        template_input = template_input._replace(tools=(template_input.tools or [])[: target.index + 1])
    else:
        head, rest = template_input.messages[: target.index + 1], template_input.messages[target.index + 1 :]
        if target.end is not None:
            content = head[-1]["content"]
            begin, others = content[: target.end], content[target.end :]
            if isinstance(content, str):
                content = begin + PART_SEPARATOR + other_first_character(others.removeprefix(PART_SEPARATOR))
            else:
                content = begin + text_for_template(other_first_character(others))
            head = [*head[:-1], {**head[-1], "content": content}]
    continued = with_other_user_message(head, rest)
    return template_input._replace(messages=head), template_input._replace(messages=continued)


def _tokens_within(num_chars: int, offsets: Offsets, num_all_chars: int) -> int:
    """Returns the number of leading tokens that end at or before character `num_chars`."""

    def end_of(index: int) -> int:
        # The tokenizer added a token without text (0, 0) at the beginning or at the end.
        return offsets[index][1] or (num_all_chars + 1 if index else 0)

    return bisect_right(range(len(offsets)), num_chars, key=end_of) if num_chars else 0
