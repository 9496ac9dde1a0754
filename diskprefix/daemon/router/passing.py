"""Passes a request on to a worker, and the response back, both as they come.

Each request has a connection of its own, which is closed at once if the client hangs up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING

import h11

from diskprefix.daemon.server.limits import LARGE_BYTES, BodyPace, CountedRequest
from diskprefix.daemon.server.share import SHARE_HEADER, share_of_connection
from diskprefix.errors import QueueFull

if TYPE_CHECKING:
    from starlette.datastructures import Headers
    from starlette.types import Message, Receive, Scope, Send

_PIECE_BYTES = 64 * 1024
_HEAD_BYTES = 256 * 1024
_OF_ONE_CONNECTION = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect")
)
_NOT_UP = _OF_ONE_CONNECTION | {SHARE_HEADER}


class NotTaken(Exception):
    """The worker died before it took the request. Another worker can take it."""


class WorkerGone(Exception):
    """The worker died before the response was complete. `has_begun`: the client has received a part."""

    def __init__(self, *, has_begun: bool) -> None:
        self.has_begun = has_begun


class Incoming:
    """The body of a request, and whether its client has disconnected."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._replayable: list[bytes] = []
        self._unsent: list[bytes] = []
        self.counted: CountedRequest | None = None
        self.is_large = self.is_answered = False
        self._is_whole = False
        self._is_replayable = True
        self.has_disconnected = False
        self.sees_all = False
        """Whether the caller may see everything, such as paths of files."""

    async def read(self, headers: Headers, pace: BodyPace) -> bytes:
        """Returns the whole body, and keeps it for `pieces`. Raises as `BodyPace.whole_body`."""
        return await pace.whole_body(headers, self._pieces())

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the body. Raises `NotTaken` after `drop`."""
        if not self._is_replayable:
            raise NotTaken
        # After `drop`, this list has the only references.
        self._unsent = self._replayable[::-1]
        while self._unsent:
            yield self._unsent.pop()
        self._release()
        if not self._is_whole:
            async for piece in self._pieces():
                if self.is_large:
                    # A large body is not kept for another worker.
                    self.drop()
                yield piece

    def drop(self) -> None:
        """Forgets the body, because a worker has it."""
        self._replayable, self._is_replayable = [], False
        self._release()

    def _release(self) -> None:
        if self.counted is not None and not (self._replayable or self._unsent):
            self.counted.release()

    async def wait_for_disconnect(self) -> None:
        """Returns when the client has disconnected or has the whole response."""
        while not self.has_disconnected:
            await self._next()

    async def _pieces(self) -> AsyncIterator[bytes]:
        while not (self._is_whole or self.has_disconnected):
            message = await self._next()
            if message["type"] == "http.request":
                self._is_whole = not message.get("more_body", False)
                if piece := message.get("body", b""):
                    if self._is_replayable and self.counted is not None:
                        self.counted.add(len(piece))
                        self._replayable.append(piece)
                        self.is_large = self.counted.num_bytes > LARGE_BYTES
                    yield piece

    async def _next(self) -> Message:
        message = await self._receive()
        self.has_disconnected = message["type"] == "http.disconnect"
        return message


async def pass_on(path: str, scope: Scope, incoming: Incoming, send: Send) -> int:
    """Sends a request to the worker that listens at `path`, and its response to the client. Returns the status, 499 if
    the client has hung up.

    Raises `NotTaken` and `WorkerGone`, and `QueueFull` if there is no room for the body.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(path, limit=_PIECE_BYTES)
    except OSError as error:
        raise NotTaken from error
    upward = asyncio.create_task(_send_up(scope, incoming, writer))
    try:
        return await _Response(incoming, scope["method"], reader).pass_down(send)
    finally:
        upward.cancel()
        with suppress(asyncio.CancelledError, NotTaken, OSError):
            await upward
        # An orderly close would wait for the rest of the response.
        writer.transport.abort()


async def _send_up(scope: Scope, incoming: Incoming, writer: asyncio.StreamWriter) -> None:
    """Sends the request, which the router's server has parsed, then waits for the client to disconnect."""
    headers = _headers_up(scope)
    is_chunked = (b"transfer-encoding", b"chunked") in headers
    lines = [b"%s %s HTTP/1.1" % (scope["method"].encode(), _target(scope)), *map(b": ".join, headers), b"", b""]
    try:
        # Before the body, so that the worker's time limit for the body begins.
        writer.write(b"\r\n".join(lines))
        async for piece in incoming.pieces():
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece)
            await writer.drain()
        if is_chunked and not incoming.has_disconnected:
            writer.write(b"0\r\n\r\n")
    except (NotTaken, QueueFull):
        writer.transport.abort()
        raise
    except OSError:
        # The worker has answered already, or has died: the reader of the response finds out.
        pass
    await incoming.wait_for_disconnect()
    writer.transport.abort()


def _target(scope: Scope) -> bytes:
    query: bytes = scope["query_string"]
    path: bytes = scope["raw_path"]
    return path + (b"?" + query if query else b"")


def _headers_up(scope: Scope) -> list[tuple[bytes, bytes]]:
    headers = [(name, value) for name, value in scope["headers"] if name not in _NOT_UP]
    headers.append((SHARE_HEADER, str(share_of_connection(scope)).encode()))
    names = {name for name, _ in scope["headers"]}
    if b"transfer-encoding" in names:
        # It has no content-length, or the router's server would have refused it.
        headers.append((b"transfer-encoding", b"chunked"))
    if names & {b"transfer-encoding", b"content-length"}:
        # Until the worker says that it reads the body, another worker may take the request.
        headers.append((b"expect", b"100-continue"))
    if b"host" not in names:
        # HTTP/1.0 does not require it.
        headers.append((b"host", b"localhost"))
    return headers


class _Response:
    """Reads a worker's response and sends it to the client."""

    def __init__(self, incoming: Incoming, method: str, reader: asyncio.StreamReader) -> None:
        self._incoming, self._method, self._reader = incoming, method, reader
        self._is_taken = False

    async def pass_down(self, send: Send) -> int:
        data = await self._read()
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
        # h11 only needs the method, to know whether the response has a body.
        self._connection.send(h11.Request(method=self._method, target=b"/", headers=[(b"host", b"worker")]))
        self._connection.receive_data(data)
        status, body = 0, b""
        while True:
            event = self._next_event()
            if event is h11.NEED_DATA:
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    body = b""
                self._connection.receive_data(await self._read())
            match event:
                case None if self._incoming.has_disconnected:
                    return 499
                case None if self._is_taken:
                    raise WorkerGone(has_begun=bool(status))
                case None:
                    raise NotTaken
                case h11.InformationalResponse():
                    self._take()
                case h11.Response():
                    self._take()
                    status = event.status_code
                    headers = [(name, value) for name, value in event.headers if name not in _NOT_DOWN]
                    self._incoming.is_answered = True
                    await send({"type": "http.response.start", "status": status, "headers": headers})
                case h11.Data():
                    body += event.data
                case h11.EndOfMessage():
                    await send({"type": "http.response.body", "body": body, "more_body": False})
                    return status

    def _take(self) -> None:
        self._is_taken = True
        self._incoming.drop()

    async def _read(self) -> bytes:
        """Returns no bytes if the connection has ended."""
        try:
            return await self._reader.read(_PIECE_BYTES)
        except OSError:
            return b""

    def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | None:
        """Returns None if the connection has ended."""
        try:
            event = self._connection.next_event()
        except h11.RemoteProtocolError:
            return None
        return None if event is h11.PAUSED or isinstance(event, h11.ConnectionClosed) else event  # type: ignore[return-value]


_NOT_DOWN = _OF_ONE_CONNECTION | {b"date"}
"""uvicorn adds a date of its own."""
