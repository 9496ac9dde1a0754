"""One client's connection and its limits: how many may be open, and how long one may be open without a request."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from diskprefix.daemon.server.process.peer_user import is_client_open
from diskprefix.daemon.server.process.places import Places
from diskprefix.daemon.server.share import Share

log = logging.getLogger("diskprefix")

HEADERS_S = 30.0
"""Seconds for the head of a request to arrive, from the connection or from the first byte after another request."""
_LINGER_S = 10.0
_CLIENT_CHECK_S = 1.0
"""Seconds between two looks whether a client that sends nothing more still has its socket."""
OTHER_CONNECTIONS = 448
"""The most connections without a request in flight. They are idle, or show pages and figures."""


class LimitedConnection(H11Protocol):
    """uvicorn's connection. One without a request is closed after a while.

    A connection above the limit replaces one that is in no request. Without such a connection, it is closed.

    A client that ends its sending side usually has gone. It gets its answer if the kernel says that it still has its
    socket, which is known of clients on this machine.
    """

    def __init__(
        self,
        places: Places,
        user_of: Callable[[socket.socket], int | None] | None,
        *,
        is_behind_router: bool,
        **options: Any,
    ) -> None:
        """`user_of` returns the user of an accepted connection, None for an unknown user. It is None where users do not
        matter."""
        super().__init__(**options)
        self._user_of, self._is_behind_router = user_of, is_behind_router
        self.conn = _StrictParser(h11.SERVER)
        self._places = places
        self._headers_timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        """The client sends nothing more, and waits for its answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = transport.get_extra_info("peername")
        # Nothing has been read yet: asyncio reads after this call.
        user = self._user_of(transport.get_extra_info("socket")) if self._user_of else None
        share = Share.of_connection(peer[0] if isinstance(peer, tuple) else None, user)
        self.app_state = {**self.app_state, "share": share, "is_behind_router": self._is_behind_router}
        if not self._places.take(self, share):
            log.warning("[server] a connection is refused: %d are open", self._places.num)
            self.transport = transport
            transport.abort()
            return
        super().connection_made(_Lingering(transport, self.loop, self._has_unread))  # type: ignore[arg-type]
        self._start_headers_timer()

    def data_received(self, data: bytes) -> None:
        if self.transport.lingers:  # type: ignore[attr-defined]
            return
        if not self._is_in_request:
            self._start_headers_timer()
        super().data_received(data)
        if self._is_in_request:
            self._stop_headers_timer()
            self._places.begin_request(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # The next request has begun already if the client has sent it.
        if not self._is_in_request:
            self._places.end_request(self)
            if self._is_half_closed:
                self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Returns whether the connection stays open although the client sends nothing more."""
        if not self._is_in_request or self.cycle.more_body or not self._is_client_open():
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self.loop.call_later(_CLIENT_CHECK_S, self._check_client)
        return True

    def _check_client(self) -> None:
        """Ends the connection if the client has closed its socket since: nothing arrives that would tell."""
        if self.transport.is_closing():
            return
        if self._is_client_open():
            self.loop.call_later(_CLIENT_CHECK_S, self._check_client)
        else:
            self.transport.abort()

    def _is_client_open(self) -> bool:
        return is_client_open(self.transport.get_extra_info("socket"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._places.release(self)
        self._stop_headers_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The daemon stops: closes the connection, or has it closed after the answer.

        Does not wait for bodies that are still arriving: clients could keep the daemon from ending.
        """
        self.transport.lingers = True  # type: ignore[attr-defined]
        super().shutdown()
        if self._is_in_request and self.cycle.more_body:
            self.transport.close()

    @property
    def _is_in_request(self) -> bool:
        """Returns whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _has_unread(self) -> bool:
        return self.cycle is not None and self.cycle.response_complete and self.cycle.more_body

    @property
    def has_unsent(self) -> bool:
        return self.transport.get_write_buffer_size() > 0

    def give_up(self) -> None:
        self.transport.give_up()  # type: ignore[attr-defined]

    def _start_headers_timer(self) -> None:
        if self._headers_timer is None:
            self._places.begin_head(self)
            self._headers_timer = self.loop.call_later(HEADERS_S, self.transport.close)

    def _stop_headers_timer(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None


class _StrictParser(h11.Connection):
    """A parser that refuses requests whose end a proxy may see elsewhere (request smuggling).

    If a request has `Content-Length` and `Transfer-Encoding`, RFC 9112 (6.1, 6.3) lets the server use the second one,
    or refuse the request. HTTP/1.0 has no `Transfer-Encoding`.
    """

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version < b"1.1"):
                raise h11.RemoteProtocolError("Content-Length or HTTP/1.0 with Transfer-Encoding")
        return event


class _Lingering:
    """A transport that lets a client read the response although the request's body was not read to the end.

    Closing a socket with unread bytes resets the connection, and many clients then never see the response. So `close`
    ends only the sending side, and discards what arrives until the client closes, for at most `_LINGER_S`.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, has_unread: Callable[[], bool]):
        self._transport, self._loop, self._has_unread = transport, loop, has_unread
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if self.lingers or not self._has_unread():
            self._transport.close()
            return
        self.lingers = True
        self._transport.write_eof()
        self._loop.call_later(_LINGER_S, self._transport.close)

    def give_up(self) -> None:
        self._transport.close()
