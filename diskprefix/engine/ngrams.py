"""Looks up the prompt: guesses the tokens that followed the last tokens of a sequence where these came before.

Text that is edited, quoted or continued repeats itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import NamedTuple

LONGEST = 32
"""The most tokens that are compared."""
_MOST_PLACES = 32
"""The most places that are compared, the latest ones."""


class Guess(NamedTuple):
    """The guessed tokens. The `num_agreeing` tokens before them are the same in both places."""

    token_ids: list[int]
    num_agreeing: int


class NgramIndex:
    """The tokens of one sequence, and for each pair of them the place where it came last.

    Each place links to the one before it with the same pair. So adding a token takes constant time and memory.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._last: dict[int, int] = {}
        """The position of the second token of the latest such pair."""
        self._before = array("i")
        """The position, for each token, of the same pair before; -1 if there is none."""

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Adds tokens."""
        last, before = self._last, self._before
        left = self._token_ids[-1] if self._token_ids else -1
        for place, token in enumerate(token_ids, start=len(before)):
            pair = (left << 32) + token
            before.append(last.get(pair, -1))
            last[pair] = place
            self._token_ids.append(token)
            left = token

    def guess(self, most: int) -> Guess | None:
        """Returns what followed the last tokens before: `most` tokens, behind the longest match, and of several the
        latest. None if the last two tokens did not stand side by side before."""
        found, best = -1, 0
        place = self._before[-1] if len(self) > 1 else -1
        for _ in range(_MOST_PLACES):
            if place < 0 or best == LONGEST:
                break
            length = self._agreeing(place)
            if length > best:
                found, best = place, length
            place = self._before[place]
        if found < 0:
            return None
        # A match that reaches the end repeats itself.
        period = len(self) - 1 - found
        return Guess([self._token_ids[found + 1 + number % period] for number in range(most)], best)

    def _agreeing(self, place: int) -> int:
        """Returns how many tokens up to `place` equal the last tokens."""
        tokens, length, longest = self._token_ids, 2, min(LONGEST, place + 1)
        while length < longest and tokens[place - length] == tokens[-1 - length]:
            length += 1
        return length
