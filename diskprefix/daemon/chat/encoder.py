"""Encodes prompts, within the model's positions and vocabulary. Text of earlier prompts is not encoded again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from diskprefix.daemon.chat.client_text import private_characters
from diskprefix.daemon.chat.content import PicturePlaces
from diskprefix.daemon.chat.control_tokens import control_texts
from diskprefix.daemon.chat.draft import PromptDraft, ReplySpan
from diskprefix.daemon.chat.known_parts import Encoding, OwnedParts
from diskprefix.daemon.chat.template import ChatTemplate, render
from diskprefix.errors import ContextTooLong, InvalidRequest
from diskprefix.tokens import TokenIds

if TYPE_CHECKING:
    from diskprefix.runtime.files.tokenizer import Tokenizer
    from diskprefix.runtime.pictures.picture_processor import PictureProcessor

PART_CHARS = 4096
"""The least length of a part, except the last. A shorter part is encoded as fast as it is looked up."""
_PROBE = "user\n  Hello wörld, it's  1234 {}  \n\n\tx = [1];{}\n \n 日本語 e\u0301 "
_PROBED_CHARS_PER_POSITION = 32
"""The number of characters to encode first, for a longer text. Real text has about four characters per token."""
_CUT_TOKENS = 64
"""The number of tokens at the end of a truncated text that may differ from the whole text's tokens."""


def encode_texts(backend: Backend, texts: Sequence[str]) -> list[Encoding]:
    """Encodes texts in parallel, without the tokens that the tokenizer adds."""
    batch = backend.encode_batch(texts, add_special_tokens=False)
    return [Encoding(np.array(text.ids, np.int32), np.array(text.offsets, np.int32).reshape(-1, 2)) for text in batch]


def joined(parts: Iterable[tuple[int, Encoding]]) -> Encoding:
    """Joins parts of a text (at least one), each given with the position of its first character."""
    ids, offsets = [], []
    for begin, part in parts:
        ids.append(part.token_ids)
        # (0, 0) stays: a token without text.
        offsets.append(part.offsets + begin * (part.offsets[:, 1:] > 0))
    return Encoding(np.concatenate(ids), np.concatenate(offsets).astype(np.int32, copy=False))


def encode(encoder: Encoder, template: ChatTemplate, draft: PromptDraft) -> PromptDraft:
    """Encodes the rendered text, with sampled tokens in its spans. If the prompt is too long, perhaps because of the
    reasoning in these tokens, all replies are encoded as the client sent them."""
    try:
        return _with_tokens(encoder, draft)
    except ContextTooLong:
        if not draft.remembered:
            raise
    return _with_tokens(encoder, render(template, replace(draft, remembered={})))


def _with_tokens(encoder: Encoder, draft: PromptDraft) -> PromptDraft:
    text, for_tokens, param = draft.rendering.text, draft.rendering.for_tokens, draft.conversation.path
    pictures = PicturePlaces(encoder.processor, draft)
    end_of_text = ReplySpan(len(text), len(text), ())
    parts: list[tuple[int, Encoding]] = []
    written_ids: list[TokenIds] = []
    begin = 0
    for span in (*draft.spans, end_of_text):
        expanded = pictures.expanded(text[begin : span.begin], for_tokens[begin : span.begin])
        adds_special = not begin and encoder.adds_bos(text)
        part = encoder.encode(*expanded[:2], adds_special=adds_special, param=param, known=draft.known)
        offsets = np.tile(np.array([0, span.end - span.begin], np.int32), (len(span.token_ids), 1))
        sampled = Encoding(np.array(span.token_ids, np.int32), offsets)
        parts += [(begin, part._replace(offsets=expanded.rendered(part.offsets))), (span.begin, sampled)]
        written_ids += [part.token_ids, np.full(len(span.token_ids), -1, np.int32)]
        begin = span.end
    token_ids, offsets = joined(parts)
    encoder.check_positions(len(token_ids), param)
    written = np.concatenate(written_ids)
    placed = pictures.name(token_ids, written)
    draft = replace(draft, offsets=offsets, written_ids=written)
    return draft.with_prompt(token_ids=token_ids, pictures=placed, replayed=len(draft.spans))


def added_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Returns the tokens that a tokenizer puts before and after every text, such as BOS."""
    backend = tokenizer.backend_for([_PROBE])
    (alone,) = backend.encode_batch([_PROBE], add_special_tokens=False)
    (encoding,) = backend.encode_batch([_PROBE])
    begin = next((k for k, is_added in enumerate(encoding.special_tokens_mask) if not is_added), len(encoding.ids))
    return encoding.ids[:begin], encoding.ids[begin + len(alone.ids) :]


class TextParts:
    """Cuts texts before special tokens. The parts, encoded separately, give the tokens of the whole text.

    Tokenizers find their added tokens first (the leftmost, and of several the longest), and encode the text between
    them piece by piece (`AddedVocabulary` of the library tokenizers). So the text before an added token is independent
    of the rest, unless a token absorbs adjacent blanks, must be a word, or overlaps the beginning of another.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        separators = [] if tokenizer.split_special_tokens else _separating(tokenizer.added_tokens_decoder.values())
        if separators and not self._holds(tokenizer, separators):
            separators = []
        # The order does not matter: only the beginning of a match is used.
        self._separator = re.compile("|".join(map(re.escape, separators)) or "(?!)")

    def of(self, text: str) -> list[str]:
        """Returns the parts of a text. All but the last are also parts of any longer text with this beginning."""
        begins = [0]
        while match := self._separator.search(text, begins[-1] + PART_CHARS):
            begins.append(match.start())
        return [text[begin:end] for begin, end in pairwise([*begins, len(text)])]

    @staticmethod
    def _holds(tokenizer: Tokenizer, separators: list[str]) -> bool:
        """Tests whether separately encoded parts give the tokens of the whole: a tokenizer may have unknown steps."""
        parts = [separator + _PROBE.format(separator, separators[0]) for separator in separators[:8]]
        texts = ["".join(parts), *parts]
        whole, *alone = encode_texts(tokenizer.backend_for(texts), texts)
        cut = joined(zip(accumulate(map(len, parts), initial=0), alone, strict=False))
        return all(map(np.array_equal, whole, cut))


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
        # A word before such a token ends with the part, but not in the whole text.
        and not (has_words and re.match(r"\w", token.content))
        and token.content[0] not in within
        and not any(text.startswith(token.content) for text in takes_more)
    ]


class PlainTexts:
    """Encodes texts like the tokenizer, except that some added tokens must not be found in them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._contents = {index: token.content for index, token in added.items()}
        control = control_texts(added)
        self._control = {index for index, token in added.items() if token.content in control}
        self.has_normalized = tokenizer.has_normalizer and any(token.normalized for token in added.values())
        """True if a text may become a token that it does not spell: `＜s＞` may become `<s>`."""

    def encode(self, text: str, for_tokens: str, encoding: Encoding) -> Encoding:
        """Returns a text's tokens, with the added tokens of `encoding`. Control tokens count only if `for_tokens`
        spells them."""
        right: dict[int, tuple[int, int]] = {}
        is_right = text == for_tokens
        for at in np.flatnonzero(np.isin(encoding.token_ids, [*self._contents])).tolist():
            index, (begin, end) = int(encoding.token_ids[at]), encoding.offsets[at].tolist()
            if index in self._control and self._contents[index] not in for_tokens[begin:end]:
                is_right = False
            else:
                right[begin] = index, end
        if is_right:
            return encoding
        # Each added token is replaced by a guard character that is not in the text, the backend's only added token.
        guard = chr(private_characters(1, set(text))[0])
        pieces, last = [], 0
        for begin, (_, end) in right.items():
            pieces += [text[last:begin], guard * (end - begin)]
            last = end
        backend = self.without_tokens(guard)
        [plain] = encode_texts(backend, ["".join([*pieces, text[last:]])])
        [guard_id] = backend.get_added_tokens_decoder()
        parts, first = [], 0
        for at in np.flatnonzero(np.isin(plain.token_ids, [guard_id, *self._control])).tolist():
            index, (begin, end) = int(plain.token_ids[at]), plain.offsets[at].tolist()
            if index == guard_id:
                token_ids = [right[begin][0]] if begin in right else []
                end = right[begin][1] if begin in right else end
            elif self._contents[index] in text[begin:end]:
                # The vocabulary may also have the text of a control token as an ordinary piece.
                token_ids = self._characters(index)
            else:
                continue
            spans = np.tile(np.array([begin, end], np.int32), (len(token_ids), 1))
            parts += [Encoding(plain.token_ids[first:at], plain.offsets[first:at])]
            parts += [Encoding(np.array(token_ids, np.int32), spans)]
            first = at + 1
        parts.append(Encoding(plain.token_ids[first:], plain.offsets[first:]))
        return joined((0, part) for part in parts)

    def without_tokens(self, *added: str) -> Backend:
        """Returns the tokenizer with these added tokens only."""
        whole = self._tokenizer.backend_tokenizer
        backend = Backend(whole.model)
        backend.normalizer, backend.pre_tokenizer = whole.normalizer, whole.pre_tokenizer
        backend.add_tokens([AddedToken(text, normalized=False) for text in added])
        return backend

    def _characters(self, index: int) -> list[int]:
        """Returns the tokens of the characters of a token."""
        backend = self._tokenizer.backend_tokenizer
        return [token.id for char in backend.id_to_token(index) or "" for token in backend.model.tokenize(char)]


class Encoder:
    """Encodes the prompts of one model. Errors name the field `param`. Thread-safe. `positions_limit` is the reason for
    `max_positions`, for messages. With a `processor`, prompts begin with BOS, as multimodal models expect."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_positions: int,
        positions_limit: str = "the context of this model",
        processor: PictureProcessor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.processor = processor
        self._vocab_size = vocab_size
        self._max_positions, self._positions_limit = max_positions, positions_limit
        self._probed_chars = max_positions * _PROBED_CHARS_PER_POSITION
        self._parts = TextParts(tokenizer)
        self.added = added_tokens(tokenizer)
        """Token ids that the tokenizer puts before and after a text."""

    def warm_up(self) -> None:
        """Computes the values that the first prompt needs."""
        self.encode("warm up", param="")

    def encode(
        self,
        text: str,
        for_tokens: str | None = None,
        *,
        adds_special: bool = False,
        param: str,
        known: OwnedParts | None = None,
        at_most: int | None = None,
    ) -> Encoding:
        """Returns the tokens of `text`, and with `adds_special` the tokens that the tokenizer adds, such as BOS.

        Added tokens are searched for in `for_tokens`, which is `text` with stand-ins for characters that must not
        become tokens; None: in `text`. Long parts are looked up in `known`, and added to it. `at_most` truncates the
        text to this number of tokens. Raises `InvalidRequest` for a text without tokens or with half a character, and
        `ContextTooLong`.
        """
        if at_most is not None:
            # More than enough, so that the last tokens equal the whole text's tokens.
            enough = (at_most + _CUT_TOKENS) * self._longest_token
            text, for_tokens = text[:enough], None if for_tokens is None else for_tokens[:enough]
        elif (least := self._least(text)) >= self._max_positions:
            raise self._too_long(f"at least {least}", param)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"half of a surrogate pair in the prompt (its character {error.start}); send whole characters"
            raise InvalidRequest.at(param, problem) from error
        if at_most is None:
            self._probe(text, param)
        begins = [0, *accumulate(map(len, parts := self._parts.of(text if for_tokens is None else for_tokens)))]
        texts = [text[begin:end] for begin, end in pairwise(begins)]
        all_plain = for_tokens is not None and self._plain.has_normalized
        # No text has a lone surrogate, so it marks the keys of parts that must not spell tokens.
        is_plain = [all_plain or own != part for own, part in zip(texts, parts, strict=True)]
        keys = [f"{texts[k]}\ud800{part}" if is_plain[k] else part for k, part in enumerate(parts)]
        long = [k for k, own in enumerate(texts) if len(own) >= PART_CHARS] if known is not None else []
        encodings = {k: part for k in long if known is not None and (part := known.get(keys[k])) is not None}
        missing = [k for k in range(len(parts)) if k not in encodings]
        encodings |= zip(missing, self._encoded([parts[k] for k in missing]), strict=True)
        for k in missing:
            if is_plain[k]:
                encodings[k] = self._plain.encode(texts[k], parts[k], encodings[k])
        encoding = joined((begins[k], encodings[k]) for k in range(len(parts)))
        if at_most is not None:
            left = max(0, at_most - adds_special * (len(self.added[0]) + len(self.added[1])))
            encoding = Encoding(encoding.token_ids[:left], encoding.offsets[:left])
        if adds_special:
            before, after = (np.array(ids, np.int32) for ids in self.added)
            offsets = np.pad(encoding.offsets, ((len(before), len(after)), (0, 0)))
            encoding = Encoding(np.concatenate([before, encoding.token_ids, after]), offsets)
        if not len(encoding.token_ids):
            raise InvalidRequest.at(param, "the prompt has no tokens")
        self.check_positions(len(encoding.token_ids), param)
        if known is not None:
            for k in long:
                known.put(keys[k], encodings[k])
        return encoding

    @cached_property
    def _plain(self) -> PlainTexts:
        return PlainTexts(self._tokenizer)

    def adds_bos(self, text: str) -> bool:
        """Returns whether the tokenizer must add a BOS that the template did not write."""
        bos = self._tokenizer.bos_token
        return self.processor is not None and not (bos and text.startswith(bos))

    def _encoded(self, texts: Sequence[str]) -> list[Encoding]:
        return encode_texts(self._tokenizer.backend_for(texts), texts)

    @cached_property
    def _longest_token(self) -> int:
        """The characters of the longest token of the vocabulary. A byte counts as a character."""
        return max(map(len, self._tokenizer.get_vocab()))

    def _least(self, text: str) -> int:
        """Returns a lower bound of the number of tokens, without encoding: megabytes of blanks take a minute and
        gigabytes. The vocabulary is read only for a long text."""
        return len(text) // self._longest_token if len(text) > self._probed_chars else 0

    def _probe(self, text: str, param: str) -> None:
        """Raises `ContextTooLong` if already the beginning of a long text has too many tokens."""
        if len(text) > self._probed_chars:
            begins = self._tokenizer.encode(text[: self._probed_chars], add_special_tokens=False)
            # Twice as many, because the last tokens of a truncated text differ from the whole text's tokens.
            if len(begins) >= 2 * self._max_positions:
                raise self._too_long(f"more than {len(begins) // 2}", param)

    def check_positions(self, num_tokens: int, param: str) -> None:
        if num_tokens >= self._max_positions:
            raise self._too_long(str(num_tokens), param)

    def _too_long(self, num_tokens: str, param: str) -> ContextTooLong:
        # Agents look for the words of Anthropic's API, "prompt is too long: N tokens > M", and then compact.
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
        """Returns the number of tokens of each text; a lower bound for a text that is too long."""
        short = [text if self._least(text) < self._max_positions else "" for text in texts]
        encodings = self._plain.without_tokens().encode_batch(short, add_special_tokens=False)
        return [
            len(encoding.ids) if text else self._least(whole)
            for encoding, text, whole in zip(encodings, short, texts, strict=True)
        ]
