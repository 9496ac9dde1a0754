"""The save of one request, and the publications of it that wait to be written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from diskprefix.store.changes import NewNode
from diskprefix.store.store import Publication
from diskprefix.store.store_identity import Epoch


class Hold(Protocol):
    """Memory that payloads lie in until they are written or lost. For any thread."""

    def release(self) -> None:
        """Gives the memory back. May be called twice."""

    def frees(self) -> bool:
        """Returns whether a release would free pages that others need."""


class Save:
    """The saving of one request: publications that continue each other, the last one with the entry and the prompt. The
    writer changes it under its lock, anybody may read it.

    Nothing is written in another `epoch` than that in which the request began. `what` is saved, for the log.
    """

    def __init__(self, epoch: Epoch, what: str = "a prompt") -> None:
        self.epoch, self.what = epoch, what
        self.lost: str | None = None
        """Why not all is saved: the first reason, empty if the store fails. None if nothing is lost."""
        self.has_failed = False
        """Nothing is added any more, but that the prompt was seen."""
        self.is_finished = False
        """Its request has ended."""
        self.has_nodes = self.has_written_nodes = False
        """Nodes were added; nodes were written."""
        self.waiting: deque[Waiting] = deque()
        self.pinned: bytes | None = None
        """What it continues, or the last node that was written."""


@dataclass(frozen=True, eq=False)
class Waiting:
    """A publication that waits. `made_at` is on the clock of `time.monotonic`."""

    save: Save
    publication: Publication
    holds: Sequence[Hold] = ()
    made_at: float = field(default_factory=lambda: time.monotonic())

    @property
    def nodes(self) -> tuple[NewNode, ...]:
        return self.publication.nodes

    def frees(self) -> bool:
        return any(hold.frees() for hold in self.holds)
