"""A server in this process that answers as a daemon might, from lists."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

Reply = tuple[int, Any]
"""A status and a body."""


def models(*cards: dict[str, Any]) -> Reply:
    return 200, {"data": cards}


def health(status: str) -> Reply:
    return (200 if status == "ok" else 503), {"status": status, "message": "reading weights"}


class SmallDaemon:
    """Answers the route whose path ends with a name from the list of that name; the last reply of a list is given again
    and again. `asked` has the ends of the paths that it got, `bodies` and `keys` what came with them."""

    def __init__(self, replies: dict[str, Sequence[Reply]]) -> None:
        own: dict[str, list[Reply]] = {"health": [health("ok")], "props": [(404, {})], "count_tokens": [(404, {})]}
        self.replies = own | {name: list(listed) for name, listed in replies.items()}
        self.asked: list[str] = []
        self.bodies: list[Any] = []
        self.keys: list[str | None] = []
        self.url = ""
        self.listener: socket.socket

    def reply(self, path: str, body: bytes) -> Reply:
        self.asked.append(path.rsplit("/", 1)[-1])
        self.bodies.append(json.loads(body or b"{}"))
        listed = self.replies[urlsplit(path).path.rsplit("/", 1)[-1]]
        return listed.pop(0) if len(listed) > 1 else listed[0]


@contextmanager
def small_daemon(**replies: Sequence[Reply]) -> Iterator[SmallDaemon]:
    daemon = SmallDaemon(replies)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            daemon.keys.append(self.headers.get("Authorization"))
            status, body = daemon.reply(self.path, self.rfile.read(int(self.headers.get("content-length", 0))))
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_args: object) -> None:
            """Nobody reads it."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        daemon.listener = server.socket
        daemon.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield daemon
        finally:
            server.shutdown()
            thread.join()
