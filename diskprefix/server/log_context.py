"""What is noted of a request on its way, for its log line and its metrics."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from diskprefix.engine.request import DoneEvent
from diskprefix.server.keys import NOBODY, Caller

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; nobody receives it, the access log and the metrics show it."""


@dataclass
class LogContext:
    """What is known of a request when it ends."""

    status: int = 500
    caller: Caller = NOBODY
    error: str | None = None
    done: DoneEvent | None = None
    disconnected: bool = False

    @property
    def final_status(self) -> int:
        return CLIENT_CLOSED_REQUEST if self.disconnected else self.status


def log_context(connection: HTTPConnection) -> LogContext:
    """The record of the request that is being answered."""
    record: LogContext = connection.scope["state"]["record"]
    return record
