"""The counts of one process, and the objects that it need not ask the bucket for."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, get_args

from diskprefix.prefixstore.remote.signing import ObjectRefused, RefusalReason

log = logging.getLogger("diskprefix")

_MAX_PATHS = 100_000
"""The maximum number of remembered paths. When it is reached, all are forgotten, and each is asked for once more."""
_KNOWN_S = 86400.0
"""Seconds for which an object counts as present. Later the bucket may have removed it."""
_COUNTS = (
    *("fetched", "fetched_bytes", "missing", "late", "skipped", "slower", "failed"),
    *("written", "written_bytes", "dropped"),
)


class Counts:
    """Counts, and the paths of present and of refused objects. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, float] = {}
        """When each present object was found or written, by path."""
        self._bad: set[str] = set()
        self._counters: Counter[str] = Counter()

    def is_known(self, path: str) -> bool:
        """Returns whether an object was present within the last day."""
        with self._lock:
            return self._clock() - self._known.get(path, -_KNOWN_S) < _KNOWN_S

    def is_bad(self, path: str) -> bool:
        """Returns whether an object was refused. It is not fetched again, and may be overwritten."""
        with self._lock:
            return path in self._bad

    def add_known(self, path: str) -> None:
        """Records that an object is present."""
        with self._lock:
            if len(self._known) >= _MAX_PATHS:
                self._known.clear()
            self._known[path] = self._clock()

    def add_written(self, path: str, num_bytes: int) -> None:
        self.add_known(path)
        self.count("written")
        self.count("written_bytes", num_bytes)
        with self._lock:
            self._bad.discard(path)

    def forget(self, paths: Iterable[str]) -> None:
        """Forgets removed objects."""
        with self._lock:
            for path in paths:
                self._known.pop(path, None)
                self._bad.discard(path)

    def refuse(self, path: str, error: ObjectRefused) -> None:
        log.warning("[remote] %s is refused (%s): %s", path, error.reason, error)
        self.forget([path])
        with self._lock:
            self._counters[f"refused_{error.reason}"] += 1
            if len(self._bad) >= _MAX_PATHS:
                self._bad.clear()
            self._bad.add(path)

    def count(self, name: str, number: int = 1) -> None:
        assert name in _COUNTS
        with self._lock:
            self._counters[name] += number

    def as_dict(self) -> dict[str, Any]:
        """Returns all counts, with the refused objects by reason as `refused`."""
        counters = self.counters()
        refused = {reason: counters[f"refused_{reason}"] for reason in get_args(RefusalReason)}
        return {name: counters[name] for name in _COUNTS} | {"refused": refused}

    def counters(self) -> Counter[str]:
        """Returns a copy of the counts. Refused objects are counted as `refused_REASON`."""
        with self._lock:
            return self._counters.copy()
