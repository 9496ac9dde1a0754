"""Chooses the guessed tokens that are computed behind the last known one, in the same forward.

The next token is sampled from the logits behind each row, as without speculation, until one is not the guessed token.
The state behind that is taken back. A model that is exact at every token gives each row the bits that it has alone, so
the reply and its saved state are the same.

A right guess saves a step, and each row takes time. Each sequence counts how often its guesses are right, also while
none is computed, because each sampled token shows if it was guessed. The time of a row is measured. So each step
computes the guesses that make it faster, which may be none.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import Generic, Protocol, TypeVar

from diskprefix.engine.ngrams import NgramIndex
from diskprefix.tokens import TokenIds

MOST_ROWS = 32
"""The most guessed tokens of a step."""
_HYSTERESIS = 1.5
"""A sequence without computed guesses begins to compute them when they seem this many times as good as needed."""


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
    """The recent rate at which the draft model's guesses are right, in one sequence or in all.

    While the model is not asked, the rate of a sequence fades to that of all, and that to the first assumption. So the
    model is asked again some time.
    """

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
        """Makes a guesser. `most_computed` is the number of tokens of the finished sequence without its last one,
        which is not computed. `looks_back`: guesses come from the tokens before. `draft_rate` is None without a
        draft model."""
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


class RowCost:
    """The time of a row as a share of a step without rows. It is measured by steps with guesses against steps without,
    of the same sequences."""

    _FIRST, _FIRST_WEIGHT = 0.03, 256.0
    """The first assumption, and the squared rows that it counts for."""
    _KEPT, _KEPT_UNUSED = 0.98, 0.998
    """The share of the measurements kept after each step with guesses, and after each without. Old measurements fade,
    so that guesses are tried again."""
    _LEAST, _MOST = 0.002, 10.0
    _MOST_AGE = 64

    def __init__(self) -> None:
        self._over = self._FIRST * self._FIRST_WEIGHT
        self._weight = self._FIRST_WEIGHT
        self._sequences: Hashable = None
        self._plain_s = 0.0
        self._age = 0
        """The number of steps since the last one without guesses."""

    @property
    def value(self) -> float:
        return max(self._LEAST, self._over / self._weight)

    @property
    def plain_s(self) -> float:
        """The seconds of recent steps without guesses, 0 if that is not known."""
        return self._plain_s

    def needs_plain_step(self, sequences: Hashable) -> bool:
        """Returns True if a step of these sequences without guesses is needed for comparison."""
        return sequences != self._sequences or self._age >= self._MOST_AGE

    def record_step(self, sequences: Hashable, num_rows: int, num_guessed: int, seconds: float) -> None:
        """Records a step. `num_rows` counts all of its rows, with guesses. `sequences` identifies its sequences."""
        if not num_guessed:
            same = sequences == self._sequences
            self._plain_s += (seconds - self._plain_s) * (0.25 if same else 1.0)
            self._sequences, self._age = sequences, 0
            self._over += (1 - self._KEPT_UNUSED) * (self._FIRST * self._FIRST_WEIGHT - self._over)
            self._weight += (1 - self._KEPT_UNUSED) * (self._FIRST_WEIGHT - self._weight)
        elif sequences == self._sequences and self._plain_s > 0:
            self._age += 1
            longer, others = seconds / self._plain_s - 1, num_rows - num_guessed
            # The time is a linear function of the rows.
            slope = num_guessed - longer * others
            cost = min(max(longer / slope, -self._MOST), self._MOST) if slope > 0 else self._MOST
            # Least squares: steps with more guesses weigh more.
            self._over = self._KEPT * self._over + cost * num_guessed**2
            self._weight = self._KEPT * self._weight + num_guessed**2


class Guessing(Protocol):
    """A sequence that decodes. `guesser` is None if its tokens are not guessed."""

    arrived: int
    """A number that no other sequence has."""
    draft: list[int]
    guesser: Guesser | None

    @property
    def room_for_draft(self) -> int: ...


S = TypeVar("S", bound=Guessing)
S_contra = TypeVar("S_contra", bound=Guessing, contravariant=True)


class Drafter(Protocol[S_contra]):
    """Guesses with a draft model."""

    def draft(self, sequences: Sequence[S_contra], num_decoding: int, row_cost: float, plain_s: float) -> None:
        """Gives guesses to the sequences' guessers, as far as they pay. `num_decoding` sequences share the next step.
        `row_cost`: see `RowCost`. `plain_s` is the step's time in seconds without guesses, 0 if that is not known."""


class Speculation(Generic[S]):
    """Decides which guesses each step of an engine computes."""

    def __init__(self, drafter: Drafter[S] | None = None) -> None:
        self.row_cost = RowCost()
        self._drafter = drafter

    def plan(self, decoding: Sequence[S]) -> None:
        """Sets the `draft` of each sequence in the next step: the guesses to compute. All of them have a row in it."""
        for sequence in decoding:
            if sequence.guesser is not None:
                sequence.guesser.look_back()
        is_plain = self.row_cost.needs_plain_step(_names(decoding))
        if self._drafter is not None and decoding:
            drafted = [] if is_plain else [sequence for sequence in decoding if _wants_draft(sequence)]
            self._drafter.draft(drafted, len(decoding), self.row_cost.value, self.row_cost.plain_s)
        chances = [_guessed(sequence) for sequence in decoding]
        if is_plain:
            chances = [[] for _ in decoding]
        for sequence, count in zip(decoding, worth_computing(chances, self.row_cost.value), strict=True):
            sequence.draft = sequence.draft[:count]
            if sequence.guesser is not None:
                sequence.guesser.is_computing = count > 0

    def record_step(self, decoding: Sequence[S], num_rows: int, num_drafted: int, seconds: float) -> None:
        """Records the time of a step that computed only the rows of these sequences, with guesses."""
        self.row_cost.record_step(_names(decoding), num_rows, num_drafted, seconds)


def _wants_draft(sequence: Guessing) -> bool:
    """Returns True if the draft model's guess seems better than one from the tokens before."""
    guesser = sequence.guesser
    if guesser is None or guesser.draft_rate is None or sequence.room_for_draft < 1:
        return False
    return not guesser.token_ids or guesser.chances()[0] < guesser.draft_rate.value


def _guessed(sequence: Guessing) -> list[float]:
    """Sets the draft of a sequence to all of its guesses. Returns their chances for `worth_computing`."""
    guesser = sequence.guesser
    if guesser is None:
        sequence.draft = []
        return []
    sequence.draft = guesser.token_ids[: max(0, sequence.room_for_draft)]
    part = 1.0 if guesser.is_computing else 1 / _HYSTERESIS
    return [part * chance for chance in guesser.chances()[: len(sequence.draft)]]


def _names(sequences: Sequence[Guessing]) -> Hashable:
    return frozenset(sequence.arrived for sequence in sequences)


def worth_computing(chances: Sequence[Sequence[float]], row_cost: float, most: int = MOST_ROWS) -> list[int]:
    """Returns how many guessed tokens of each sequence to compute, for the most tokens in the step's time.

    `chances` are the chances that each guessed token and all before it are right. `row_cost`: see `RowCost`.
    """
    counts, num_rows, num_tokens = [0] * len(chances), len(chances), float(len(chances))
    likeliest = [(-of_one[0], number) for number, of_one in enumerate(chances) if of_one]
    heapq.heapify(likeliest)
    while likeliest and sum(counts) < most:
        chance, number = -likeliest[0][0], likeliest[0][1]
        # It must add more to the tokens than to the time, as a share.
        if chance * (1 + row_cost * num_rows) <= row_cost * num_tokens:
            break
        counts[number] += 1
        num_rows, num_tokens = num_rows + 1, num_tokens + chance
        following = chances[number][counts[number] : counts[number] + 1]
        if following:
            heapq.heapreplace(likeliest, (-following[0], number))
        else:
            heapq.heappop(likeliest)
    return counts


def speedup(rate: float, num_sequences: int, row_cost: float, draft_cost: float) -> float:
    """Returns how many times as fast decoding is with a draft model, at the best number of guesses.

    Each guess is right with the chance `rate`. `draft_cost` is the time to guess one token for all sequences, as a
    share of a step without rows, as is `row_cost`.
    """
    plain = best = 1 / (1 + row_cost * num_sequences)
    tokens = chance = 1.0
    for count in range(1, MOST_ROWS // num_sequences + 1):
        chance *= rate
        tokens += chance
        best = max(best, tokens / (1 + row_cost * num_sequences * (1 + count) + draft_cost * count))
    return best / plain
