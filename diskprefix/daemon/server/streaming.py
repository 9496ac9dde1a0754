"""Sends a reply as events, lines of JSON or one JSON object, with signs of life while there is nothing to send."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from diskprefix.daemon.api.dialect import ReplyWriter, StreamEvent, json_text
from diskprefix.daemon.api.reply import EndEvent, ReplyEvent, ReplyReader, whole_reply
from diskprefix.daemon.engine.request import DoneEvent
from diskprefix.daemon.server.error_replies import StreamForm, early_failure, error_response, note_failure, stream_form
from diskprefix.daemon.server.generation import Generation, Generations, disconnected
from diskprefix.daemon.server.log_context import CLIENT_CLOSED_REQUEST, log_context
from diskprefix.errors import DiskPrefixError

KEEPALIVE_S = 8.0
"""Clients and proxies give up after as little as ten seconds without a byte."""
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

Write: TypeAlias = Callable[[Callable[[], bytes]], Awaitable[bytes]]
"""Runs a function in a thread: the end of a reply may repeat all of it, which is megabytes with log probabilities."""


class EventStream(Response):
    """Streams a reply. After the headers, an error is an event of the stream. `clock` returns seconds."""

    def __init__(
        self,
        generation: Generation | Generations,
        reader: ReplyReader,
        writer: ReplyWriter,
        write: Write,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(headers=_STREAM_HEADERS)
        del self.headers["content-length"]
        self._generation, self._reader, self._writer, self._write = generation, reader, writer, write
        self._clock = clock
        self._sent_at = clock()
        self._send: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        self._send = send
        try:
            form = stream_form(scope)
            self.headers["content-type"] = form.content_type
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._body(form.opening + _encoded(self._writer.begin()))
            await self._stream()
        except DiskPrefixError as error:
            note_failure(scope, error, "a stream ended early")
            await self._body(_encoded(self._writer.failure(error)), more=False)
        except ClientDisconnect:
            log_context(Request(scope)).status = CLIENT_CLOSED_REQUEST
        finally:
            self._generation.close()

    async def _stream(self) -> None:
        event = None
        while not isinstance(event, DoneEvent):
            # Some events send nothing, such as a text that is held back.
            left_s = self._sent_at + KEEPALIVE_S - self._clock()
            event = await self._generation.next(left_s) if left_s > 0 else None
            if event is None:
                await self._body(self._writer.keepalive())
                continue
            for reply_event in self._reader.read(event):
                written = partial(self._written, reply_event)
                is_end = isinstance(reply_event, EndEvent | DoneEvent)
                await self._body(await self._write(written) if is_end else written())
        await self._body(b"", more=False)

    async def _body(self, data: bytes, *, more: bool = True) -> None:
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            self._sent_at = self._clock()

    def _written(self, event: ReplyEvent) -> bytes:
        return _encoded(self._writer.events(event))


def _encoded(events: Sequence[StreamEvent]) -> bytes:
    return b"".join(event.encode() for event in events)


async def json_reply(
    generation: Generation | Generations, reader: ReplyReader, writer: ReplyWriter, write: Write
) -> Response:
    """Returns the whole reply as one JSON object when it has ended. Raises the errors of `Generation.next`."""
    events: list[ReplyEvent] = []
    try:
        event = None
        while not isinstance(event, DoneEvent):
            event = await generation.next(KEEPALIVE_S)
            events += reader.read(event) if event is not None else ()
    finally:
        generation.close()
    content = await write(lambda: json_text(writer.whole(whole_reply(events))))
    return Response(content, media_type="application/json")


async def respond_or_keep_alive(
    preparing: asyncio.Task[Response],
    *,
    is_stream: bool,
    early: Callable[[], Awaitable[ReplyWriter | None]] | None = None,
) -> Response:
    """Returns the prepared response. If that takes longer than `KEEPALIVE_S`, returns one that first sends signs of
    life, from the writer of `early`."""
    done, _ = await asyncio.wait({preparing}, timeout=KEEPALIVE_S)
    if done:
        return preparing.result()
    return KeepAliveResponse(preparing, is_stream=is_stream, writer=await early() if early is not None else None)


class KeepAliveResponse(Response):
    """Sends headers and signs of life before the response is ready, so that clients do not give up. JSON may begin with
    blanks.

    The status is 200. If the request fails later, a stream ends with an event of the error. Without a stream the error
    is the JSON object. After one that may pass, the connection is closed before the end of the body: clients repeat a
    request whose connection broke, as they would have after the status of the error.
    """

    def __init__(
        self, preparing: asyncio.Task[Response], *, is_stream: bool, writer: ReplyWriter | None = None
    ) -> None:
        super().__init__(headers=_STREAM_HEADERS if is_stream else None)
        del self.headers["content-length"]
        self._preparing = preparing
        self._is_stream = is_stream
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = stream_form(scope) if self._is_stream else StreamForm("application/json", sign=b"\n")
        sign, self.headers["content-type"] = form.sign, form.content_type
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        leaving = asyncio.create_task(disconnected(receive))
        try:
            while not self._preparing.done():
                if self._writer is not None:
                    sign = _encoded(self._writer.begin()) or self._writer.keepalive()
                await send({"type": "http.response.body", "body": sign, "more_body": True})
                waited = {self._preparing, leaving}
                await asyncio.wait(waited, timeout=KEEPALIVE_S, return_when=asyncio.FIRST_COMPLETED)
                # A response that is ready notices by itself that the client has left.
                if leaving.done() and not self._preparing.done():
                    raise ClientDisconnect
            await self._go_on(scope, receive, send)
        except ClientDisconnect:
            log_context(Request(scope)).status = CLIENT_CLOSED_REQUEST
        finally:
            leaving.cancel()
            self._preparing.cancel()
            # The log line of the request says how far the request came.
            await asyncio.wait({self._preparing})

    async def _go_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = self._preparing.result()
        except DiskPrefixError as error:
            note_failure(scope, error, "a reply ended early")
            if not self._is_stream:
                body = bytes(error_response(scope, error).body)
            else:
                writer = self._writer
                body = early_failure(scope, error) if writer is None else _encoded(writer.failure(error))
            is_repeated = not self._is_stream and (error.http_status >= 500 or error.http_status == 429)
            await send({"type": "http.response.body", "body": body, "more_body": is_repeated})
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
