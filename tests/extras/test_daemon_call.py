"""What commands read from the address of a daemon, where another program may listen."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from diskprefix.errors import NotReady
from diskprefix.extras import daemon_call
from diskprefix.extras.daemon_call import running_daemon, streaming_daemon

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
