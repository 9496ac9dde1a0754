"""The line between a worker and the front process that passes requests on to it: see `extras/front`."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

PEER_HEADER = b"x-diskprefix-peer"
"""The header in which a front tells its worker the addresses of a connection: `HOST PORT HOST PORT`, the client first.
The front takes it from no client, and nobody else reaches the worker's socket."""


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
    takes_any_name: bool = False
    """The front has chosen the model by its name or one of its aliases."""


class RestoredAddresses:
    """ASGI application behind a front: the addresses are those of the front's client and of its own end."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in scope.get("headers", ()):
            if name == PEER_HEADER:
                client, client_port, server, server_port = value.decode().split()
                scope["client"], scope["server"] = (client, int(client_port)), (server, int(server_port))
        await self._app(scope, receive, send)
