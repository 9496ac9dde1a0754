"""Chooses the guessed tokens that are computed behind the last known one, in the same forward: those that make
decoding faster, which may be none. README.md says why the reply stays the same.

A right guess saves a step, and each row takes time, which is measured. Each sequence counts how often its guesses are
right, also while none is computed, because each sampled token shows if it was guessed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from diskprefix.engine.drafting import ModelDrafter
from diskprefix.engine.guesser import MOST_ROWS
from diskprefix.engine.running_request import Reply

_HYSTERESIS = 1.5
"""A sequence without computed guesses begins to compute them when they seem this many times as good as needed."""


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
        self.plain_s = 0.0
        """The seconds of recent steps without guesses, 0 if that is not known."""
        self._age = 0
        """The number of steps since the last one without guesses."""

    @property
    def value(self) -> float:
        return max(self._LEAST, self._over / self._weight)

    def needs_plain_step(self, sequences: Hashable) -> bool:
        """Returns True if a step of these sequences without guesses is needed for comparison."""
        return sequences != self._sequences or self._age >= self._MOST_AGE

    def record_step(self, sequences: Hashable, num_rows: int, num_guessed: int, seconds: float) -> None:
        """Records a step. `num_rows` counts all of its rows, with guesses. `sequences` identifies its sequences."""
        if not num_guessed:
            same = sequences == self._sequences
            self.plain_s += (seconds - self.plain_s) * (0.25 if same else 1.0)
            self._sequences, self._age = sequences, 0
            self._over += (1 - self._KEPT_UNUSED) * (self._FIRST * self._FIRST_WEIGHT - self._over)
            self._weight += (1 - self._KEPT_UNUSED) * (self._FIRST_WEIGHT - self._weight)
        elif sequences == self._sequences and self.plain_s > 0:
            self._age += 1
            longer, others = seconds / self.plain_s - 1, num_rows - num_guessed
            # The time is a linear function of the rows.
            slope = num_guessed - longer * others
            cost = min(max(longer / slope, -self._MOST), self._MOST) if slope > 0 else self._MOST
            # Least squares: steps with more guesses weigh more.
            self._over = self._KEPT * self._over + cost * num_guessed**2
            self._weight = self._KEPT * self._weight + num_guessed**2


class Speculation:
    """Decides which guesses each step of an engine computes."""

    def __init__(self, drafter: ModelDrafter | None = None) -> None:
        self.row_cost = RowCost()
        self._drafter = drafter

    def plan(self, decoding: Sequence[Reply]) -> None:
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

    def record_step(self, decoding: Sequence[Reply], num_rows: int, num_drafted: int, seconds: float) -> None:
        """Records the time of a step that computed only the rows of these sequences, with guesses."""
        self.row_cost.record_step(_names(decoding), num_rows, num_drafted, seconds)


def _wants_draft(sequence: Reply) -> bool:
    """Returns True if the draft model's guess seems better than one from the tokens before."""
    guesser = sequence.guesser
    if guesser is None or guesser.draft_rate is None or sequence.room_for_draft < 1:
        return False
    return not guesser.token_ids or guesser.chances()[0] < guesser.draft_rate.value


def _guessed(sequence: Reply) -> list[float]:
    """Sets the draft of a sequence to all of its guesses. Returns their chances for `worth_computing`."""
    guesser = sequence.guesser
    if guesser is None:
        sequence.draft = []
        return []
    sequence.draft = guesser.token_ids[: max(0, sequence.room_for_draft)]
    part = 1.0 if guesser.is_computing else 1 / _HYSTERESIS
    return [part * chance for chance in guesser.chances()[: len(sequence.draft)]]


def _names(sequences: Sequence[Reply]) -> Hashable:
    return frozenset(sequence.arrived for sequence in sequences)


def worth_computing(chances: Sequence[Sequence[float]], row_cost: float) -> list[int]:
    """Returns how many guessed tokens of each sequence to compute, for the most tokens in the step's time. `chances`
    are the chances that each guessed token and all before it are right. `row_cost`: see `RowCost`."""
    counts, num_tokens = [0] * len(chances), float(len(chances))
    # The chances of a sequence descend.
    likeliest = sorted((-chance, number) for number, of_one in enumerate(chances) for chance in of_one)
    for num_rows, (chance, number) in enumerate(likeliest[:MOST_ROWS], start=len(chances)):
        # It must add more to the tokens than to the time, as a share.
        if -chance * (1 + row_cost * num_rows) <= row_cost * num_tokens:
            break
        counts[number] += 1
        num_tokens -= chance
    return counts
