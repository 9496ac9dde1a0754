"""A client that ends its sending side before the answer gets the answer, and one that closes its socket has gone."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from diskprefix.daemon.server import streaming
from tests.daemon.server.daemon_process import DaemonProcess, open_raw, running_as, wait_until
from tests.daemon.server.scripted import ScriptedEngine, scripted_app, until_cancelled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")

BODY = {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 4, "temperature": 0}


def half_closed(url: str, body: dict[str, object]) -> socket.socket:
    connection = open_raw(int(url.rpartition(":")[2]), body)
    connection.shutdown(socket.SHUT_WR)
    return connection


def answer_of(connection: socket.socket) -> tuple[bytes, bytes]:
    """The head and the body of an answer, after which the server closes the connection."""
    with connection:
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_sending_side_gets_its_answer(daemon: DaemonProcess, stream: bool) -> None:
    head, body = answer_of(half_closed(daemon.url, BODY | {"stream": stream}))
    assert head.startswith(b"HTTP/1.1 200 ")
    if stream:
        assert b"data: [DONE]" in body
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_it_gets_its_answer_behind_a_router_too(chat_model: Path, tmp_path: Path) -> None:
    with running_as("behind a router", chat_model, tmp_path / "kv") as daemon:
        head, body = answer_of(half_closed(daemon.url, BODY))
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_of_one_that_closes_its_socket_after_that_is_cancelled(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    # Nothing is written, which would also tell that the client has gone.
    monkeypatch.setattr(streaming, "KEEPALIVE_S", 3600.0)
    engine = ScriptedEngine(until_cancelled)
    with scripted_app(chat_model, engine) as server:
        with half_closed(server.url, BODY | {"stream": stream}):
            assert engine.entered.wait(30)
            [connection] = server.connections
            wait_until(lambda: connection._is_half_closed, "the server knows that nothing more is sent")
            assert not engine.cancelled.is_set()
        assert engine.cancelled.wait(30)
