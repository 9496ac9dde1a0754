"""Clients that a server must bear: they send slowly, read slowly, say nothing, or hang up.

What they send is in `requests.py`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeAlias

READ_BYTES, READ_EVERY_S = 512, 0.5
SECOND_S = 1.0
"""Seconds between two bytes of clients that read or write one at a time."""
SILENT_S = 600.0
"""Seconds that a silent client waits to be disconnected."""
UNFINISHED_S = 10.0
"""Seconds that the bodies which are not ended are waited for."""
HUNG_UP, CLOSED, CUT_OFF = "hung up", "closed", "cut off"
"""Ends without a status: the client left, the server closed the connection, or did so before the answer was whole."""
_ESTABLISHED = 1
"""The state of a connection, in Linux's `tcp_info`."""
_RECEIVE_BUFFER = 4096
"""Small, so that the server, not this machine's kernel, holds the unread bytes."""
_READ_AT_ONCE = 1 << 18
_KEPT_BYTES = 4096
"""Bytes of an answer that are kept, from its beginning."""


@dataclass(frozen=True)
class End:
    """The end of a connection: the status of the answer, or `HUNG_UP`, `CLOSED` or `CUT_OFF`.

    `answer` is the beginning of the answer.
    """

    how: str
    answer: bytes = b""

    @property
    def is_failure(self) -> bool:
        """Returns whether the server says that it failed. A full queue (503) is no failure."""
        return self.how in ("500", "502", "504")


Behaviour: TypeAlias = Callable[[], Awaitable[End]]
"""A bad client's act, which it repeats: opens a connection and returns its end."""


@dataclass(frozen=True)
class Caller:
    """A client of the server at `port`, with an API key."""

    port: int
    key: str

    def head(
        self, path: str, length: int = 0, *, method: str = "POST", host: str = "localhost", more: str = ""
    ) -> bytes:
        """Returns the head of a request. `more` is another header."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {self.key}", "Connection: close"]
        lines += [more] if more else []
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return "\r\n".join((*lines, "\r\n")).encode()

    def request(self, path: str, body: bytes, *, host: str = "localhost") -> bytes:
        return self.head(path, len(body), host=host) + body

    async def ask(self, request: bytes, *, patience_s: float | None = None) -> End:
        """Sends a request and reads its answer; hangs up after `patience_s`."""
        try:
            async with asyncio.timeout(patience_s) as limit:
                return await self._ask(request)
        except TimeoutError:
            # The kernel's own is the server's.
            return End(HUNG_UP if limit.expired() else CLOSED)

    async def _ask(self, request: bytes) -> End:
        loop = asyncio.get_running_loop()
        with _connection() as connection:
            await loop.sock_connect(connection, ("127.0.0.1", self.port))
            # The server may answer, and close, before it has read everything.
            sending = asyncio.ensure_future(loop.sock_sendall(connection, request))
            try:
                return await _end_of(connection)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)


@contextmanager
def _connection(receive_buffer: int | None = None) -> Iterator[socket.socket]:
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.setblocking(False)
        yield connection


async def _end_of(connection: socket.socket, read_bytes: int = _READ_AT_ONCE, every_s: float = 0.0) -> End:
    """Reads an answer until the connection is closed."""
    loop, start, tail, length = asyncio.get_running_loop(), b"", b"", 0
    try:
        while chunk := await loop.sock_recv(connection, read_bytes):
            start += chunk[: _KEPT_BYTES - len(start)]
            tail, length = (tail + chunk)[-8:], length + len(chunk)
            if every_s:
                await asyncio.sleep(every_s)
    except OSError:
        return End(_status_of(start, is_whole=False), start)
    return End(_status_of(start, is_whole=_is_whole(start, tail, length)), start)


def _is_whole(start: bytes, tail: bytes, length: int) -> bool:
    head, _, _ = start.partition(b"\r\n\r\n")
    for line in head.lower().splitlines():
        if line.startswith(b"content-length:"):
            return length >= len(head) + 4 + int(line.partition(b":")[2])
    return tail.endswith(b"0\r\n\r\n")


def _status_of(start: bytes, *, is_whole: bool) -> str:
    words = start.split(None, 2)
    if len(words) < 2:
        return CLOSED
    # Of an error, the status says enough.
    return words[1].decode() if is_whole or not words[1].startswith(b"2") else CUT_OFF


@dataclass(frozen=True)
class BadManners:
    """The kinds that misuse the connection.

    `stream` is a request with a streamed reply, `large` one with a large body.
    """

    caller: Caller
    stream: bytes
    large: bytes

    async def slow_reader(self) -> End:
        """Reads a kilobyte a second, which is slow and allowed."""
        return await self._reading(READ_BYTES, READ_EVERY_S)

    async def reader_of_bytes(self) -> End:
        """Reads one byte a second."""
        return await self._reading(1, SECOND_S)

    async def _reading(self, num_bytes: int, every_s: float) -> End:
        loop = asyncio.get_running_loop()
        with _connection(_RECEIVE_BUFFER) as connection:
            await loop.sock_connect(connection, ("127.0.0.1", self.caller.port))
            await loop.sock_sendall(connection, self.stream)
            return await _end_of(connection, num_bytes, every_s)

    async def stopped_reader(self) -> End:
        """Reads the beginning of a reply, and then nothing."""
        loop = asyncio.get_running_loop()
        with _connection(_RECEIVE_BUFFER) as connection:
            await loop.sock_connect(connection, ("127.0.0.1", self.caller.port))
            await loop.sock_sendall(connection, self.stream)
            await loop.sock_recv(connection, READ_BYTES)
            while _is_established(connection):
                await asyncio.sleep(SECOND_S)
        return End(CLOSED)

    async def slow_head(self) -> End:
        return await self._drip(b"", self.caller.head("/v1/chat/completions", 10))

    async def slow_body(self) -> End:
        return await self._drip(self.caller.head("/v1/chat/completions", 10_000), b" " * 10_000)

    async def _drip(self, at_once: bytes, slowly: bytes) -> End:
        loop = asyncio.get_running_loop()
        with _connection() as connection:
            await loop.sock_connect(connection, ("127.0.0.1", self.caller.port))
            await loop.sock_sendall(connection, at_once)
            answer = asyncio.ensure_future(_end_of(connection))
            try:
                for byte in slowly:
                    with suppress(OSError):
                        await loop.sock_sendall(connection, bytes([byte]))
                    done, _ = await asyncio.wait({answer}, timeout=SECOND_S)
                    if done:
                        break
                return await answer
            finally:
                answer.cancel()

    async def silent(self) -> End:
        return await self._wait(b"")

    async def half_a_head(self) -> End:
        return await self._wait(self.stream[:40])

    async def half_a_body(self) -> End:
        """Sends one half, waits for two seconds, and hangs up."""
        return await self.caller.ask(self.large[: len(self.large) // 2], patience_s=2)

    async def unfinished_bodies(self) -> End:
        """Begins 256 requests at once, more than a server has connections, and ends none. Returns the worst end."""
        asking = (self.caller.ask(self.large[:1000], patience_s=UNFINISHED_S) for _ in range(256))
        ends = await asyncio.gather(*asking)
        return max(ends, key=lambda end: end.how)

    async def open_and_close(self) -> End:
        """Opens and closes ten connections, one after the other."""
        for _ in range(10):
            with _connection() as connection:
                await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self.caller.port))
        return End(HUNG_UP)

    async def hang_up(self) -> End:
        """Hangs up in the middle of a stream."""
        return await self.caller.ask(self.stream, patience_s=1)

    async def _wait(self, sent: bytes) -> End:
        loop = asyncio.get_running_loop()
        with _connection() as connection:
            await loop.sock_connect(connection, ("127.0.0.1", self.caller.port))
            await loop.sock_sendall(connection, sent)
            async with asyncio.timeout(SILENT_S):
                return await _end_of(connection)


def _is_established(connection: socket.socket) -> bool:
    """Asks the kernel, because a client that does not read does not see the end of a connection."""
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED
