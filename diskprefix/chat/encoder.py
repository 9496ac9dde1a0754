"""Encodes prompts, within the model's positions and vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from diskprefix.chat.splice import Encoded, Span, spliced, texts_between
from diskprefix.errors import ContextTooLong, InvalidRequest

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerFast

_PROBED_CHARS_PER_POSITION = 32
"""Of a longer text, only so many characters are encoded first. Real text has about four characters per token."""


class Encoder:
    """Encodes the prompts of one model. Errors name the field `param`. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, vocab_size: int, max_positions: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_positions = max_positions

    def encode_spliced(self, text: str, spans: Sequence[Span], *, adds_bos: bool, param: str) -> Encoded:
        """Encodes `text` with the sampled tokens of `spans` in their places. Raises as `encode` does."""
        parts = []
        for begin, part in texts_between(text, spans):
            encoding = self.encode(part, add_special_tokens=adds_bos and not begin, param=param)
            parts.append((begin, encoding["input_ids"], encoding["offset_mapping"]))
        encoded = spliced(parts, spans)
        self.check_positions(len(encoded.token_ids), param)
        return encoded

    def encode(self, text: str, *, add_special_tokens: bool, param: str) -> BatchEncoding:
        """Returns the token ids and offsets of `text`."""
        self._probe(text, param)
        encoding = self._tokenizer(
            text, add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False
        )
        self._check(len(encoding["input_ids"]), param)
        return encoding

    def encode_plain(self, text: str, *, param: str) -> tuple[list[int], list[int]]:
        """Returns the token ids of `text`, and for each of them 1 if the tokenizer added it, such as BOS, else 0. It
        takes two thirds of the time of `encode`, because no offsets are counted."""
        self._probe(text, param)
        (encoding,) = self._tokenizer.backend_tokenizer.encode_batch_fast([text])
        self._check(len(encoding.ids), param)
        return encoding.ids, encoding.special_tokens_mask

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
        """Returns the numbers of tokens of texts."""
        return [len(ids) for ids in self._tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]]

    def first_token(self, text: str) -> int | None:
        """Returns the first token of a text, None if it has none."""
        return next(iter(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]), None)
