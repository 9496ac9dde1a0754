"""Sends a reply: as server-sent events, or as one JSON object. Both show early and often that the daemon is alive."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from diskprefix.engine.request import DoneEvent
from diskprefix.errors import DiskPrefixError
from diskprefix.server.errors import error_response, one_line
from diskprefix.server.generation import Generation
from diskprefix.server.log_context import CLIENT_CLOSED_REQUEST, log_context
from diskprefix.server.protocols.dialect import ReplyWriter, ServerSentEvent
from diskprefix.server.protocols.reply import ReplyCollector, ReplyReader

log = logging.getLogger("diskprefix")

KEEPALIVE_S = 8.0
"""Clients and proxies give up after as little as ten seconds without a byte."""
_FIRST_BYTES = b": diskprefix\n\n"
"""A comment, which clients ignore. It is sent before the prompt is computed."""


class EventStream(Response):
    """Streams a reply. After the headers, an error is an event of the stream."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, reader: ReplyReader, writer: ReplyWriter, keepalive: bytes) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._generation = generation
        self._reader = reader
        self._writer = writer
        self._keepalive = keepalive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": _FIRST_BYTES, "more_body": True})
            async for data in self._data(scope):
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientDisconnect:
            log_context(Request(scope)).status = CLIENT_CLOSED_REQUEST
        finally:
            self._generation.close()

    async def _data(self, scope: Scope) -> AsyncIterator[bytes]:
        for sent in self._writer.begin():
            yield sent.encode()
        try:
            event = None
            while not isinstance(event, DoneEvent):
                event = await self._generation.next(KEEPALIVE_S)
                if event is None:
                    yield self._keepalive
                    continue
                for reply_event in self._reader.read(event):
                    if data := _encoded(self._writer.events(reply_event)):
                        yield data
        except DiskPrefixError as error:
            log_context(Request(scope)).error = one_line(error.message)
            log.error("a stream ended early: %s", one_line(error.message))
            yield _encoded(self._writer.failure(error))


def _encoded(events: Sequence[ServerSentEvent]) -> bytes:
    return b"".join(event.encode() for event in events)


class PatientResponse(Response):
    """Sends a reply as one JSON object.

    If it takes long, the status and the headers are sent before the reply is there, and then a blank from time to time:
    JSON may begin with blanks, and a client that waits for headers, or for any byte, does not give up. The status is
    200 then. If the request fails after that, the connection is closed before the end of the body, which clients take
    for a failure of the connection: no error can pass for a reply.
    """

    media_type = "application/json"

    def __init__(self, generation: Generation, reader: ReplyReader, writer: ReplyWriter) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._generation = generation
        self._reader = reader
        self._writer = writer
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            collector = ReplyCollector()
            event = None
            while not isinstance(event, DoneEvent):
                event = await self._generation.next(KEEPALIVE_S)
                if event is None:
                    await self._show_life(send)
                    continue
                for reply_event in self._reader.read(event):
                    collector.add(reply_event)
            self._generation.close()
            await self._send_reply(JSONResponse(self._writer.whole(collector.reply)), scope, receive, send)
        except DiskPrefixError as error:
            log_context(Request(scope)).error = one_line(error.message)
            if not self._has_begun:
                await error_response(scope, error)(scope, receive, send)
                return
            log.error("a reply ended early: %s", one_line(error.message))
        except ClientDisconnect:
            log_context(Request(scope)).status = CLIENT_CLOSED_REQUEST
        finally:
            self._generation.close()

    async def _show_life(self, send: Send) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": b"\n", "more_body": True})

    async def _send_reply(self, whole: JSONResponse, scope: Scope, receive: Receive, send: Send) -> None:
        if self._has_begun:
            await send({"type": "http.response.body", "body": whole.body, "more_body": False})
        else:
            await whole(scope, receive, send)
