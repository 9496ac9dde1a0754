"""Encodes prompts, within the model's positions and vocabulary. Text that earlier prompts had is not encoded again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from diskprefix.chat.content import PicturePlaces
from diskprefix.chat.draft import PromptDraft, ReplySpan
from diskprefix.chat.known_parts import Encoding, OwnedParts
from diskprefix.chat.template import ChatTemplate, render
from diskprefix.errors import ContextTooLong, InvalidRequest
from diskprefix.tokens import TokenIds

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    from diskprefix.model.load.picture_processor import PictureProcessor

PART_CHARS = 4096
"""The least length of a part, except the last. A shorter one is encoded as fast as it is found."""
_PROBE = "user\n  Hello wörld, it's  1234 {}  \n\n\tx = [1];{}\n \n 日本語 e\u0301 "
_PROBED_CHARS_PER_POSITION = 32
"""The characters that are encoded first in a longer text. Real text has about four characters per token."""


def encoded(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[Encoding]:
    """Encodes texts in parallel, without the tokens that the tokenizer adds."""
    batch = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [Encoding(np.array(one.ids, np.int32), np.array(one.offsets, np.int32).reshape(-1, 2)) for one in batch]


def joined(parts: Iterable[tuple[int, Encoding]]) -> Encoding:
    """Joins at least one part of a text. Each comes with its first character's position in the text."""
    ids, offsets = [], []
    for begin, part in parts:
        ids.append(part.token_ids)
        # A token without text, (0, 0), stays one.
        offsets.append(part.offsets + begin * (part.offsets[:, 1:] > 0))
    return Encoding(np.concatenate(ids), np.concatenate(offsets).astype(np.int32, copy=False))


def encode(encoder: Encoder, template: ChatTemplate, draft: PromptDraft) -> PromptDraft:
    """Encodes the rendered text, with sampled tokens in the place of its spans. Reasoning that the client left out may
    make the prompt too long. Then all replies stand as the client sent them."""
    try:
        return _with_tokens(encoder, draft)
    except ContextTooLong:
        if not draft.remembered:
            raise
    return _with_tokens(encoder, render(template, replace(draft, remembered={})))


def _with_tokens(encoder: Encoder, draft: PromptDraft) -> PromptDraft:
    text, param = draft.rendering.text, draft.conversation.path
    pictures = PicturePlaces(encoder.processor, draft)
    end_of_text = ReplySpan(len(text), len(text), ())
    parts: list[tuple[int, Encoding]] = []
    written_ids: list[TokenIds] = []
    begin = 0
    for span in (*draft.spans, end_of_text):
        adds_special = not begin and encoder.adds_bos(text)
        expanded = pictures.expanded(text[begin : span.begin])
        part = encoder.encode(expanded.text, adds_special=adds_special, param=param, known=draft.known)
        parts += [(begin, part._replace(offsets=expanded.rendered(part.offsets))), (span.begin, _sampled(span))]
        written_ids += [part.token_ids, np.full(len(span.token_ids), -1, np.int32)]
        begin = span.end
    token_ids, offsets = joined(parts)
    encoder.check_positions(len(token_ids), param)
    written = np.concatenate(written_ids)
    placed = pictures.name(token_ids, written)
    draft = replace(draft, offsets=offsets, written_ids=written)
    return draft.with_prompt(token_ids=token_ids, pictures=placed, replayed=len(draft.spans))


def _sampled(span: ReplySpan) -> Encoding:
    offsets = np.tile(np.array([0, span.end - span.begin], np.int32), (len(span.token_ids), 1))
    return Encoding(np.array(span.token_ids, np.int32), offsets)


def added_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Returns the tokens that a tokenizer puts before and behind every text, such as BOS."""
    (alone,) = tokenizer.backend_tokenizer.encode_batch([_PROBE], add_special_tokens=False)
    (encoding,) = tokenizer.backend_tokenizer.encode_batch([_PROBE])
    begin = next((k for k, is_added in enumerate(encoding.special_tokens_mask) if not is_added), len(encoding.ids))
    return encoding.ids[:begin], encoding.ids[begin + len(alone.ids) :]


class TextParts:
    """Cuts texts where their parts, encoded alone, give the tokens of the whole text: before a special token.

    Tokenizers find their added tokens first, the leftmost and of these the longest, and encode the text between them
    piece by piece (`AddedVocabulary` of the library tokenizers). So the two sides of such a token are independent,
    unless a token takes blanks beside it, must be a word, or overlaps the beginning of another.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        found = [] if tokenizer.split_special_tokens else _separating(tokenizer.added_tokens_decoder.values())
        if found and not self._holds(tokenizer, found):
            found = []
        # Longest first makes no difference to where one begins.
        self._separator = re.compile("|".join(map(re.escape, found)) or "(?!)")

    def of(self, text: str) -> list[str]:
        """Returns the parts of a text. A longer text that begins with this one has the same parts, except the last."""
        begins = [0]
        while match := self._separator.search(text, begins[-1] + PART_CHARS):
            begins.append(match.start())
        return [text[begin:end] for begin, end in pairwise([*begins, len(text)])]

    @staticmethod
    def _holds(tokenizer: PreTrainedTokenizerFast, separators: list[str]) -> bool:
        """Returns whether a trial gives the same tokens: a tokenizer may have unknown steps."""
        parts = [separator + _PROBE.format(separator, separators[0]) for separator in separators[:8]]
        whole, *alone = encoded(tokenizer, ["".join(parts), *parts])
        found = joined(zip(accumulate(map(len, parts), initial=0), alone, strict=False))
        return all(map(np.array_equal, whole, found))


def _separating(added: Iterable[AddedToken]) -> list[str]:
    """Returns the special tokens before which a text may be cut."""
    first = [token for token in added if token.content and not token.normalized]
    within = frozenset("".join(token.content[1:] for token in first))
    takes_more = [token.content for token in first if token.lstrip or token.single_word]
    has_words = any(token.single_word for token in first)
    return [
        token.content
        for token in first
        if token.special
        and not token.content[0].isspace()
        # A word before it ends with the part, but not in the whole text.
        and not (has_words and re.match(r"\w", token.content))
        and token.content[0] not in within
        and not any(text.startswith(token.content) for text in takes_more)
    ]


class Encoder:
    """Encodes the prompts of one model. Errors name the field `param`. Thread-safe. `positions_limit` says in an error
    why no more than `max_positions` are served. With a `processor` each prompt begins with a BOS, as the processors of
    multimodal models write it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        vocab_size: int,
        max_positions: int,
        positions_limit: str = "the positions of this model",
        processor: PictureProcessor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.processor = processor
        self._vocab_size = vocab_size
        self._max_positions, self._positions_limit = max_positions, positions_limit
        # Switches off padding and truncation, which the tokenizer's files may ask for.
        tokenizer("", add_special_tokens=False, verbose=False)
        self._parts = TextParts(tokenizer)
        self.added = added_tokens(tokenizer)
        """Token ids that the tokenizer puts before and behind a text."""

    def warm_up(self) -> None:
        """Computes the values that the first prompt needs."""
        self.encode("warm up", param="")
        _ = self._longest_token

    def encode(self, text: str, *, adds_special: bool = False, param: str, known: OwnedParts | None = None) -> Encoding:
        """Returns the tokens of `text`, and with `adds_special` those that the tokenizer adds, such as BOS.

        Long parts of the text are looked up in `known`, and kept there. Raises `InvalidRequest` for a text without
        tokens or with half a character, and `ContextTooLong`.
        """
        if (least := self._least(text)) >= self._max_positions:
            raise self._too_long(f"at least {least}", param)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"half of a surrogate pair in the prompt (its character {error.start}); send whole characters"
            raise InvalidRequest.at(param, problem) from error
        self._probe(text, param)
        parts = self._parts.of(text)
        long = [k for k, part in enumerate(parts) if len(part) >= PART_CHARS] if known is not None else []
        encodings = {k: found for k in long if known is not None and (found := known.get(parts[k])) is not None}
        missing = [k for k in range(len(parts)) if k not in encodings]
        encodings |= zip(missing, self._encoded([parts[k] for k in missing]), strict=True)
        begins = accumulate(map(len, parts), initial=0)
        encoding = joined(zip(begins, map(encodings.__getitem__, range(len(parts))), strict=False))
        if adds_special:
            encoding = encoding.between(*self.added)
        if not len(encoding.token_ids):
            raise InvalidRequest.at(param, "the prompt has no tokens")
        self.check_positions(len(encoding.token_ids), param)
        if known is not None:
            for k in long:
                known.put(parts[k], encodings[k])
        return encoding

    def adds_bos(self, text: str) -> bool:
        """Returns whether the tokenizer must add a BOS that the template did not write."""
        bos = self._tokenizer.bos_token
        return self.processor is not None and not (bos and text.startswith(bos))

    def _encoded(self, texts: Sequence[str]) -> list[Encoding]:
        return encoded(self._tokenizer, texts)

    @cached_property
    def _longest_token(self) -> int:
        """The number of characters of the longest token of the vocabulary. A byte counts as a character."""
        return max(map(len, self._tokenizer.get_vocab()))

    def _least(self, text: str) -> int:
        """Returns a lower bound of the number of tokens. To encode megabytes of blanks, which are few tokens, takes a
        minute and gigabytes of memory."""
        return len(text) // self._longest_token

    def _probe(self, text: str, param: str) -> None:
        """Raises `ContextTooLong` if the beginning of a long text has too many tokens, before all of it is encoded."""
        limit = self._max_positions * _PROBED_CHARS_PER_POSITION
        if len(text) > limit:
            begins = self._tokenizer(text[:limit], add_special_tokens=False, verbose=False)["input_ids"]
            # Twice as many, because the last tokens of a cut text differ from those of the whole text.
            if len(begins) >= 2 * self._max_positions:
                raise self._too_long(f"more than {len(begins) // 2}", param)

    def check_positions(self, num_tokens: int, param: str) -> None:
        if num_tokens >= self._max_positions:
            raise self._too_long(str(num_tokens), param)

    def _too_long(self, num_tokens: str, param: str) -> ContextTooLong:
        # Agents look for the words of Anthropic's API, "prompt is too long: N tokens > M", and then shorten it.
        return ContextTooLong(
            f"{param}: the prompt is too long: {num_tokens} tokens > {self._max_positions}, {self._positions_limit} "
            "for prompt and reply together",
            param=param,
        )

    def check_vocabulary(self, token_ids: Sequence[int], param: str = "prompt") -> None:
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._vocab_size:
                problem = f"{token_id} is not a token id of this model (0 to {self._vocab_size - 1})"
                raise InvalidRequest.at(f"{param}.{index}", problem)

    def count(self, texts: Sequence[str]) -> list[int]:
        """Returns the number of tokens of each text; a lower bound for a text that cannot fit."""
        short = [text if self._least(text) < self._max_positions else "" for text in texts]
        found = self._tokenizer(short, add_special_tokens=False, verbose=False)["input_ids"]
        return [len(ids) if text else self._least(whole) for ids, text, whole in zip(found, short, texts, strict=True)]
