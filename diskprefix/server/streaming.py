"""Sends a reply: as server-sent events, or as one JSON object. Both show early and often that the daemon is alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from diskprefix.api.dialect import ReplyWriter, ServerSentEvent, json_text
from diskprefix.api.reply import EndEvent, ReplyEvent, ReplyReader, whole_reply
from diskprefix.engine.request import DoneEvent
from diskprefix.errors import DiskPrefixError
from diskprefix.server.error_replies import early_failure, early_sign, error_response, note_failure
from diskprefix.server.generation import Generation, Generations, LiveEvent
from diskprefix.server.log_context import CLIENT_CLOSED_REQUEST, log_context

KEEPALIVE_S = 8.0
"""Clients and proxies give up after as little as ten seconds without a byte."""
_FIRST_BYTES = b": diskprefix\n\n"
"""A comment, which clients ignore. It is sent before the prompt is computed."""


_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class _Connection:
    """Sends a response, and knows when it is time for a sign of life. `clock` returns seconds."""

    def __init__(self, send: Send, generation: Generation | Generations, clock: Callable[[], float]) -> None:
        self._send = send
        self._generation = generation
        self._clock = clock
        self._sent_at = clock()
        self.has_begun = False

    async def next(self) -> LiveEvent | None:
        """Returns the next event, or None if nothing was sent for `KEEPALIVE_S`, though there may be events."""
        left_s = self._sent_at + KEEPALIVE_S - self._clock()
        return await self._generation.next(left_s) if left_s > 0 else None

    async def begin(self, response: Response) -> None:
        self.has_begun = True
        await self._send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )

    async def body(self, data: bytes, *, more: bool = True) -> None:
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            self._sent_at = self._clock()


class _ReplyResponse(Response):
    """A response whose body is made of the engine's events. `clock` returns seconds."""

    first_headers: Mapping[str, str] | None = None

    def __init__(
        self,
        generation: Generation | Generations,
        reader: ReplyReader,
        writer: ReplyWriter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(headers=self.first_headers)
        del self.headers["content-length"]
        self._generation = generation
        self._reader = reader
        self._writer = writer
        self._clock = clock


class EventStream(_ReplyResponse):
    """Streams a reply. After the headers, an error is an event of the stream."""

    media_type = "text/event-stream"

    first_headers = _STREAM_HEADERS

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        connection = _Connection(send, self._generation, self._clock)
        try:
            await connection.begin(self)
            await connection.body(_FIRST_BYTES + _encoded(self._writer.begin()))
            await self._stream(connection)
        except DiskPrefixError as error:
            note_failure(scope, error, "a stream ended early")
            await connection.body(_encoded(self._writer.failure(error)), more=False)
        except ClientDisconnect:
            log_context(Request(scope)).status = CLIENT_CLOSED_REQUEST
        finally:
            self._generation.close()

    async def _stream(self, connection: _Connection) -> None:
        event = None
        while not isinstance(event, DoneEvent):
            event = await connection.next()
            if event is None:
                await connection.body(self._writer.keepalive())
                continue
            for reply_event in self._reader.read(event):
                if isinstance(reply_event, EndEvent | DoneEvent):
                    # In a thread: all that was said may be in them once more.
                    data = await asyncio.to_thread(self._written, reply_event)
                else:
                    data = self._written(reply_event)
                await connection.body(data)
        await connection.body(b"", more=False)

    def _written(self, event: ReplyEvent) -> bytes:
        return _encoded(self._writer.events(event))


def _encoded(events: Sequence[ServerSentEvent]) -> bytes:
    return b"".join(event.encode() for event in events)


class PatientResponse(_ReplyResponse):
    """Sends a reply as one JSON object.

    If it takes long, the status and the headers are sent before the reply is there, and then a blank from time to time:
    JSON may begin with blanks, and a client that waits for headers, or for any byte, does not give up. The status is
    200 then. If the request fails after that, the connection is closed before the end of the body, which clients take
    for a failure of the connection: no error can pass for a reply.
    """

    media_type = "application/json"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = _Connection(send, self._generation, self._clock)
        try:
            events = await self._events(connection)
            self._generation.close()
            # In a thread: log probabilities of a long reply are a hundred megabytes.
            content = await asyncio.to_thread(lambda: json_text(self._writer.whole(whole_reply(events))))
            whole = Response(content, media_type=self.media_type)
            if connection.has_begun:
                await connection.body(bytes(whole.body), more=False)
            else:
                await whole(scope, receive, send)
        except DiskPrefixError as error:
            note_failure(scope, error, "a reply ended early" if connection.has_begun else "")
            if not connection.has_begun:
                await error_response(scope, error)(scope, receive, send)
        except ClientDisconnect:
            log_context(Request(scope)).status = CLIENT_CLOSED_REQUEST
        finally:
            self._generation.close()

    async def _events(self, connection: _Connection) -> list[ReplyEvent]:
        events: list[ReplyEvent] = []
        event = None
        while not isinstance(event, DoneEvent):
            event = await connection.next()
            if event is None:
                if not connection.has_begun:
                    await connection.begin(self)
                await connection.body(b"\n")
                continue
            events += self._reader.read(event)
        return events


async def first_signs(
    preparing: asyncio.Task[Response], *, is_stream: bool, early: Callable[[], ReplyWriter | None] | None = None
) -> Response:
    """Returns the prepared response, or, if that takes long, one that shows signs of life until it is ready: the events
    of the writer that `early` returns, or comments."""
    done, _ = await asyncio.wait({preparing}, timeout=KEEPALIVE_S)
    if done:
        return preparing.result()
    # In a thread: the events repeat fields of the request.
    writer = await asyncio.to_thread(early) if is_stream and early is not None else None
    return HeldResponse(preparing, is_stream=is_stream, writer=writer)


class HeldResponse(Response):
    """Begins before it is known whether a request can be served. An error is sent as in a reply that fails."""

    def __init__(
        self, preparing: asyncio.Task[Response], *, is_stream: bool, writer: ReplyWriter | None = None
    ) -> None:
        self.media_type = EventStream.media_type if is_stream else PatientResponse.media_type
        super().__init__(headers=_STREAM_HEADERS if is_stream else None)
        del self.headers["content-length"]
        self._preparing = preparing
        self._is_stream = is_stream
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sign = early_sign(scope) if self._is_stream else b"\n"
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        leaving = asyncio.create_task(disconnected(receive))
        try:
            while not self._preparing.done():
                if self._writer is not None:
                    sign = _encoded(self._writer.begin()) or self._writer.keepalive()
                await send({"type": "http.response.body", "body": sign, "more_body": True})
                waited = {self._preparing, leaving}
                await asyncio.wait(waited, timeout=KEEPALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    log_context(Request(scope)).status = CLIENT_CLOSED_REQUEST
                    return
            await self._go_on(scope, receive, send)
        finally:
            leaving.cancel()
            self._preparing.cancel()

    async def _go_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = self._preparing.result()
        except DiskPrefixError as error:
            note_failure(scope, error, "a request that waited cannot be served")
            if self._is_stream:
                body = (
                    _encoded(self._writer.failure(error)) if self._writer is not None else early_failure(scope, error)
                )
                await send({"type": "http.response.body", "body": body, "more_body": False})
            return
        has_failed = False

        async def send_rest(message: Message) -> None:
            nonlocal has_failed
            if message["type"] == "http.response.start":
                # An error would pass for a reply. Without an end, it is a failure of the connection.
                has_failed = message["status"] != self.status_code
            elif not has_failed:
                await send(message)

        await response(scope, receive, send_rest)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass
