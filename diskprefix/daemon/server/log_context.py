"""The record of a request while it is served, for its log line and its metrics."""

from __future__ import annotations

import time
import uuid
from typing import Literal, TypeAlias, get_args

from msgspec import Struct, field
from starlette.requests import HTTPConnection

from diskprefix.daemon.engine.gauges import Activity
from diskprefix.daemon.engine.request import DoneEvent
from diskprefix.daemon.server.keys import NOBODY, Caller
from diskprefix.daemon.server.share import UNNAMED, Share

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left. Only the access log and the metrics show it."""

Outcome: TypeAlias = Literal["completed", "cancelled", "rejected", "invalid", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_REJECTED = (429, 503)


class LogContext(Struct):
    """The facts about one request, filled in while it is served."""

    request_id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex[:24]}")
    began_at: float = field(default_factory=time.perf_counter)
    status: int = 500
    caller: Caller = NOBODY
    share: Share = UNNAMED
    conversation: str = ""
    """The conversation for turns within the share."""
    error: str | None = None
    generation_id: str | None = None
    """The id of the reply, once the engine has the request."""
    wants_reply: bool = False
    """True for a request that asks for a reply."""
    done: DoneEvent | None = None
    cancelled_at: Activity | None = None
    """The progress of a request for a reply when it was cancelled."""

    @property
    def is_stopped(self) -> bool:
        """True if the client left before the end. People and pages press stop, so this is no failure."""
        return self.done is None and self.error is None and self.status == CLIENT_CLOSED_REQUEST

    @property
    def outcome(self) -> Outcome | None:
        """The outcome of a request for a reply; None for other requests."""
        if not self.wants_reply:
            return None
        if self.done is not None:
            return "completed"
        if self.status == CLIENT_CLOSED_REQUEST:
            return "cancelled"
        if self.status in _REJECTED:
            return "rejected"
        return "invalid" if 400 <= self.status < 500 else "failed"


def log_context(connection: HTTPConnection) -> LogContext:
    """Returns the context of the request that is being served."""
    record: LogContext = connection.scope["state"]["record"]
    return record
