"""A circuit breaker: after several failures in a row, no calls are made for some time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

_FAILURES = 3
"""The number of failures in a row that opens the circuit."""
_FIRST_S, _LONGEST_S = 2.0, 60.0


class Breaker:
    """Counts failures in a row. For any thread.

    While it is open, `allows` says no. When its time is over, one caller is let through: if that one succeeds, it
    closes; if not, it stays open for twice as long. Times differ by a random part, so that many machines do not come
    back at once.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, jitter: Callable[[], float] = random.random
    ) -> None:
        self._clock, self._jitter = clock, jitter
        self._failures = 0
        self._opened = 0
        self._until = 0.0
        self._is_probing = False
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Calls are refused, but for one probe at a time."""
        return self._opened > 0

    def would_allow(self) -> bool:
        """Returns whether `allows` would return True now."""
        return not self._opened or self._clock() >= self._until

    def allows(self) -> bool:
        """Returns whether a call may be made now. The caller records its result."""
        with self._lock:
            if not self._opened:
                return True
            if self._clock() < self._until:
                return False
            # Nobody else tries before this one has answered, or never does.
            self._until = self._clock() + _LONGEST_S
            self._is_probing = True
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failures = self._opened = 0
            self._is_probing = False

    def failed(self) -> bool:
        """Returns whether the circuit is open now. Of calls that began before it opened, failures do not count."""
        with self._lock:
            if self._opened and not self._is_probing:
                return True
            self._failures += 1
            if self._failures < _FAILURES:
                return False
            self._is_probing = False
            wait_s = min(_LONGEST_S, _FIRST_S * 2**self._opened)
            self._opened = min(self._opened + 1, 10)
            self._until = self._clock() + wait_s * (0.5 + 0.5 * self._jitter())
            return True
