"""Speculation: tokens that may come next are computed with the last one that is known, in the same forward.

The next token is sampled from the logits behind each row, as without speculation, until one is not the token that was
guessed. What was computed behind that is taken back. A model that is exact at every token gives each row the bits that
it has alone, so the reply is the same, and what is saved of it too.

A row that is guessed right saves a step, and any row takes time. How often guesses are right is counted for each
sequence, also while none is computed, because each token that is sampled says whether it was guessed. What a row takes
is measured. So each step computes the guesses that make it faster, which may be none.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol

from diskprefix.engine.ngrams import Guess, NgramIndex
from diskprefix.tokens import TokenIds

MOST_ROWS = 32
"""Guessed tokens that a step computes at most."""
_HYSTERESIS = 1.5
"""A sequence that computes no guesses begins to where they seem so many times as good as they must be."""


class AcceptanceRates:
    """How often a guessed token is the one that is sampled, by the number of tokens before it that agree."""

    _FIRST = (0.15, 0.4, 0.6, 0.8, 0.9)
    """For 2, 4, 8, 16 and 32 tokens or more, before anything is known."""
    _WEIGHT = 1 / 16

    def __init__(self) -> None:
        self._rates = list(self._FIRST)

    def of(self, num_agreeing: int) -> float:
        return self._rates[self._class_of(num_agreeing)]

    def note(self, num_agreeing: int, *, is_right: bool) -> None:
        at = self._class_of(num_agreeing)
        self._rates[at] += self._WEIGHT * (is_right - self._rates[at])

    def _class_of(self, num_agreeing: int) -> int:
        return min(num_agreeing.bit_length() - 2, len(self._rates) - 1)


class Guesser:
    """Guesses the next tokens of one sequence."""

    def __init__(self, prompt: TokenIds, most_computed: int) -> None:
        """Of the sequence, at most `most_computed` tokens are computed: its last token is not."""
        self.most_computed = most_computed
        self.is_computing = False
        """Whether the last step computed guesses."""
        self._rates = AcceptanceRates()
        self._index = NgramIndex()
        # A long prompt takes some milliseconds: not before the first token is sent.
        self._not_added: list[Iterable[int]] = [prompt.data]
        self._guess = Guess([], 0)

    def guess(self) -> list[int]:
        """Returns tokens that may come next, [] if there is no guess."""
        for token_ids in self._not_added:
            self._index.extend(token_ids)
        self._not_added.clear()
        self._guess = self._index.guess(MOST_ROWS) or Guess([], 0)
        return self._guess.token_ids

    def chances(self) -> list[float]:
        """Returns for each token of the guess how likely it is that all up to it are right."""
        token_ids, num_agreeing = self._guess
        rates = (self._rates.of(num_agreeing + number) for number in range(len(token_ids)))
        return list(accumulate(rates, mul))

    def note(self, token: int) -> None:
        """Adds a sampled token, and counts whether it was guessed."""
        self._not_added.append([token])
        token_ids, num_agreeing = self._guess
        if token_ids:
            is_right = token_ids[0] == token
            self._rates.note(num_agreeing, is_right=is_right)
            self._guess = Guess(token_ids[1:] if is_right else [], num_agreeing + 1)


class RowCost:
    """What a row takes, as a share of a step without rows: measured by steps with guesses against steps without, of the
    same sequences."""

    _FIRST, _FIRST_WEIGHT = 0.03, 256.0
    """Before anything is measured, and the squared rows that this counts for."""
    _KEPT, _KEPT_UNUSED = 0.98, 0.998
    """Of what is known, with each step with guesses, and without: what is not measured again is forgotten, so that
    guesses are tried again."""
    _LEAST, _MOST = 0.002, 10.0
    _MOST_AGE = 64

    def __init__(self) -> None:
        self._over = self._FIRST * self._FIRST_WEIGHT
        self._weight = self._FIRST_WEIGHT
        self._sequences: Hashable = None
        self._plain_s = 0.0
        self._age = 0
        """Steps since the last one without guesses."""

    @property
    def value(self) -> float:
        return max(self._LEAST, self._over / self._weight)

    def needs_plain_step(self, sequences: Hashable) -> bool:
        """Returns whether a step of these sequences without guesses is needed, to compare with."""
        return sequences != self._sequences or self._age >= self._MOST_AGE

    def note(self, sequences: Hashable, num_rows: int, num_guessed: int, seconds: float) -> None:
        """Adds a step. `num_rows` are all of its rows, with those guessed. `sequences` names whose they are."""
        if not num_guessed:
            same = sequences == self._sequences
            self._plain_s += (seconds - self._plain_s) * (0.25 if same else 1.0)
            self._sequences, self._age = sequences, 0
            self._over += (1 - self._KEPT_UNUSED) * (self._FIRST * self._FIRST_WEIGHT - self._over)
            self._weight += (1 - self._KEPT_UNUSED) * (self._FIRST_WEIGHT - self._weight)
        elif sequences == self._sequences and self._plain_s > 0:
            self._age += 1
            longer, others = seconds / self._plain_s - 1, num_rows - num_guessed
            # As the time is a line over the rows.
            slope = num_guessed - longer * others
            cost = min(max(longer / slope, -self._MOST), self._MOST) if slope > 0 else self._MOST
            # By least squares: steps with more guesses say more.
            self._over = self._KEPT * self._over + cost * num_guessed**2
            self._weight = self._KEPT * self._weight + num_guessed**2


class Guessing(Protocol):
    """A sequence that decodes. `guesser` is None if nothing is to be guessed."""

    arrived: int
    """No other sequence has this number."""
    draft: list[int]
    guesser: Guesser | None

    @property
    def room_for_draft(self) -> int: ...


class Speculation:
    """Which guesses the steps of an engine compute."""

    def __init__(self) -> None:
        self.row_cost = RowCost()

    def plan(self, decoding: Sequence[Guessing]) -> None:
        """Sets the `draft` of each sequence: which guesses the next step computes, in which all of them have a row."""
        chances = [_guessed(sequence) for sequence in decoding]
        if self.row_cost.needs_plain_step(_names(decoding)):
            chances = [[] for _ in decoding]
        for sequence, count in zip(decoding, worth_computing(chances, self.row_cost.value), strict=True):
            sequence.draft = sequence.draft[:count]
            if sequence.guesser is not None:
                sequence.guesser.is_computing = count > 0

    def note(self, decoding: Sequence[Guessing], num_rows: int, num_drafted: int, seconds: float) -> None:
        """Adds the time of a step that computed nothing but the rows of these sequences, guesses included."""
        self.row_cost.note(_names(decoding), num_rows, num_drafted, seconds)


def _guessed(sequence: Guessing) -> list[float]:
    """Has the next tokens guessed. Returns how good each guess seems: see `worth_computing`."""
    guesser = sequence.guesser
    if guesser is None:
        sequence.draft = []
        return []
    sequence.draft = guesser.guess()[: max(0, sequence.room_for_draft)]
    part = 1.0 if guesser.is_computing else 1 / _HYSTERESIS
    return [part * chance for chance in guesser.chances()[: len(sequence.draft)]]


def _names(sequences: Sequence[Guessing]) -> Hashable:
    return frozenset(sequence.arrived for sequence in sequences)


def worth_computing(chances: Sequence[Sequence[float]], row_cost: float, most: int = MOST_ROWS) -> list[int]:
    """Returns how many guessed tokens of each sequence a step computes, so that it gives most tokens in its time.

    `chances` are those that each guessed token is right with all before it. `row_cost`: see `RowCost`.
    """
    counts, num_rows, num_tokens = [0] * len(chances), len(chances), float(len(chances))
    likeliest = [(-of_one[0], number) for number, of_one in enumerate(chances) if of_one]
    heapq.heapify(likeliest)
    while likeliest and sum(counts) < most:
        chance, number = -likeliest[0][0], likeliest[0][1]
        # It must add a larger share of the tokens than of the time.
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
