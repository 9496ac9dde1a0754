"""The save of one request, and its publications that wait to be written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct, field

from diskprefix.store.changes import NewNode
from diskprefix.store.store import Publication
from diskprefix.store.store_identity import Epoch


class Hold(Protocol):
    """Memory that holds payloads until they are written or lost. For any thread."""

    def release(self) -> None:
        """Gives the memory back. May be called twice."""

    def frees(self) -> bool:
        """Returns whether a release would free pages that others need."""


class Save:
    """The saving of one request: publications that continue each other, the last one with the entry and the prompt.
    Only the writer changes it, under its lock; any thread may read it.

    Its publications are written only in `epoch`, in which the request began. `label` names what is saved in the log.
    """

    def __init__(self, epoch: Epoch, label: str = "a prompt") -> None:
        self.epoch, self.label = epoch, label
        self.lost: str | None = None
        """The first reason why not all is saved, empty if the store fails; None if nothing is lost."""
        self.has_failed = False
        """Nothing more is written but the seen prompt."""
        self.is_finished = False
        """The request has ended."""
        self.has_nodes = self.has_written_nodes = False
        """Nodes were added; nodes were written."""
        self.waiting: deque[Waiting] = deque()
        self.pinned: bytes | None = None
        """The node that the first waiting publication continues, or the last written node."""


class Waiting(Struct, frozen=True, eq=False):
    """A waiting publication. `made_at` is a time of `time.monotonic`."""

    save: Save
    publication: Publication
    holds: Sequence[Hold] = ()
    made_at: float = field(default_factory=lambda: time.monotonic())

    @property
    def nodes(self) -> tuple[NewNode, ...]:
        return self.publication.nodes
