"""One client's connection and its limits: how many may be open, and how long one may be open without a request."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger("diskprefix")

HEADERS_S = 30.0
"""The time for the head of a request, from the connection or from the first byte after another request."""
OTHER_CONNECTIONS = 448
"""Connections beside those of the requests in flight. They are idle, or show pages and figures."""


class LimitedConnection(H11Protocol):
    """uvicorn's connection. One without a request is closed after a while.

    One above the limit takes the place of the one that has been idle for longest, and is closed if none is idle.
    """

    def __init__(self, max_connections: int, **options: Any) -> None:
        super().__init__(**options)
        self._max_connections = max_connections
        self._headers_timer: asyncio.TimerHandle | None = None
        self._idle_since = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._max_connections and not self._close_longest_idle():
            log.warning("[server] a connection is refused: %d are open", len(self.connections))
            self.transport = transport
            transport.abort()
            return
        super().connection_made(_Gathered(transport, self.loop))  # type: ignore[arg-type]
        self._start_headers_timer()

    def data_received(self, data: bytes) -> None:
        if not self._is_in_request:
            self._start_headers_timer()
        super().data_received(data)
        if self._is_in_request:
            self._stop_headers_timer()

    def on_response_complete(self) -> None:
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_headers_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The daemon stops: closes the connection, or has it closed after the answer.

        A body that is still arriving is not waited for. Its client could keep the daemon from ending.
        """
        super().shutdown()
        if self._is_in_request and self.cycle.more_body:
            self.transport.close()

    @property
    def _is_in_request(self) -> bool:
        """Returns whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_idle(self) -> bool:
        """Returns whether the connection can be closed at once without loss."""
        return (
            not self._is_in_request and not self.transport.is_closing() and self.transport.get_write_buffer_size() == 0
        )

    def _close_longest_idle(self) -> bool:
        """Returns False if no connection is idle."""
        idle = [other for other in self.connections if isinstance(other, LimitedConnection) and other._is_idle]
        if idle:
            min(idle, key=lambda other: other._idle_since).transport.close()
        return bool(idle)

    def _start_headers_timer(self) -> None:
        if self._headers_timer is None:
            self._headers_timer = self.loop.call_later(HEADERS_S, self.transport.close)

    def _stop_headers_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None


class _Gathered:
    """A transport that sends what is written in one turn of the loop at once: uvicorn writes the head of a response,
    its body and its end one by one."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._pieces: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() + sum(map(len, self._pieces))

    def _flush(self) -> None:
        if self._pieces:
            self._transport.write(b"".join(self._pieces))
            self._pieces.clear()
