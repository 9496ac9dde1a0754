"""Results in memory that took long to make, in a room that shares divide."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import count
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class _Kept(NamedTuple, Generic[V]):
    value: V
    size: int
    used_at: int
    """The number of its last use."""


class _OfShare(OrderedDict[K, _Kept[V]]):
    """The results of one share by their keys, the least recently used first, and the sum of their sizes."""

    size = 0


class FairCache(Generic[K, V]):
    """The results that were used last, whose sizes are at most `most` together. For any thread.

    The key of a result says who may find it. Its room counts for a share, the text of a `server.share.Share`. Above the
    limit, the least recently used result goes of those shares that have more than an equal part of the room. So what
    one share adds, under one salt or many, takes nothing from the part of another.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.size = 0
        """The sum of the sizes of all results."""
        self._of: dict[str, _OfShare[K, V]] = {}
        self._share_of: dict[K, str] = {}
        self._uses = count()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._share_of)

    def __iter__(self) -> Iterator[K]:
        """Yields the keys that there are now."""
        return iter(list(self._share_of))

    def get(self, key: K) -> V | None:
        """Returns a result, and counts a use of it; None if there is none."""
        with self._lock:
            if (share := self._share_of.get(key)) is None:
                return None
            results = self._of[share]
            results[key] = results[key]._replace(used_at=next(self._uses))
            results.move_to_end(key)
            return results[key].value

    def put(self, key: K, value: V, share: str, size: int = 1) -> None:
        """Adds a result, in place of an earlier one with this key."""
        with self._lock:
            self._remove(key)
            results = self._of.setdefault(share, _OfShare())
            results[key] = _Kept(value, size, next(self._uses))
            self._share_of[key] = share
            results.size += size
            self.size += size
            self._make_fit()

    def get_or_make(self, key: K, share: str, make: Callable[[], V]) -> V:
        """Returns a result of size 1, which is made and added if there is none."""
        if (value := self.get(key)) is None:
            self.put(key, value := make(), share)
        return value

    def remove(self, key: K) -> None:
        """Removes a result, if there is one."""
        with self._lock:
            self._remove(key)

    def measure_again(self, size_of: Callable[[V], int]) -> None:
        """Counts all results with the sizes that they have now."""
        with self._lock:
            for results in self._of.values():
                for key, kept in results.items():
                    results[key] = kept._replace(size=size_of(kept.value))
                results.size = sum(kept.size for kept in results.values())
            self.size = sum(results.size for results in self._of.values())
            self._make_fit()

    def remove_if(self, is_gone: Callable[[K, V], bool]) -> bool:
        """Removes the results for which `is_gone` returns True. Returns whether there were any."""
        with self._lock:
            results = [(key, kept.value) for results in self._of.values() for key, kept in results.items()]
            gone = [key for key, value in results if is_gone(key, value)]
            for key in gone:
                self._remove(key)
            return bool(gone)

    def clear(self) -> None:
        self.remove_if(lambda _key, _value: True)

    # The caller holds the lock.

    def _make_fit(self) -> None:
        # Bound: each round removes a result.
        while self.size > self.most:
            part = self.most / len(self._of)
            above = [results for results in self._of.values() if results.size > part]
            oldest = min(above, key=lambda results: next(iter(results.values())).used_at)
            self._remove(next(iter(oldest)))

    def _remove(self, key: K) -> None:
        if (share := self._share_of.pop(key, None)) is None:
            return
        results = self._of[share]
        size = results.pop(key).size
        results.size -= size
        self.size -= size
        if not results:
            del self._of[share]
