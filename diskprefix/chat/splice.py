"""Puts sampled tokens into a prompt, in the place of the text that the chat template writes for the same reply."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from diskprefix.chat.boundaries import Write
from diskprefix.chat.encoder import ReplySpan
from diskprefix.chat.messages import JsonObject, Message, TextPart, ToolCall
from diskprefix.chat.output.format import OutputFormat
from diskprefix.chat.replay import SampledTurn, TextHash, Turn

_ENDS_TRIED = 4
"""A text may contain what ends it, and the template may write it inside of a reply (GPT-OSS does)."""
_END_CHARS = 200
"""Of the text before a reply, for a parser to see whether the template opened a thought."""
_REPLY = "A reply."


def with_turns(messages: Sequence[Message], found: Mapping[int, SampledTurn]) -> list[Message]:
    """Returns `messages` with those that are remembered (by their index) in the words that were."""
    return [
        with_turn(message, found[index].turn) if index in found else message for index, message in enumerate(messages)
    ]


def with_turn(message: Message, turn: Turn) -> Message:
    """Returns `message` in the words that were remembered, with the reasoning that the client may have left out.

    The ids of calls stay those of the client, because the results refer to them.
    """
    sent = zip(message.tool_calls, turn.calls, strict=True)
    calls = tuple(ToolCall(call.id, name, arguments) for call, (name, arguments) in sent)
    marks = [part.mark for part in message.content if isinstance(part, TextPart) and part.mark is not None]
    content = (TextPart(turn.content, message.path, marks[-1] if marks else None),) if turn.content else ()
    return replace(message, content=content, tool_calls=calls, reasoning=turn.reasoning or None)


def end_texts(
    added: Mapping[str, int], end_ids: Collection[int], write: Write, first_token: Callable[[str], int | None]
) -> frozenset[str]:
    """Returns the texts of the tokens that may stand at the end of a reply: those that the model ends a reply with
    (`end_ids`), and what the template writes behind a made-up reply.

    `added` are the tokenizer's added tokens. `first_token` returns the first token id of a text: only where that is the
    token itself, what was sampled before it cannot merge with it.
    """
    texts = {text for text, token_id in added.items() if token_id in end_ids}
    user = {"role": "user", "content": "A question?"}
    behind = write([user, {"role": "assistant", "content": _REPLY}, user], False).partition(_REPLY)[2].lstrip()
    texts.add(max((text for text in added if behind.startswith(text)), key=len, default=""))
    return frozenset(text for text in texts if text and first_token(f"{text}\nx") == added[text])


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
