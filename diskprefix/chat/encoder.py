"""Encodes prompts, within the model's positions and vocabulary."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from diskprefix.chat.encoding import PART_CHARS, Encoding, TextParts, added_tokens, encoded, joined
from diskprefix.chat.replay import NoteStore
from diskprefix.chat.splice import Encoded, Span, spliced, texts_between
from diskprefix.errors import ContextTooLong, InvalidRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PROBED_CHARS_PER_POSITION = 32
"""Of a longer text, only so many characters are encoded first. Real text has about four characters per token."""

_RECORD_VERSION = 1
"""Of `Encoding.record`."""


class Encoder:
    """Encodes the prompts of one model. Errors name the field `param`. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, vocab_size: int, max_positions: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        # Sets aside what the tokenizer's files say of padding and of cutting off, which is not for prompts.
        tokenizer("", add_special_tokens=False, verbose=False)
        self._parts = TextParts(tokenizer)
        self.added = added_tokens(tokenizer)
        """What the tokenizer puts before and behind a text, token ids."""

    def warm_up(self) -> None:
        """Finds out what the first prompt needs."""
        self.encode("warm up", param="")
        _ = self._longest_token
        _ = self._identity

    @cached_property
    def _identity(self) -> str:
        """A digest of all that says how a text is encoded and kept. It takes a tenth of a second."""
        import tokenizers

        content = f"{_RECORD_VERSION} {tokenizers.__version__} {self._tokenizer.backend_tokenizer.to_str()}"
        return hashlib.sha256(content.encode()).hexdigest()

    def encode_spliced(
        self, text: str, spans: Sequence[Span], *, adds_bos: bool, param: str, store: NoteStore | None = None
    ) -> Encoded:
        """Encodes `text` with the sampled tokens of `spans` in their places. Raises as `encode` does."""
        parts = []
        for begin, part in texts_between(text, spans):
            parts.append((begin, self.encode(part, adds_special=adds_bos and not begin, param=param, store=store)))
        whole = spliced(parts, spans)
        self.check_positions(len(whole.token_ids), param)
        return whole

    def encode(self, text: str, *, adds_special: bool = False, param: str, store: NoteStore | None = None) -> Encoding:
        """Returns the tokens of `text`; with `adds_special` also those that the tokenizer adds to a text, such as BOS.
        Long parts of the text are looked for in `store`, and kept there.

        Raises `InvalidRequest` for a text without tokens or with half a character, and `ContextTooLong`.
        """
        if (least := self._least(text)) >= self._max_positions:
            raise self._too_long(f"at least {least}", param)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"{param}: half of a surrogate pair in the prompt (its character {error.start}); send whole characters",
                param=param,
            ) from error
        self._probe(text, param)
        parts = self._parts.of(text)
        long = [k for k, part in enumerate(parts) if len(part) >= PART_CHARS] if store is not None else []
        ids = {k: f"{self._identity}\n{parts[k]}" for k in long}
        found = {} if store is None else _found(store, ids)
        missing = [k for k in range(len(parts)) if k not in found]
        fresh = dict(zip(missing, self._encoded([parts[k] for k in missing]), strict=True))
        encodings = found | fresh
        begins = accumulate(map(len, parts), initial=0)
        encoding = joined(zip(begins, map(encodings.__getitem__, range(len(parts))), strict=False))
        if adds_special:
            encoding = encoding.between(*self.added)
        self._check(len(encoding.token_ids), param)
        if store is not None:
            for k in ids.keys() & fresh.keys():
                store.put(ids[k], fresh[k].record())
        return encoding

    def _encoded(self, texts: Sequence[str]) -> list[Encoding]:
        return encoded(self._tokenizer, texts)

    @cached_property
    def _longest_token(self) -> int:
        """The number of characters of the longest token of the vocabulary. A byte counts as a character."""
        return max(map(len, self._tokenizer.get_vocab()))

    def _least(self, text: str) -> int:
        """Returns the number of tokens that a text has at least. It is found without encoding: to encode megabytes of
        blanks, which are few tokens, takes a minute and gigabytes of memory."""
        return len(text) // self._longest_token

    def _probe(self, text: str, param: str) -> None:
        """To encode megabytes of text takes many seconds and gigabytes of memory. So the beginning of a long text is
        encoded first, and the whole text only if the beginning does not show that it is too long."""
        limit = self._max_positions * _PROBED_CHARS_PER_POSITION
        if len(text) > limit:
            begins = self._tokenizer(text[:limit], add_special_tokens=False, verbose=False)["input_ids"]
            # Twice as many, because the last tokens of a text that is cut differ from those of the whole text.
            if len(begins) >= 2 * self._max_positions:
                raise self._too_long(f"more than {len(begins) // 2}", param)

    def _check(self, num_tokens: int, param: str) -> None:
        if not num_tokens:
            raise InvalidRequest(f"{param}: the prompt has no tokens", param=param)
        self.check_positions(num_tokens, param)

    def check_positions(self, num_tokens: int, param: str) -> None:
        if num_tokens >= self._max_positions:
            raise self._too_long(str(num_tokens), param)

    def _too_long(self, num_tokens: str, param: str) -> ContextTooLong:
        # Agents look for the words of Anthropic's API, "prompt is too long: N tokens > M", and then shorten it.
        return ContextTooLong(
            f"{param}: the prompt is too long: {num_tokens} tokens > {self._max_positions}, the positions of this "
            "model for prompt and reply together",
            param=param,
        )

    def check_vocabulary(self, token_ids: Sequence[int], param: str = "prompt") -> None:
        for index, token_id in enumerate(token_ids):
            if not 0 <= token_id < self._vocab_size:
                raise InvalidRequest(
                    f"{param}.{index}: {token_id} is not a token id of this model (0 to {self._vocab_size - 1})",
                    param=f"{param}.{index}",
                )

    def count(self, texts: Sequence[str]) -> list[int]:
        """Returns the numbers of tokens of texts; the least number for a text that cannot fit."""
        short = [text if self._least(text) < self._max_positions else "" for text in texts]
        found = self._tokenizer(short, add_special_tokens=False, verbose=False)["input_ids"]
        return [len(ids) if text else self._least(whole) for ids, text, whole in zip(found, short, texts, strict=True)]

    def first_token(self, text: str) -> int | None:
        """Returns the first token of a text, None if it has none."""
        return next(iter(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]), None)


def _found(store: NoteStore, ids: Mapping[int, str]) -> dict[int, Encoding]:
    """Returns those of the encodings with these ids that are there and can be read."""
    found = {}
    for k, id_ in ids.items():
        with suppress(ValueError):
            if (record := store.get(id_)) is not None:
                found[k] = Encoding.of_record(record)
    return found
