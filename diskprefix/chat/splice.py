"""Puts sampled tokens into a prompt, in the place of the text that the chat template writes for the same reply."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from diskprefix.chat.draft import PromptDraft, ReplySpan
from diskprefix.chat.messages import JsonObject
from diskprefix.chat.output.format import OutputFormat
from diskprefix.chat.replay import SampledTurn, TextHash, Turn, find_turns
from diskprefix.chat.template import ChatTemplate, render

_MOST_TRIES = 4
"""To find the remembered replies that fit."""
_ENDS_TRIED = 4
"""A text may contain what ends it, and the template may write it inside of a reply (GPT-OSS does)."""
_END_CHARS = 200
"""Of the text before a reply, for a parser to see whether the template opened a thought."""


def recall(draft: PromptDraft) -> PromptDraft:
    """Finds the remembered replies of the conversation."""
    if draft.replies is None:
        return draft
    remembered, conversation_hash = find_turns(draft.conversation.messages, draft.replies)
    return replace(draft, remembered=remembered, conversation_hash=conversation_hash)


def splice(template: ChatTemplate, output_format: OutputFormat, draft: PromptDraft) -> PromptDraft:
    """Finds the places of the remembered replies in the rendered text.

    Those that do not fit are rendered as the client sent them. That changes the text before later ones.
    """
    for _ in range(_MOST_TRIES):
        if not draft.remembered:
            return draft
        tools, text = draft.conversation.tools, draft.rendering.text
        read = partial(readings, output_format, tools or (), template.special, text)
        spans = find_spans(text, draft.remembered, template.reply_ends_of(tools), read)
        if len(spans) == len(draft.remembered):
            return replace(draft, spans=tuple(spans.values()))
        draft = render(template, replace(draft, remembered={index: draft.remembered[index] for index in spans}))
    return render(template, replace(draft, remembered={}))


def find_spans(
    rendered: str,
    found: Mapping[int, SampledTurn],
    endings: Collection[str],
    readings: Callable[[int, int], Iterable[Turn]],
) -> dict[int, ReplySpan]:
    """Returns the spans of the replies `found` (by the index of their message), as far as they fit.

    A reply fits if the text before it is what it was when the reply was sampled, and if the template writes it so that
    one of its `readings` (of a part of `rendered`, in characters) is what it says. `endings` are what the template may
    write at its end.
    """
    text_hash, end_of_last, spans = TextHash(rendered), 0, {}
    pattern = re.compile("|".join(map(re.escape, sorted(endings, key=len, reverse=True))) or "(?!)")
    for index, sampled in sorted(found.items(), key=lambda item: item[1].place.num_chars):
        begin = sampled.place.num_chars
        if begin < end_of_last or text_hash.place(begin) != sampled.place:
            continue
        wanted = sampled.turn.canonical()
        ends = (match.start() for match in islice(pattern.finditer(rendered, begin), _ENDS_TRIED))
        read = partial(_reads, readings, wanted, begin)
        end = next(filter(read, ends), None)
        if end is not None:
            spans[index] = ReplySpan(begin, end, sampled.token_ids)
            end_of_last = end
    return spans


def _reads(readings: Callable[[int, int], Iterable[Turn]], wanted: object, begin: int, end: int) -> bool:
    return any(turn.canonical() == wanted for turn in readings(begin, end))


def readings(
    output_format: OutputFormat,
    tools: Sequence[JsonObject],
    special: Iterable[str],
    rendered: str,
    begin: int,
    end: int,
) -> Iterator[Turn]:
    """Parses a part of a rendered text as if it had been sampled: its special tokens as text, and as tokens."""
    hidden = [text for text in special if text and text not in output_format.special_tokens]
    as_text = rendered[begin:end]
    as_tokens = re.sub("|".join(map(re.escape, hidden)) or "(?!)", "", as_text)
    for reply in dict.fromkeys((as_text, as_tokens)):
        parser = output_format.parser(tools, rendered[max(0, begin - _END_CHARS) : begin])
        yield Turn.of_deltas([*parser.feed(reply), *parser.finish()])
