"""How many connections may be open, and how long one may be open without a request."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from diskprefix.server import connection as limits
from tests.server.daemon_process import wait_until
from tests.server.scripted import AppServer, scripted_app

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def server(chat_model: Path) -> Iterator[AppServer]:
    with scripted_app(chat_model, max_connections=3) as running:
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


def test_connections_above_the_limit_get_a_503_that_says_so_and_others_are_served(server: AppServer) -> None:
    with ExitStack() as stack:
        # One that has sent nothing, one that has sent half of its headers, and one that is idle after a request.
        for data in (b"", GET, GET + b"\r\n"):
            last = stack.enter_context(connect(server, data))
        assert last.recv(15) == b"HTTP/1.1 200 OK"
        for _ in range(10):
            with connect(server) as refused:
                status, body = answer_of(refused)
            assert status == "HTTP/1.1 503 Service Unavailable"
            assert json.loads(body)["error"]["code"] == "too_many_connections"
            assert "--max-connections" in json.loads(body)["error"]["message"]
        last.sendall(GET + b"\r\n")
        received = b""
        while b"HTTP/1.1 200 OK" not in received:
            received += last.recv(65536)
    with server.client() as client:
        wait_until(lambda: client.get("/health").status_code == 200, "a connection is taken when others are closed")


def test_a_client_that_sends_before_it_reads_is_told_why_it_is_refused(server: AppServer) -> None:
    with ExitStack() as stack, server.client() as client:
        for _ in range(3):
            stack.enter_context(connect(server))
        answer = client.post("/v1/chat/completions", content=b"x" * 100_000)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "too_many_connections"


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
