"""Guesses the next tokens of a reply, and counts how many are right.

A guess is what followed the last tokens where they came before (prompt lookup), or comes from a draft model. Text that
is edited, quoted or continued repeats itself.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from diskprefix.tokens import TokenIds

MOST_ROWS = 32
"""The most guessed tokens of a step."""
LONGEST = 32
"""The most tokens that are compared."""
_MOST_PLACES = 32
"""The most places that are compared, the latest ones."""


class Guess(NamedTuple):
    """The guessed tokens. The `num_agreeing` tokens before them are the same in both places."""

    token_ids: list[int]
    num_agreeing: int


class NgramIndex:
    """The tokens of one sequence, and for each pair of them the place where it came last, which links to the one
    before. So adding a token takes constant time and memory."""

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


class AcceptanceRates:
    """The rates at which guesses of each kind are right."""

    _FIRST = (0.15, 0.4, 0.6, 0.8, 0.9, 0.2, 0.4, 0.6, 0.75, 0.9, 0.97)
    """The rate of each kind before anything is known."""
    _BORDERS = (0.3, 0.5, 0.7, 0.85, 0.95)
    _NUM_MATCHES = len(_FIRST) - len(_BORDERS) - 1
    _WEIGHT = 1 / 16

    def __init__(self) -> None:
        self._rates = list(self._FIRST)

    @classmethod
    def of_match(cls, num_agreeing: int) -> int:
        """Returns the kind of a guess by the number of matching tokens before it: 2, 4, 8, 16, and 32 or more."""
        return min(num_agreeing.bit_length() - 2, cls._NUM_MATCHES - 1)

    @classmethod
    def of_draft(cls, probability: float) -> int:
        """Returns the kind of a guess to which a draft model gives this probability."""
        return cls._NUM_MATCHES + bisect_right(cls._BORDERS, probability)

    @classmethod
    def is_of_draft(cls, kind: int) -> bool:
        return kind >= cls._NUM_MATCHES

    def of(self, kind: int) -> float:
        return self._rates[kind]

    def record(self, kind: int, *, is_right: bool) -> None:
        self._rates[kind] += self._WEIGHT * (is_right - self._rates[kind])


class DraftRate:
    """The recent rate at which the draft model's guesses are right, in one sequence or in all. While the model is not
    asked, the rate of a sequence fades to that of all, and that to the first assumption. So it is asked again."""

    _FIRST, _WEIGHT, _FADING = 0.7, 1 / 32, 1 / 512

    def __init__(self, of_all: DraftRate | None = None) -> None:
        self._of_all = of_all
        self.value = self._usual

    @property
    def _usual(self) -> float:
        return self._FIRST if self._of_all is None else self._of_all.value

    def record(self, *, is_right: bool) -> None:
        self.value += self._WEIGHT * (is_right - self.value)
        if self._of_all is not None:
            self._of_all.record(is_right=is_right)

    def fade(self) -> None:
        self.value += self._FADING * (self._usual - self.value)


class Guesser:
    """Guesses the next tokens of one reply, and counts how many are right."""

    def __init__(
        self, prompt: TokenIds, most_computed: int, *, looks_back: bool = True, draft_rate: DraftRate | None = None
    ) -> None:
        """Makes a guesser. `most_computed` is the number of tokens of the finished sequence without its last one.
        `looks_back`: guesses come from the tokens before. `draft_rate` is None without a draft model."""
        self.most_computed = most_computed
        self.draft_rate = draft_rate
        self.is_computing = False
        """True if the last step computed guesses."""
        self.rates = AcceptanceRates()
        self.token_ids: list[int] = []
        """The guessed next tokens."""
        self._kinds: list[int] = []
        self._index = NgramIndex() if looks_back else None
        # Added later: a long prompt takes some milliseconds, and the first token is sent before.
        self._not_added: list[Iterable[int]] = [prompt.data]

    def look_back(self) -> None:
        """Guesses tokens that followed the same tokens before."""
        self.token_ids, self._kinds = [], []
        if self._index is None:
            return
        for token_ids in self._not_added:
            self._index.extend(token_ids)
        self._not_added.clear()
        if (found := self._index.guess(MOST_ROWS)) is not None:
            kinds = (self.rates.of_match(found.num_agreeing + number) for number in range(MOST_ROWS))
            self.token_ids, self._kinds = found.token_ids, list(kinds)

    def use_drafted(self, drafted: Sequence[tuple[int, float]]) -> None:
        """Uses the guesses of a draft model: tokens with their probabilities."""
        self.token_ids = [token for token, _ in drafted]
        self._kinds = [self.rates.of_draft(probability) for _, probability in drafted]

    def chances(self) -> list[float]:
        """Returns for each guessed token the chance that it and all before it are right."""
        return list(accumulate(map(self.rates.of, self._kinds), mul))

    def record_token(self, token: int) -> None:
        """Adds a sampled token, and counts if it was guessed."""
        if self._index is not None:
            self._not_added.append([token])
        if not self.token_ids:
            return
        kind, is_right = self._kinds[0], self.token_ids[0] == token
        self.rates.record(kind, is_right=is_right)
        if self.draft_rate is not None and self.rates.is_of_draft(kind):
            self.draft_rate.record(is_right=is_right)
        self.token_ids, self._kinds = (self.token_ids[1:], self._kinds[1:]) if is_right else ([], [])
