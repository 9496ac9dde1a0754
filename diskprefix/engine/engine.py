"""The engine: a model and the loop that serves it."""

from __future__ import annotations

from diskprefix.engine.inbox import Inbox
from diskprefix.engine.loop import Loop
from diskprefix.engine.served_model import ServedModel


class Engine(ServedModel):
    """A loaded model that serves requests."""

    def serve(self, inbox: Inbox) -> None:
        """Computes the requests of `inbox` until that is stopped. Raises `DeviceLost`."""
        Loop(self, inbox).run()
