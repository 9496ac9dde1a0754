"""The objects that one process knows of, and its counts."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, get_args

from diskprefix.extras.remote.signing import ObjectRefused, RefusalReason

log = logging.getLogger("diskprefix")

_MOST = 100_000
"""The maximum number of remembered paths of each kind. The oldest are dropped first."""
_KNOWN_S = 86400.0
"""Seconds for which a recorded object counts as present. Later it may have been swept."""
_COUNTS = (
    *("fetched", "fetched_bytes", "missing", "late", "skipped", "slower", "failed"),
    *("written", "written_bytes", "dropped"),
)


class Ledger:
    """The objects that are present, those that were refused, and counts. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: OrderedDict[str, float] = OrderedDict()
        self._bad: OrderedDict[str, float] = OrderedDict()
        """The paths of each kind, with the time of recording."""
        self._counters: Counter[str] = Counter()

    def is_known(self, path: str) -> bool:
        """Returns whether an object was present within the last day, and sound if this process has read it."""
        with self._lock:
            recorded_at = self._known.get(path)
            return recorded_at is not None and self._clock() - recorded_at < _KNOWN_S

    def is_bad(self, path: str) -> bool:
        """Returns whether an object was refused. It is not fetched again, and may be overwritten."""
        with self._lock:
            return path in self._bad

    def record_object(self, path: str, *, written_bytes: int = 0) -> None:
        """Records that an object is present: it was found, read or, if `written_bytes` are given, written."""
        with self._lock:
            self._remember(self._known, path)
            if written_bytes:
                self._bad.pop(path, None)
                self._counters["written"] += 1
                self._counters["written_bytes"] += written_bytes

    def miss(self, path: str) -> None:
        """Records that an object is missing: it may have been purged."""
        self.count("missing")
        with self._lock:
            self._known.pop(path, None)

    def forget(self, paths: Iterable[str]) -> None:
        """Drops removed objects."""
        with self._lock:
            for path in paths:
                self._known.pop(path, None)
                self._bad.pop(path, None)

    def refuse(self, path: str, error: ObjectRefused) -> None:
        log.warning("[remote] %s is refused (%s): %s", path, error.reason, error)
        with self._lock:
            self._counters[f"refused_{error.reason}"] += 1
            self._remember(self._bad, path)
            self._known.pop(path, None)

    def count(self, what: str, number: int = 1) -> None:
        assert what in _COUNTS
        with self._lock:
            self._counters[what] += number

    def as_dict(self) -> dict[str, Any]:
        """Returns all counts, and under `refused` the refused objects by reason."""
        with self._lock:
            refused = {reason: self._counters[f"refused_{reason}"] for reason in get_args(RefusalReason)}
            return {name: self._counters[name] for name in _COUNTS} | {"refused": refused}

    def counts(self) -> Counter[str]:
        """Returns a copy of the counts. Refused objects are counted as `refused_REASON`."""
        with self._lock:
            return self._counters.copy()

    def _remember(self, paths: OrderedDict[str, float], path: str) -> None:
        paths[path] = self._clock()
        paths.move_to_end(path)
        if len(paths) > _MOST:
            paths.popitem(last=False)
