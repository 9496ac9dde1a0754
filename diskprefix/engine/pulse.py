"""Whether the thread that computes gets on, as another thread sees it."""

from __future__ import annotations

import time
from collections.abc import Callable

SLOWEST_ROW_S = 1.0
"""A step may take so long for each of its rows before it counts as hanging. Nobody waits for a model that slow."""


class Pulse:
    """The engine's thread calls `beat` before each piece of work and `rest` before it waits for requests. `has_stopped`
    is for one other thread, which asks from time to time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_beats = 0
        self._num_seen = 0
        self._working: tuple[float, int] | None = None
        """Since when, and on how many rows."""

    def beat(self, num_rows: int = 0) -> None:
        """Work begins, on a step of so many rows or on anything else between two steps."""
        self._num_beats += 1
        self._working = self._clock(), num_rows

    def rest(self) -> None:
        """There is nothing to do."""
        self._working = None

    @property
    def working_s(self) -> float:
        """For how long the current piece of work has been going on; 0 at rest."""
        working = self._working
        return 0.0 if working is None else self._clock() - working[0]

    def has_stopped(self) -> bool:
        """Returns whether nothing happened since the last call, although there is work that should be done by now.

        A step of many rows may take long: one of a model with one pass computes a whole prompt.
        """
        working, seen, self._num_seen = self._working, self._num_seen, self._num_beats
        if working is None or self._num_seen != seen:
            return False
        since, num_rows = working
        return self._clock() - since > num_rows * SLOWEST_ROW_S
