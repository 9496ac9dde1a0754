"""The tokens of a text, and the parts of a long one: those that earlier prompts had need not be encoded again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from diskprefix.tokens import TokenIds

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

PART_CHARS = 4096
"""The least length of a part that another one follows. A shorter one is encoded as fast as it is found in the store."""
_PROBE = "user\n  Hello wörld, it's  1234 {}  \n\n\tx = [1];{}\n \n 日本語 e\u0301 "


class Encoding(NamedTuple):
    """The tokens of a text."""

    token_ids: TokenIds
    offsets: npt.NDArray[np.int32]
    """First and last character (exclusive) of each token, shape (num_tokens, 2). (0, 0): the tokenizer added it."""

    def between(self, before: Sequence[int], behind: Sequence[int]) -> Encoding:
        """Returns these tokens with others before and behind them that have no text."""
        token_ids = np.concatenate([np.array(before, np.int32), self.token_ids, np.array(behind, np.int32)])
        return Encoding(token_ids, np.pad(self.offsets, ((len(before), len(behind)), (0, 0))))

    def record(self) -> bytes:
        """Returns what `of_record` reads: ids, the distances of the beginnings, and the lengths, int32."""
        starts, ends = self.offsets.T
        return np.stack([self.token_ids, np.diff(starts, prepend=np.int32(0)), ends - starts]).astype("<i4").tobytes()

    @classmethod
    def of_record(cls, record: bytes) -> Encoding:
        """Raises `ValueError` for a record that `record` did not write."""
        token_ids, distances, lengths = np.frombuffer(record, "<i4").reshape(3, -1).astype(np.int32)
        starts = np.cumsum(distances, dtype=np.int32)
        return cls(token_ids, np.stack([starts, starts + lengths], axis=1))


def encoded(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[Encoding]:
    """Encodes texts, beside each other unless the library is told otherwise, without what is added to a text."""
    batch = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [Encoding(np.array(one.ids, np.int32), np.array(one.offsets, np.int32).reshape(-1, 2)) for one in batch]


def joined(parts: Iterable[tuple[int, Encoding]]) -> Encoding:
    """Joins parts of a text, at least one, each with the character that it begins at."""
    ids, offsets = [], []
    for begin, part in parts:
        ids.append(part.token_ids)
        # A token without text, (0, 0), stays one.
        offsets.append(part.offsets + begin * (part.offsets[:, 1:] > 0))
    return Encoding(np.concatenate(ids), np.concatenate(offsets).astype(np.int32, copy=False))


def added_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Returns what a tokenizer puts before and behind every text, such as BOS: what is there is added last, whatever
    the text is."""
    (alone,) = tokenizer.backend_tokenizer.encode_batch([_PROBE], add_special_tokens=False)
    (encoding,) = tokenizer.backend_tokenizer.encode_batch([_PROBE])
    begin = next((k for k, is_added in enumerate(encoding.special_tokens_mask) if not is_added), len(encoding.ids))
    return encoding.ids[:begin], encoding.ids[begin + len(alone.ids) :]


class TextParts:
    """Cuts texts where their parts, encoded alone, give the tokens of the whole text: before a special token.

    Tokenizers find their added tokens first, the leftmost and of these the longest, and treat what is between them
    piece by piece (`AddedVocabulary` of the library tokenizers). So nothing on one side of such a token has to do with
    the other, unless a token takes blanks beside it, must be a word, or reaches over the beginning of another.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        found = [
            text for text in _separating(tokenizer.added_tokens_decoder.values()) if not tokenizer.split_special_tokens
        ]
        # Longest first makes no difference to where one begins.
        self._separator = re.compile("|".join(map(re.escape, found)) or "(?!)")
        if found and not self._holds(tokenizer, found):
            self._separator = re.compile("(?!)")

    def of(self, text: str) -> list[str]:
        """Returns the parts of a text. A text that goes on where this one ends has all of them but the last."""
        begins = [0]
        while match := self._separator.search(text, begins[-1] + PART_CHARS):
            begins.append(match.start())
        return [text[begin:end] for begin, end in pairwise([*begins, len(text)])]

    @staticmethod
    def _holds(tokenizer: PreTrainedTokenizerFast, separators: list[str]) -> bool:
        """Tries it: a tokenizer may have other steps than are known here."""
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
