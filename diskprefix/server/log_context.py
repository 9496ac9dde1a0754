"""What is recorded about a request while it is served, for its log line and its metrics."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from diskprefix.engine.request import DoneEvent
from diskprefix.server.keys import NOBODY, Caller

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left. Only the access log and the metrics show it."""


@dataclass
class LogContext:
    """The facts about one request, filled in while it is served."""

    request_id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex[:24]}")
    status: int = 500
    caller: Caller = NOBODY
    error: str | None = None
    generation_id: str | None = None
    """The id of the reply, once the engine has the request."""
    done: DoneEvent | None = None


def log_context(connection: HTTPConnection) -> LogContext:
    """Returns the context of the request that is being served."""
    record: LogContext = connection.scope["state"]["record"]
    return record
