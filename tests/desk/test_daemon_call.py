"""What commands read from the address of a daemon, where another program may listen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any

import pytest

from diskprefix.desk.shared import daemon_call
from diskprefix.desk.shared.daemon_call import ConnectionBroken, running_daemon, streaming_daemon
from diskprefix.errors import NotReady

MOST_BYTES = 64 << 20


@contextmanager
def endless_server(status: int) -> Iterator[tuple[str, list[int]]]:
    """A program that sends one line without end to whoever asks: its address, and how much it has sent."""
    sent: list[int] = [0]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            with suppress(OSError):
                while sent[0] < MOST_BYTES:
                    self.wfile.write(b"x" * (1 << 16))
                    sent[0] += 1 << 16

        do_POST = do_GET

        def log_message(self, *_args: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", sent
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_without_an_end_is_one_error(status: int, is_stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_call, "_MAX_ANSWER_BYTES", 1 << 20)

    def ask(url: str) -> Any:
        if not is_stream:
            return running_daemon(url, "k")("GET", "/props", None)
        with streaming_daemon(url, "k")("/v1/chat/completions", {}) as events:
            return list(events)

    message = r"an answer has more than 1\.0 MiB; check the daemon's address"
    with endless_server(status) as (url, sent), pytest.raises(NotReady, match=message):
        ask(url)
    assert sent[0] < MOST_BYTES


class CutServer(BaseHTTPRequestHandler):
    """Ends the connection within an answer."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'data: {"number": 1}\n\n')

    def log_message(self, *_args: object) -> None:
        """Nobody reads it."""


def test_a_connection_that_breaks_within_an_answer_is_not_called_an_absent_daemon() -> None:
    events: list[Any] = []
    with HTTPServer(("127.0.0.1", 0), CutServer) as server:
        url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with pytest.raises(ConnectionBroken, match=rf"the connection to {url} broke before the answer ended"):
            running_daemon(url, "k")("POST", "/x", {})
        with (
            pytest.raises(ConnectionBroken, match=r"ended before the reply did|broke before the answer ended"),
            streaming_daemon(url, "k")("/v1/chat/completions", {}) as answer,
        ):
            events += answer
        server.shutdown()
    with pytest.raises(NotReady, match=f"no daemon answers at {url}") as absent:
        running_daemon(url, "k")("GET", "/health", None)
    assert not isinstance(absent.value, ConnectionBroken)


class StreamServer(CutServer):
    """Answers with one line of a stream."""

    line = b'data: {"number": 1}\n\n'

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.line)


@contextmanager
def stream_server(line: bytes = StreamServer.line) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), type("OneLine", (StreamServer,), {"line": line})) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def events_of(url: str, take: Callable[[Any], None]) -> None:
    with streaming_daemon(url, "k")("/v1/chat/completions", {}) as events:
        for event in events:
            take(event)


def test_an_error_of_the_callers_own_output_is_no_broken_connection() -> None:
    def take(event: Any) -> None:
        assert event == {"number": 1}
        raise BrokenPipeError

    with stream_server() as url, pytest.raises(BrokenPipeError):
        events_of(url, take)


@pytest.mark.parametrize("data", [b"{", b"\xff", b"[1]", b"7"])
def test_a_stream_without_json_objects_comes_from_another_program(data: bytes) -> None:
    with stream_server(b"data: " + data + b"\n") as url, pytest.raises(NotReady, match="is no diskprefix daemon"):
        events_of(url, print)
