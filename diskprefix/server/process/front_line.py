"""The line between a worker and the front process that passes requests on to it: see `extras/front`."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Protocol

from diskprefix.server.keys import OwnerToken


class LoadTurn(Protocol):
    """A worker's view of the front process, which decides when the worker's model is loaded and unloaded."""

    is_unloaded: bool
    """True when the worker was told to end because its memory is needed."""

    def wait_for_turn(self) -> None:
        """Returns when the model may be loaded."""

    def fail(self, message: str) -> None:
        """Tells why the model cannot be served."""


@dataclass(frozen=True)
class FrontLine:
    """The connection of a worker to a front process, which passes requests on to it."""

    listener: socket.socket
    address: str
    """The address of the front, for people."""
    began_at: float
    """When the worker's process began, on the clock of `time.perf_counter`."""
    turn: LoadTurn
    token: OwnerToken | None = None
    """None with API keys."""
    takes_any_name: bool = False
    """The front has chosen the model by its name or one of its aliases."""
