"""A device in main memory whose copies are made as late as its rules allow: a missing wait shows as wrong bytes.

Until a copy is made, its destination holds NaN. Copies, waits and blocking of threads are counted.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diskprefix.kv.copies import Lane, StreamCopies

_NAN_BYTE = 0xFF


class LateEvent:
    """A point in a queue. The clock of a queue is its bytes over its rate."""

    def __init__(self, queue: LateQueue) -> None:
        self._queue = queue
        self._at, self._clock_s = queue.num_queued, queue.clock_s

    def query(self) -> bool:
        return self._queue.num_made >= self._at

    def pass_(self) -> None:
        self._queue.make_up_to(self._at)

    def synchronize(self) -> None:
        if not self.query():
            self._queue.blocked.append(threading.current_thread().name)
            self.pass_()

    def elapsed_time(self, later: LateEvent) -> float:
        return (later._clock_s - self._clock_s) * 1e3


class LateQueue:
    """Copies in order, none of which is made before it must be. `blocked` gets the name of each thread that waits."""

    def __init__(self, blocked: list[str], bytes_per_s: float) -> None:
        self.num_made = 0
        self.clock_s = 0.0
        self.blocked = blocked
        self._bytes_per_s = bytes_per_s
        self._copies: list[Callable[[], object]] = []
        self._making = threading.RLock()

    @property
    def num_queued(self) -> int:
        return len(self._copies)

    def add(self, target: torch.Tensor, source: torch.Tensor, first: Callable[[], object] = lambda: None) -> LateEvent:
        assert (target.shape, target.dtype) == (source.shape, source.dtype)
        target.copy_(torch.full((target.dtype.itemsize,), _NAN_BYTE, dtype=torch.uint8).view(target.dtype))
        with self._making:
            self._copies.append(lambda: (first(), target.copy_(source)))
            self.clock_s += target.numel() * target.dtype.itemsize / self._bytes_per_s
            return LateEvent(self)

    def make_up_to(self, end: int) -> None:
        with self._making:
            while self.num_made < end:
                self._copies[self.num_made]()
                self._copies[self.num_made] = lambda: None
                self.num_made += 1


class LateStreams:
    """In place of `TorchStreams`."""

    def __init__(self, bytes_per_s: float = 1e9) -> None:
        self.counts: Counter[str] = Counter()
        self.blocked: list[str] = []
        self.lane: Lane | None = None
        self._loads, self._saves = (LateQueue(self.blocked, bytes_per_s) for _ in range(2))

    @property
    def num_loaded(self) -> int:
        """The number of loads that were made."""
        return self._loads.num_made

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.counts["pinned_bytes"] += num_bytes
        return torch.empty(num_bytes, dtype=torch.uint8)

    def follow(self) -> LateEvent:
        self.counts["follows"] += 1
        return LateEvent(self._loads)

    def load(self, part: torch.Tensor, staged: torch.Tensor) -> LateEvent:
        self.counts["loads"] += 1
        return self._loads.add(part, staged)

    def save(self, staged: torch.Tensor, part: torch.Tensor, after: Any) -> LateEvent:
        self.counts["saves"] += 1
        return self._saves.add(staged, part, after.pass_ if after else lambda: None)

    def wait(self, event: LateEvent) -> None:
        self.counts["waits"] += 1
        event.pass_()

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        self.counts["uploads"] += 1
        return values.clone()


def install(patch: pytest.MonkeyPatch, streams: LateStreams) -> None:
    """Has new sequences copy by `streams`, as on a device."""
    streams.lane = lane = Lane(streams)
    patch.setattr("diskprefix.kv.arena.copies_for", lambda _: StreamCopies(lane))
