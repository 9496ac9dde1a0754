"""The save of one request: a queue of publications that wait to be written."""

from __future__ import annotations

from collections import deque

from diskprefix.store.epochs import Epoch
from diskprefix.store.store import Publication


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
        self.is_finished = False
        """The request has ended."""
        self.has_nodes = self.has_written_nodes = False
        """Nodes were added; nodes were written."""
        self.waiting: deque[Publication] = deque()
        """The publications that wait to be written, in their order. The writer may be writing the first one."""
        self.pinned: bytes | None = None
        """The node that the first waiting publication continues, or the last written node."""
