"""The save of one request: a queue of publications that wait to be written."""

from __future__ import annotations

import math
import time
from collections import deque

from diskprefix.prefixstore.store.epochs import Epoch
from diskprefix.prefixstore.store.store import Publication


class Save:
    """The saving of one request: publications that continue each other, the last one with the entry and the prompt.
    Only the writer changes a save, under the writer's lock; any thread may read it.

    Its publications are written only until `epoch`, in which the request began, is over. `label` names the prompt in
    the log.
    """

    def __init__(self, epoch: Epoch, label: str = "a prompt") -> None:
        self.epoch, self.label = epoch, label
        self.lost: str | None = None
        """The first reason why a part of the save is lost, empty if the store fails; None if nothing is lost."""
        self.has_failed = False
        """Of the rest, only the seen prompt is written."""
        self.ended_at = math.inf
        """The time, on the clock of `time.monotonic`, at which the request ended; infinite before."""
        self.has_nodes = self.has_written_nodes = False
        """Nodes were added; nodes were written."""
        self.not_held_until = 0.0
        """What was queued by this time, on the clock of `time.monotonic`, waits for no pause."""
        self.waiting: deque[Publication] = deque()
        """The publications that wait to be written, in their order. The writer may be writing the first one."""
        self.pinned: bytes | None = None
        """The node that the first waiting publication continues, or the last written node."""

    @property
    def is_finished(self) -> bool:
        return self.ended_at < math.inf

    @property
    def unused_s(self) -> float:
        """The seconds since the request ended, which used the state until then."""
        return max(0.0, time.monotonic() - self.ended_at)

    def note_end(self) -> None:
        """Notes that the request has ended, unless it had."""
        self.ended_at = min(self.ended_at, time.monotonic())
