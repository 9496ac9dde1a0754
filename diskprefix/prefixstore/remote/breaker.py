"""A circuit breaker: after three failures in a row, no calls are made for a minute."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_FAILURES = 3
"""The number of failures in a row that opens the circuit."""
_OPEN_S = 60.0


class Breaker:
    """Counts failures in a row. For any thread. While open, it allows one call a minute. A success closes it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._until = 0.0
        self._lock = threading.Lock()

    @property
    def is_failing(self) -> bool:
        """The last calls failed."""
        return self._failures >= _FAILURES

    @property
    def is_open(self) -> bool:
        """`allows` would return False now."""
        return self.is_failing and self._clock() < self._until

    def allows(self) -> bool:
        """Returns whether a call may be made now. The caller records its result."""
        with self._lock:
            if self.is_open:
                return False
            self._until = self._clock() + _OPEN_S
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures = 0

    def failed(self) -> bool:
        """Records a failure. Returns whether it opened the circuit."""
        with self._lock:
            self._failures += 1
            self._until = self._clock() + _OPEN_S
            return self._failures == _FAILURES
