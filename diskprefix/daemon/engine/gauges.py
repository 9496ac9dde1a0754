"""Values that other threads read: the activity of each request, the heartbeat of the engine's thread, and its counts.
There is no lock, so one value may be a step older than another."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import Literal, TypeAlias

from msgspec import Struct

from diskprefix.values import Scope

SLOWEST_ROW_S = 1.0
"""The longest time of a step per row. A step that takes longer hangs."""
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)

ActivityState: TypeAlias = Literal["waiting", "restoring", "encoding", "prefilling", "decoding"]


class Activity(Struct, frozen=True, kw_only=True):
    """The activity of one request. `waiting`: the request has no memory yet, or was preempted. `encoding`: it waits for
    the rows of a picture.

    `ready_tokens` of the prompt are restored or computed. `reply_tokens` counts all replies together. `tokens_per_s` is
    the speed of the prefill until the first token, then the speed of all replies together. `seconds_left` is the
    estimated rest of the prefill. Times are in seconds, `elapsed_s` since the arrival in the queue. None stands for a
    value that is not known yet.
    """

    id: str
    state: ActivityState
    scope: Scope
    prompt_tokens: int
    restored_tokens: int = 0
    ready_tokens: int = 0
    reply_tokens: int = 0
    elapsed_s: float
    queue_s: float | None = None
    ttft_s: float | None = None
    tokens_per_s: float | None = None
    seconds_left: float | None = None


class Heartbeat:
    """Shows whether the engine's thread makes progress. The engine's thread calls `beat` before each piece of work, and
    `rest` before it waits for requests. One other thread calls `has_stopped` from time to time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_beats = 0
        self._num_seen = 0
        self._working: tuple[float, int] | None = None
        """The time when the work began, and its rows."""

    def beat(self, num_rows: int = 0) -> None:
        """Records that work begins: a step of `num_rows` rows, or anything else between two steps."""
        self._num_beats += 1
        self._working = self._clock(), num_rows

    def rest(self) -> None:
        """Records that there is nothing to do."""
        self._working = None

    @property
    def working_s(self) -> float:
        """The seconds since the current piece of work began; 0 at rest."""
        working = self._working
        return 0.0 if working is None else self._clock() - working[0]

    def has_stopped(self) -> bool:
        """Returns True if there was no beat since the last call, although the current work should have ended by now. A
        step of many rows may take long: a model that cannot be cached computes a prompt in one step."""
        working, seen, self._num_seen = self._working, self._num_seen, self._num_beats
        if working is None or self._num_seen != seen:
            return False
        since, num_rows = working
        return self._clock() - since > num_rows * SLOWEST_ROW_S


class Distribution:
    """A histogram in the form of Prometheus: the number of values up to each bound, and the sum of all values."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[int]:
        """Returns the number of values up to each bound, and last the number of all values."""
        return list(accumulate(self._counts))


class EngineFigures:
    """Counts since the start of the process, written by the engine's thread. Times are in seconds."""

    def __init__(self) -> None:
        self.step_s = Distribution(_STEP_S)
        """The time of each forward."""
        self.step_rows = Distribution(_ROWS)
        """The tokens in each forward, of all sequences, including guesses."""
        self.gap_s = Distribution(_STEP_S)
        """The time between two tokens of a request."""
        self.preemptions = 0
        """The number of times that a sequence gave its memory to others."""

    def record_step(self, num_rows: int, seconds: float) -> None:
        self.step_s.observe(seconds)
        self.step_rows.observe(num_rows)
