"""The work that a thread does for a client: the step that it is in, and whether anybody still waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from diskprefix.errors import DiskPrefixError

CHAT_TEMPLATE = "chat template"
"""The step in which the model's chat template runs, which is code."""


class NobodyWaits(DiskPrefixError):
    """The client has left, so its work ends here."""


class ThreadWork:
    """Work in a thread, for the thread that waits for it, too."""

    def __init__(self) -> None:
        self.step = "read"
        """The step that the work is in: of `daemon/chat/README.md`, or before these."""
        self.is_wanted = True


_of_thread = threading.local()


@contextmanager
def doing(work: ThreadWork) -> Iterator[None]:
    """Says which work this thread does."""
    _of_thread.work = work
    try:
        yield
    finally:
        _of_thread.work = None


def begin_step(step: str) -> None:
    """Says which step the work of this thread is in, if it does any. Raises `NobodyWaits` if the client has left."""
    work: ThreadWork | None = getattr(_of_thread, "work", None)
    if work is not None:
        if not work.is_wanted:
            raise NobodyWaits("the client has left")
        work.step = step


@contextmanager
def in_step(step: str) -> Iterator[None]:
    """A step inside another one. Raises `NobodyWaits` as `begin_step`."""
    work: ThreadWork | None = getattr(_of_thread, "work", None)
    around = "" if work is None else work.step
    begin_step(step)
    try:
        yield
    finally:
        if work is not None:
            work.step = around
