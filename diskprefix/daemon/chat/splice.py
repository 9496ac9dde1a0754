"""Finds the recorded replies of a conversation, and the spans of the rendered text that their tokens replace."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from msgspec.structs import replace

from diskprefix.daemon.chat.draft import PromptDraft, ReplySpan
from diskprefix.daemon.chat.messages import JsonObject
from diskprefix.daemon.chat.output.choose_format import OutputFormat
from diskprefix.daemon.chat.replay import SampledTurn, TextHash, Turn, find_turns
from diskprefix.daemon.chat.template import ChatTemplate, render

_MAX_TRIES = 4
"""The most renderings in the search for recorded replies that fit."""
_ENDS_TRIED = 4
"""The most ends to try: a reply may contain the text of an end, and a template may write one inside (GPT-OSS does)."""
_END_CHARS = 200
"""Characters before a reply that a parser gets, to see whether the template opened a thought."""


def recall(draft: PromptDraft) -> PromptDraft:
    """Finds the recorded replies of the conversation."""
    if draft.replies is None:
        return draft
    remembered, conversation_hash = find_turns(draft.conversation.messages, draft.replies, draft.pictures)
    return replace(draft, remembered=remembered, conversation_hash=conversation_hash)


def splice(template: ChatTemplate, output_format: OutputFormat, draft: PromptDraft) -> PromptDraft:
    """Finds the spans of the recorded replies in the text. Replies that do not fit are rendered as the client sent
    them."""
    for tries_left in reversed(range(_MAX_TRIES)):
        if not draft.remembered:
            return draft
        tools, text = draft.conversation.tools, draft.rendering.text
        read = partial(readings, output_format.of(draft.asker), tools or (), template.special, text)
        spans = find_spans(text, draft.rendering.written, draft.remembered, template.reply_ends_of(tools), read)
        if len(spans) == len(draft.remembered):
            return replace(draft, spans=tuple(spans.values()))
        if tries_left:
            draft = render(template, replace(draft, remembered={index: draft.remembered[index] for index in spans}))
    return render(template, replace(draft, remembered={}))


def find_spans(
    rendered: str,
    written: str,
    sampled_turns: Mapping[int, SampledTurn],
    endings: Collection[str],
    readings: Callable[[int, int], Iterable[Turn]],
) -> dict[int, ReplySpan]:
    """Returns the spans of the `sampled_turns` that fit, by the index of their message.

    A reply fits if the text before it equals the text in its record, and if one of the `readings` of the span (begin
    and end in characters) has its words. One of `endings` must follow in `written`, the rendered text with stand-ins.
    """
    text_hash, end_of_last, spans = TextHash(rendered), 0, {}
    pattern = re.compile("|".join(map(re.escape, sorted(endings, key=len, reverse=True))) or "(?!)")
    for index, sampled in sorted(sampled_turns.items(), key=lambda item: item[1].place.num_chars):
        begin = sampled.place.num_chars
        if begin < end_of_last or text_hash.place(begin) != sampled.place:
            continue
        wanted = sampled.turn.canonical()
        ends = (match.start() for match in islice(pattern.finditer(written, begin), _ENDS_TRIED))
        end = next((end for end in ends if any(turn.canonical() == wanted for turn in readings(begin, end))), None)
        if end is not None:
            spans[index] = ReplySpan(begin, end, sampled.token_ids)
            end_of_last = end
    return spans


def readings(
    output_format: OutputFormat,
    tools: Sequence[JsonObject],
    special: Iterable[str],
    rendered: str,
    begin: int,
    end: int,
) -> Iterator[Turn]:
    """Parses a part of a rendered text as a reply: with its special tokens as text, and without them."""
    hidden = [text for text in special if text and text not in output_format.special_tokens]
    as_text = rendered[begin:end]
    as_tokens = re.sub("|".join(map(re.escape, hidden)) or "(?!)", "", as_text)
    for reply in dict.fromkeys((as_text, as_tokens)):
        parser = output_format.parser(tools, rendered[max(0, begin - _END_CHARS) : begin])
        yield Turn.of_deltas([*parser.feed(reply), *parser.finish()])
