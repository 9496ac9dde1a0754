"""A server that answers each request with one recorded response, whose bytes arrive in chosen pieces."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from types import TracebackType
from typing import Self

import h11

WHOLE, EACH = 0, -1
"""Cuts: in one piece, and every byte alone. A positive cut is the length of the first of two pieces."""
_DEADLINE_S = 30.0
_POLL_S = 5e-5
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
_HOST = "127.0.0.1"
_READ_BYTES = 1 << 16
_SOCK_DIAG, _BY_FAMILY, _IS_REQUEST, _ERROR, _ALL = 4, 20, 1, 2, 0xFFFFFFFF
_HEAD, _REQUEST, _ENDS, _ANY = (struct.Struct(form) for form in ("=IHHII", "=BBBBI", "!HH16s16s", "=III"))
_UNREAD = struct.Struct("=I")
_UNREAD_AT = _HEAD.size + 4 + _ENDS.size + _ANY.size + 4
"""Behind the socket's state and name, and the time of its timer."""


def pieces(response: bytes, cut: int) -> Iterator[bytes]:
    """Yields the pieces of a response, none of which is empty."""
    if cut == EACH:
        yield from (response[at : at + 1] for at in range(len(response)))
    else:
        yield from filter(None, (response[:cut], response[cut:]))


class Replayer:
    """Answers the k-th request for `path` with `response` cut at `cuts[k]`, and further ones with all of it in one
    piece. There is nothing at other paths, of which some clients ask for facts of the model.

    A piece is sent when the client's program has read the one before, so that the client sees each cut. `served` is
    the number of requests for `path`.
    """

    def __init__(self, path: str, response: bytes, cuts: Sequence[int]) -> None:
        self.served = 0
        self._path, self._response, self._cuts = path, response, cuts
        self._lock = threading.Lock()
        self._connections: list[tuple[socket.socket, threading.Thread]] = []
        self._listener = socket.create_server((_HOST, 0), backlog=64)
        self.url = f"http://{_HOST}:{self._listener.getsockname()[1]}"
        self._accepting = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Self:
        self._accepting.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # `accept` returns when its socket is shut down; closing alone would leave it waiting.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join(_DEADLINE_S)
        self._listener.close()
        for connection, thread in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join(_DEADLINE_S)
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._connections = [pair for pair in self._connections if pair[1].is_alive()] + [(connection, thread)]
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        # A client may leave before the last bytes, which say nothing.
        with connection, suppress(OSError), closing(Socket(connection)) as client:
            while (path := _read_request(connection)) is not None:
                for number, piece in enumerate(self._answer(path)):
                    if number:
                        client.wait_until_read()
                    connection.sendall(piece)

    def _answer(self, path: str) -> Iterator[bytes]:
        if path != self._path:
            return pieces(_NOT_FOUND, WHOLE)
        with self._lock:
            cut = self._cuts[self.served] if self.served < len(self._cuts) else WHOLE
            self.served += 1
        return pieces(self._response, cut)


def _read_request(connection: socket.socket) -> str | None:
    """Reads one request to its end. Returns its path, or None if the client left before."""
    parser, path = h11.Connection(h11.SERVER), ""
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            data = connection.recv(_READ_BYTES)
            if not data:
                return None
            parser.receive_data(data)
        elif isinstance(event, h11.Request):
            path = event.target.decode().partition("?")[0]
        elif isinstance(event, h11.EndOfMessage):
            return path


class Socket:
    """The client's end of a connection within this machine. Linux says how much of it the client's program has not
    read."""

    def __init__(self, connection: socket.socket) -> None:
        self._asked = _asked(connection.getpeername(), connection.getsockname())
        self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG)

    def close(self) -> None:
        self._kernel.close()

    def wait_until_read(self) -> None:
        """Waits until the client's program has read all that was sent, or has closed its end. Raises `ConnectionError`
        if it does not read."""
        deadline = time.monotonic() + _DEADLINE_S
        while self._num_unread():
            if time.monotonic() > deadline:
                raise ConnectionError("the client does not read")
            time.sleep(_POLL_S)

    def _num_unread(self) -> int:
        """Returns the bytes that wait for the client's program; 0 if the client has no such socket any more."""
        self._kernel.send(self._asked)
        answer = self._kernel.recv(_READ_BYTES)
        _, kind, *_ = _HEAD.unpack_from(answer)
        return 0 if kind == _ERROR else int(_UNREAD.unpack_from(answer, _UNREAD_AT)[0])


def _asked(local: tuple[str, int], remote: tuple[str, int]) -> bytes:
    """Returns the question for the TCP socket between two addresses, as in `linux/inet_diag.h`."""
    addresses = (socket.inet_aton(local[0]), socket.inet_aton(remote[0]))
    body = _REQUEST.pack(socket.AF_INET, socket.IPPROTO_TCP, 0, 0, _ALL)
    body += _ENDS.pack(local[1], remote[1], *addresses) + _ANY.pack(0, _ALL, _ALL)
    return _HEAD.pack(_HEAD.size + len(body), _BY_FAMILY, _IS_REQUEST, 0, 0) + body
