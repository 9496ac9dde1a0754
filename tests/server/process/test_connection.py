"""A client that ends its sending side before the answer gets the answer, and one that closes its socket has gone."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from tests.server.daemon_process import DaemonProcess, open_raw, props, running_as, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")

BODY = {"messages": [{"role": "user", "content": "Name three rivers."}], "max_tokens": 4, "temperature": 0}
LONG = BODY | {"max_tokens": 1900, "logit_bias": {"2": -100}, "temperature": 1, "n": 8}
"""Takes several seconds: without repetitions, no token is drafted."""


def half_closed(daemon: DaemonProcess, body: dict[str, object]) -> socket.socket:
    connection = open_raw(int(daemon.url.rpartition(":")[2]), body)
    connection.shutdown(socket.SHUT_WR)
    return connection


def answer_of(connection: socket.socket) -> tuple[bytes, bytes]:
    """The head and the body of an answer, after which the server closes the connection."""
    with connection:
        head, _, body = b"".join(iter(lambda: connection.recv(65536), b"")).partition(b"\r\n\r\n")
    return head, body


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_ends_its_sending_side_gets_its_answer(daemon: DaemonProcess, stream: bool) -> None:
    head, body = answer_of(half_closed(daemon, BODY | {"stream": stream}))
    assert head.startswith(b"HTTP/1.1 200 ")
    if stream:
        assert b"data: [DONE]" in body
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_it_gets_its_answer_behind_a_router_too(chat_model: Path, tmp_path: Path) -> None:
    with running_as("behind a router", chat_model, tmp_path / "kv") as daemon:
        head, body = answer_of(half_closed(daemon, BODY))
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_of_one_that_closes_its_socket_after_that_is_cancelled(daemon: DaemonProcess, stream: bool) -> None:
    num_cancelled = sum("cancelled" in line for line in daemon.lines)
    with daemon.client() as client:
        connection = half_closed(daemon, LONG | {"stream": stream})
        wait_until(lambda: props(client)["running"], "the request runs")
        connection.close()
        wait_until(lambda: not props(client)["running"], "it was ended")
    wait_until(lambda: sum("cancelled" in line for line in daemon.lines) == num_cancelled + 1, "it was cancelled")
