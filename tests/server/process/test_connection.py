"""The number of open connections is bounded, and so is the time of one without a request."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from diskprefix.engine.request import FinishEvent, GenerateRequest, TextEvent
from diskprefix.server.limits import InFlight
from diskprefix.server.process import connection as limits
from diskprefix.settings import Settings
from tests.server.daemon_process import wait_until
from tests.server.scripted import AppServer, Emit, ScriptedEngine, done, scripted_app

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def server(chat_model: Path, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppServer]:
    monkeypatch.setattr(limits, "OTHER_CONNECTIONS", 3 - InFlight(Settings(max_sequences=1)).most)
    with scripted_app(chat_model, engine) as running:
        yield running


def connect(server: AppServer, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(data)
    return connection


def answer_of(connection: socket.socket) -> tuple[str, str]:
    """The status line and the body of a response after which the server closes the connection."""
    received = b""
    while data := connection.recv(65536):
        received += data
    head, _, body = received.decode().partition("\r\n\r\n")
    return head.split("\r\n")[0], body


def connect_busy(server: AppServer) -> socket.socket:
    """A connection with a request whose body the server waits for."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = connect(server, head + b"Content-Length: 10\r\nExpect: 100-continue\r\n\r\n")
    assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    return connection


def connect_used(server: AppServer) -> socket.socket:
    """A connection that is idle after a request."""
    connection = connect(server, GET + b"\r\n")
    received = b""
    while not received.endswith(b"}"):
        part = connection.recv(65536)
        assert part, "the connection is closed"
        received += part
    assert received.startswith(b"HTTP/1.1 200 OK")
    return connection


def is_open(connection: socket.socket) -> bool:
    """Says whether a request is served on an idle connection."""
    connection.sendall(GET + b"\r\n")
    try:
        return connection.recv(15) == b"HTTP/1.1 200 OK"
    except ConnectionResetError:
        return False


def is_refused(server: AppServer) -> bool:
    """Says whether a new connection is closed without an answer."""
    try:
        with connect(server, GET + b"\r\n") as refused:
            return refused.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("first", [b"", GET], ids=["nothing sent", "half a head sent"])
def test_at_the_limit_the_connection_that_is_idle_longest_is_closed_for_a_new_one(
    server: AppServer, first: bytes
) -> None:
    with ExitStack() as stack:
        longest = stack.enter_context(connect(server, first))
        others = [stack.enter_context(connect_used(server)) for _ in range(2)]
        new = stack.enter_context(connect_used(server))
        assert longest.recv(1) == b""
        assert all(map(is_open, [*others, new]))


def test_a_connection_is_idle_from_the_end_of_its_last_request(server: AppServer) -> None:
    with ExitStack() as stack:
        oldest, second, third = (stack.enter_context(connect_used(server)) for _ in range(3))
        assert is_open(oldest)
        stack.enter_context(connect_used(server))
        assert second.recv(1) == b""
        assert is_open(third)


def test_a_connection_with_a_request_is_not_closed_for_a_new_one(server: AppServer) -> None:
    with ExitStack() as stack:
        busy = [stack.enter_context(connect_busy(server)) for _ in range(2)]
        for _ in range(5):
            stack.enter_context(connect_used(server))
        for connection in busy:
            connection.sendall(b"0123456789")
            assert connection.recv(24) == b"HTTP/1.1 400 Bad Request"


def test_a_connection_whose_client_has_not_taken_the_whole_response_is_not_idle(
    server: AppServer, engine: ScriptedEngine
) -> None:
    def talk(_request: GenerateRequest, emit: Emit, _is_cancelled: Callable[[], bool]) -> None:
        emit(TextEvent(0, "x" * 1_000_000, (1,)))
        emit(FinishEvent(0, "stop"))
        emit(done())

    engine.script = talk
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = b'{"messages": [{"role": "user", "content": "hello"}]}'
    with ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.socket())
            connection.settimeout(30)
            # Small buffers in the kernel: it soon takes no more.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            received = b""
            while b"xxx" not in received:
                received += connection.recv(1024)
        assert is_refused(server)


def test_if_all_connections_are_in_requests_a_new_one_is_closed(server: AppServer) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect_busy(server))
        for _ in range(10):
            assert is_refused(server)
    with server.client() as client:
        wait_until(lambda: client.get("/health").status_code == 200, "a connection is taken when others are closed")


@pytest.mark.parametrize("sent", [b"", b"GET", GET])
def test_a_connection_without_a_whole_head_is_closed(
    server: AppServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEADERS_S", 0.2)
    with connect(server, sent) as connection:
        assert connection.recv(1) == b""


def test_a_head_that_arrives_byte_by_byte_is_cut_off_on_a_used_connection_too(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(server, GET + b"\r\n") as connection:
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        monkeypatch.setattr(limits, "HEADERS_S", 0.2)

        def is_closed() -> bool:
            try:
                connection.sendall(b"G")
            except OSError:
                return True
            return False

        wait_until(is_closed, "the connection is closed")


def test_a_head_that_never_ends_is_refused(server: AppServer) -> None:
    with connect(server, GET + b"X: " + b"x" * 100_000) as connection:
        assert answer_of(connection)[0] == "HTTP/1.1 400 Bad Request"
