"""Bounds what is being sent: the memory of large replies that clients have not read yet, and the time for that."""

from __future__ import annotations

import logging
from collections import Counter

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diskprefix.errors import QueueFull
from diskprefix.nouns import Tenant
from diskprefix.server.body import patience
from diskprefix.server.error_replies import error_response, logged
from diskprefix.server.log_context import log_context

log = logging.getLogger("diskprefix")

LARGE_BYTES, PIECE_BYTES = 256 * 1024, 64 * 1024
"""Smaller replies are sent as they are: what the connection holds of them is bounded by the number of connections."""


class TooSlow(Exception):
    """A client does not read what is sent to it."""


class Sending:
    """ASGI middleware. A reply that has no room is refused before it begins; a client that reads too slowly is left."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        """`max_bytes`: of the large replies that are being sent to one caller."""
        self._app = app
        self._max_bytes = max_bytes
        self._sending: Counter[Tenant] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = log_context(Request(scope))
        head: Message | None = None
        is_refused = False

        async def send_large(message: Message) -> None:
            nonlocal head, is_refused
            if is_refused:
                return
            if message["type"] == "http.response.start" and _length(message) > LARGE_BYTES:
                head = message
                return
            body = message.get("body", b"")
            if len(body) <= LARGE_BYTES or message.get("more_body", False):
                # A file, which is read as it is sent, or a stream: what waits of that is bounded elsewhere.
                if head is not None:
                    await send(head)
                    head = None
                await send(message)
                return
            caller = context.caller.tenant
            if self._sending[caller] and self._sending[caller] + len(body) > self._max_bytes:
                is_refused = True
                refusal = QueueFull("other large replies to this caller are not read yet; read them", retry_after_s=5)
                context.error = logged(refusal)
                if head is None:
                    # It has begun. Without an end, it is a failure of the connection.
                    raise TooSlow("other large replies to this caller are not read yet")
                await error_response(scope, refusal)(scope, receive, send)
                return
            self._sending[caller] += len(body)
            try:
                if head is not None:
                    await send(head)
                    head = None
                await _send_in_time(body, send)
            finally:
                self._sending -= Counter({caller: len(body)})

        try:
            await self._app(scope, receive, send_large)
        except TooSlow as error:
            log.warning("[server] %s: a large reply was not sent: %s", context.request_id, error)


async def _send_in_time(body: bytes, send: Send) -> None:
    """Raises `TooSlow`."""
    try:
        async with patience() as extend:
            num_sent = 0
            while num_sent < len(body):
                piece = body[num_sent : num_sent + PIECE_BYTES]
                num_sent += len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": num_sent < len(body)})
                extend(num_sent)
    except TimeoutError as error:
        raise TooSlow("it was not read in time") from error


def _length(head: Message) -> int:
    length = Headers(raw=head["headers"]).get("content-length", "")
    return int(length) if length.isdigit() else 0
