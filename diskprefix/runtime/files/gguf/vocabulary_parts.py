"""Tokenizers with a part of a byte-level vocabulary: the tokens and merges that can occur in some texts. To make one
takes milliseconds. To make the whole takes a third of a second, for which Python's lock is held.

The tokens of a text are those of the whole, because a merge of a word makes parts of that word only, and the merges
that are left keep their order. The words come from the library itself: a tokenizer without merges cuts the text into
letters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias, cast

import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from diskprefix.runtime.files.string_hashes import among, hashes_of_pairs, hashes_of_parts, hashes_within

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer as Backend

    from diskprefix.runtime.files.gguf.gguf_strings import StringPiece

Make: TypeAlias = "Callable[[dict[str, int], list[tuple[str, str]]], Backend]"
"""Makes a tokenizer of tokens, with their ids, and merges. Added tokens are those of the tokens that are."""
_MOST_CHARS = 3 << 15
"""The most characters of texts. For longer ones, the whole is made as fast."""
_MOST_PARTS = 1 << 20
"""The most parts of the words of a text. More come from words of hundreds of letters."""


def pair_of(merge: str) -> tuple[str, str]:
    """Returns the two tokens of a merge."""
    left, _, right = merge.partition(" ")
    return left, right


class VocabularyParts:
    """Makes tokenizers of parts of a vocabulary: `tokens`, all different, and `merges`, as a file has them. A part
    that encodes has all `added` tokens. Thread-safe."""

    def __init__(self, tokens: StringPiece, merges: StringPiece, added: Iterable[str], make: Make) -> None:
        self._tokens, self._merges, self._make = tokens, merges, make
        self._always = tokens.numbers_of([*ByteLevel.alphabet(), *added])
        self.letters = make(self._always, [])
        """The tokenizer without merges."""

    def __len__(self) -> int:
        return len(self._tokens)

    def whole(self) -> Backend:
        """Returns the tokenizer with all tokens. Raises `ModelError`."""
        texts = cast(list[str], self._tokens.texts())
        merges = cast(list[str], self._merges.texts())
        return self._make(dict(zip(texts, range(len(texts)), strict=True)), list(map(pair_of, merges)))

    def of_ids(self, ids: Iterable[int]) -> Backend:
        """Returns a tokenizer that decodes these ids."""
        return self._make(self._named(ids), [])

    def of_texts(self, texts: Sequence[str]) -> Backend | None:
        """Returns a tokenizer that encodes these texts; None if they are so long that the whole is made as fast."""
        if sum(map(len, texts)) > _MOST_CHARS:
            return None
        parts = hashes_of_parts(self._words(texts), self._longest, _MOST_PARTS)
        if parts is None:
            return None
        numbers = among(self._tokens.hashes, parts)
        vocabulary = self._always | self._named(numbers.tolist())
        return self._make(vocabulary, self._merges_within(vocabulary, self._tokens.hashes[numbers]))

    def _words(self, texts: Sequence[str]) -> set[bytes]:
        """Returns what the vocabulary's model would get to merge."""
        words = set[str]()
        for encoding in self.letters.encode_batch(texts, add_special_tokens=False):
            begin, letters, of_word = 0, encoding.tokens, encoding.word_ids
            for end in range(1, len(letters) + 1):
                if end == len(letters) or of_word[end] != of_word[begin]:
                    words.add("".join(letters[begin:end]))
                    begin = end
        return {word.encode() for word in words}

    @cached_property
    def _longest(self) -> int:
        """The bytes of the longest token."""
        return int((self._tokens.ends - self._tokens.begins).max(initial=0))

    def _named(self, numbers: Iterable[int]) -> dict[str, int]:
        return {self._tokens[number]: number for number in numbers if 0 <= number < len(self._tokens)}

    def _merges_within(self, vocabulary: Mapping[str, int], hashes: NDArray[np.uint64]) -> list[tuple[str, str]]:
        """Returns the merges of tokens to tokens of a vocabulary. `hashes` has those of all tokens that are merged."""
        pairs = (pair_of(self._merges[number]) for number in among(self._merged, hashes).tolist())
        return [pair for pair in pairs if all(text in vocabulary for text in (*pair, "".join(pair)))]

    @cached_property
    def _merged(self) -> NDArray[np.uint64]:
        """The hashes of what merges make, uint64 [merges]. The two parts of a merge have a blank between them."""
        data, begins, ends = self._merges.data, self._merges.begins, self._merges.ends
        blanks = np.append(np.flatnonzero(np.frombuffer(data, np.uint8) == ord(" ")), len(data))
        blank = np.minimum(blanks[np.searchsorted(blanks, begins)], ends - 1)
        lefts, rights = hashes_within(data, begins, blank), hashes_within(data, blank + 1, ends)
        return hashes_of_pairs(lefts, rights, ends - blank - 1)
