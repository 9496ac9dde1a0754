"""Measures the time of a step as a function of its rows, and computes how many guesses pay."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence

from diskprefix.daemon.engine.speculation.guesser import MAX_GUESSES

_TRIAL_ROWS = 4
_UNLIKELY = 0.02
"""Guesses with a lower chance make no difference."""


class StepTimes:
    """The time of a step by its number of rows, as a multiple of the time of a step of one row. It is measured by
    comparing steps with and without guesses of the same sequences."""

    _FIRST = 0.1
    """The time that a row adds before it is measured."""
    _WEIGHT, _FADING, _DRIFT = 0.25, 0.0003, 0.01
    _MAX_AGE = 64
    """The number of steps with guesses between two steps without guesses, which are the comparison."""
    _SOON = 8
    """The number of steps with guesses of new sequences before the first step without guesses."""

    def __init__(self) -> None:
        self._rows, self._times = [1], [1.0]
        """The measured times, by ascending rows."""
        self._plain_s, self._plain_rows = 0.0, 1
        """The mean seconds of recent steps without guesses (0 if unknown), and their rows."""
        self._compared: Hashable = None
        """The sequences of the steps without guesses."""
        self._sequences: Hashable = None
        """The sequences of the last step."""
        self._age = 0
        """The number of steps with guesses of these sequences since their last step without guesses."""
        self._trust = 1.0
        """The weight of the measured times. It fades with each step without guesses, so that guesses are tried
        again."""

    @property
    def row_s(self) -> float:
        """The seconds of a step of one row, 0 if unknown."""
        return self._plain_s / self.relative_time(self._plain_rows)

    @property
    def max_guesses(self) -> int:
        """The maximum number of guesses to compute: fewer while they are only a trial."""
        return MAX_GUESSES if self._trust == 1 else _TRIAL_ROWS

    def relative_time(self, num_rows: int) -> float:
        """Returns the time of a step of `num_rows` rows, as a multiple of the time of a step of one row."""
        first = 1 + self._FIRST * (num_rows - 1)
        return first + self._trust * (self._measured(num_rows) - first)

    def _measured(self, num_rows: int) -> float:
        rows, times = self._rows, self._times
        index = bisect_left(rows, num_rows)
        if index == len(rows):
            slope = (times[-1] - 1) / (rows[-1] - 1) if index > 1 else self._FIRST
            return times[-1] + slope * (num_rows - rows[-1])
        if rows[index] == num_rows:
            return times[index]
        share = (num_rows - rows[index - 1]) / (rows[index] - rows[index - 1])
        return times[index - 1] + share * (times[index] - times[index - 1])

    def needs_plain_step(self, sequences: Hashable) -> bool:
        """Returns True if a step of these sequences without guesses is needed for comparison."""
        age = self._age if sequences == self._sequences else 0
        return self._compared is None or age >= (self._MAX_AGE if sequences == self._compared else self._SOON)

    def record_step(self, sequences: Hashable, num_rows: int, num_guessed: int, seconds: float) -> None:
        """Records a step. `num_rows` counts all rows, including guesses. `sequences` identifies the sequences of the
        step."""
        if sequences != self._sequences:
            self._sequences, self._age = sequences, 0
        if num_guessed:
            self._age += 1
            if sequences == self._compared and self._plain_s:
                self._trust = 1.0
                self._measure(num_rows, seconds)
            return
        self._plain_s += (seconds - self._plain_s) * (self._WEIGHT if sequences == self._compared else 1.0)
        self._compared, self._plain_rows, self._age = sequences, num_rows, 0
        if len(self._rows) > 1:
            self._trust -= self._FADING * self._trust

    def _measure(self, num_rows: int, seconds: float) -> None:
        expected = self.relative_time(num_rows)
        measured = min(max(seconds / self.row_s, 1.0), 3 * expected)
        index = bisect_left(self._rows, num_rows)
        if index == len(self._rows) or self._rows[index] != num_rows:
            self._rows.insert(index, num_rows)
            self._times.insert(index, expected + 0.5 * (measured - expected))
        else:
            self._times[index] += self._WEIGHT * (measured - expected)
        # The times of other numbers of rows drift towards a line, in case they are not measured any more.
        slope = (self._times[index] - 1) / (num_rows - 1)
        self._times = [
            time if rows == num_rows else time + self._DRIFT * (1 + slope * (rows - 1) - time)
            for rows, time in zip(self._rows, self._times, strict=True)
        ]


def speedup(times: StepTimes, num_sequences: int, chances: Iterable[float], guess_cost: float = 0.0) -> float:
    """Returns the factor by which the best number of guesses for each of `num_sequences` speeds up decoding. `chances`
    are the chances that a guess and all before it are right. `guess_cost` is the time of one guess for all sequences,
    in the unit of `times`."""
    plain = times.relative_time(num_sequences)
    best = tokens = 1.0
    for count, chance in zip(range(1, MAX_GUESSES // num_sequences + 1), chances, strict=False):
        if chance < _UNLIKELY:
            break
        tokens += chance
        best = max(best, tokens * plain / (times.relative_time(num_sequences * (1 + count)) + guess_cost * count))
    return best


def worth_computing(chances: Sequence[Sequence[float]], times: StepTimes) -> list[int]:
    """Returns the number of guessed tokens to compute for each sequence, so that the step computes the most tokens per
    time. `chances` are the chances that each guessed token and all before it are right."""
    counts, num_tokens = [0] * len(chances), float(len(chances))
    # The chances of a sequence descend.
    likeliest = sorted((-chance, number) for number, of_sequence in enumerate(chances) for chance in of_sequence)
    best, num_computed = num_tokens / times.relative_time(len(chances)) if chances else 0.0, 0
    for count, (chance, _) in enumerate(likeliest[: times.max_guesses], start=1):
        num_tokens -= chance
        rate = num_tokens / times.relative_time(len(chances) + count)
        if rate > best:
            best, num_computed = rate, count
    for _, number in likeliest[:num_computed]:
        counts[number] += 1
    return counts
