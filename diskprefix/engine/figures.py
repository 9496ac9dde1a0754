"""What the engine counts of its steps. Its thread writes, and any thread reads."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)


class Distribution:
    """How many values lie below each of some bounds, and their sum: a histogram as Prometheus has it."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def add(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """Returns for each bound the number of values up to it, and at the end the number of all."""
        return list(accumulate(self._counts))


class EngineFigures:
    """Counts since the start of the process. Times are in seconds."""

    def __init__(self) -> None:
        self.step_s = Distribution(_STEP_S)
        """Of each forward."""
        self.step_rows = Distribution(_ROWS)
        """Tokens in each forward, those of all sequences, guesses included."""
        self.gap_s = Distribution(_STEP_S)
        """Between one token of a request and the next."""
        self.preemptions = 0
        """Sequences that gave their memory to others."""

    def add_step(self, num_rows: int, seconds: float) -> None:
        self.step_s.add(seconds)
        self.step_rows.add(num_rows)
