"""A proxy between an agent and the daemon: it measures and records, and has the daemon killed at chosen moments.

It is also the agent's proxy for all other addresses, and refuses them.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tools.real_agents.replies import Reply

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host", "proxy-connection"}
_PIECE_BYTES = 65_536
_OWNERS_PAGES = ("/props", "/dashboard/")


@dataclass(eq=False)
class Exchange:
    """One request and its reply. Times are in seconds from when the daemon was sent the request."""

    method: str
    path: str
    body: bytes
    is_turn: bool
    is_repeated: bool
    status: int = 0
    first_byte_s: float | None = None
    first_token_s: float | None = None
    total_s: float = 0.0
    is_cut_off: bool = False
    """The agent hung up, or the daemon did."""
    met_kill: bool = False
    """The daemon was killed meanwhile."""
    reply: Reply = field(default_factory=Reply)
    refusal: str = ""

    @property
    def refused_for(self) -> str | None:
        """The reason why the daemon refused it, None if it did not."""
        # A launch asks for its owner's pages, and does without: in a scratch home it does not own the daemon, and the
        # model may not be loaded.
        is_owners = self.status in (401, 503) and self.path.startswith(_OWNERS_PAGES)
        if is_owners or (self.status < 400 and not self.reply.errors):
            return None
        said = self.refusal or "; ".join(self.reply.errors)
        return f"{self.method} {self.path} {self.status} {said[:300]}"


class Tap:
    """Serves on a free port. `between_turns` is called before each turn but the first, while no request runs.

    `on_piece` is called when a piece of a reply was passed on, on the thread of the request.
    """

    def __init__(
        self, port: int, is_turn: Callable[[Any], bool], between_turns: Callable[[], object] = lambda: None
    ) -> None:
        """`port` is the daemon's; `is_turn` tells whether a parsed body is a turn of the task."""
        self.exchanges: list[Exchange] = []
        self.refused_hosts: list[str] = []
        self.on_piece: Callable[[Exchange], object] = lambda _exchange: None
        self._daemon_port = port
        self._is_turn = is_turn
        self._between_turns = between_turns
        self._idle = threading.Condition()
        self._running, self._is_held = list[Exchange](), False
        self._seen: set[bytes] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @property
    def turns(self) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if exchange.is_turn]

    def __enter__(self) -> Tap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def begin(self, method: str, path: str, body: bytes) -> Exchange:
        """Records a request. Before a turn after the first one it calls `between_turns`, once nothing else runs."""
        try:
            parsed = json.loads(body)
        except ValueError:
            parsed = None
        with self._idle:
            self._idle.wait_for(lambda: not self._is_held)
            is_turn = parsed is not None and self._is_turn(parsed)
            digest = hashlib.sha256(path.encode() + body).digest()
            exchange = Exchange(method, path, body, is_turn, bool(body) and digest in self._seen)
            self._seen.add(digest)
            if is_turn and self.turns:
                self._idle.wait_for(lambda: not self._running)
                self._between_turns()
            self.exchanges.append(exchange)
            self._running.append(exchange)
        return exchange

    def end(self, exchange: Exchange) -> None:
        with self._idle:
            self._running.remove(exchange)
            self._idle.notify_all()

    def hold(self, is_held: bool) -> None:
        """Lets new requests wait, as a socket of systemd does while a daemon starts, or no longer."""
        with self._idle:
            self._is_held = is_held
            self._idle.notify_all()

    @property
    def running(self) -> list[Exchange]:
        with self._idle:
            return list(self._running)

    def wait_until_idle(self) -> None:
        """Waits until no request runs, also not the end of one."""
        with self._idle:
            self._idle.wait_for(lambda: not self._running)

    def keep(self, folder: Path, prefix: str) -> None:
        """Writes the bodies of all requests, and the reasons of refusals, into files that begin with `prefix`."""
        for number, exchange in enumerate(self.exchanges, start=1):
            name = f"{prefix}-{number:03}-{exchange.method}{exchange.path.partition('?')[0].replace('/', '-')}"
            (folder / f"{name}.json").write_bytes(exchange.body)
            if exchange.refusal:
                (folder / f"{name}.refusal.txt").write_text(exchange.refusal, encoding="utf-8")

    @contextmanager
    def daemon(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection("127.0.0.1", self._daemon_port)
        try:
            yield connection
        finally:
            connection.close()


def _handler_of(tap: Tap) -> type[BaseHTTPRequestHandler]:
    return type("Forwarding", (_Forwarding,), {"tap": tap})


class _Forwarding(BaseHTTPRequestHandler):
    """Forwards the requests of one connection to the daemon, and records them in `tap`."""

    tap: Tap
    protocol_version = "HTTP/1.1"

    def _forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        # A request to a proxy has the whole address.
        if self.path.startswith("http://"):
            host, slash, rest = self.path.removeprefix("http://").partition("/")
            if host != self.tap.host:
                self._refuse(host)
                return
            self.path = slash + rest
        exchange = self.tap.begin(self.command, self.path, body)
        started = time.perf_counter()
        try:
            self._exchange(exchange, started)
        except (OSError, http.client.HTTPException):
            exchange.is_cut_off = True
        finally:
            exchange.total_s = time.perf_counter() - started
            exchange.reply.finish()
            self.tap.end(exchange)

    def _exchange(self, exchange: Exchange, started: float) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        # The reply is read here, so it must not be compressed.
        headers["Accept-Encoding"] = "identity"
        self.close_connection = True
        with self.tap.daemon() as daemon:
            daemon.request(exchange.method, exchange.path, exchange.body, headers)
            response = daemon.getresponse()
            exchange.status = response.status
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in _HOP_BY_HOP | {"date", "server"}:
                    self.send_header(name, value)
            # The agent must see that a reply was cut off: that its length is another, or its last chunk is missing.
            length = response.getheader("Content-Length")
            is_chunked = length is None and bool(response.getheader("Transfer-Encoding"))
            if is_chunked:
                self.send_header("Transfer-Encoding", "chunked")
            elif length is not None:
                self.send_header("Content-Length", length)
            self.send_header("Connection", "close")
            self.end_headers()
            while piece := response.read1(_PIECE_BYTES):
                self._note(exchange, piece, time.perf_counter() - started)
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece)
                self.tap.on_piece(exchange)
            if is_chunked:
                self.wfile.write(b"0\r\n\r\n")

    def _note(self, exchange: Exchange, piece: bytes, elapsed_s: float) -> None:
        if exchange.status >= 400:
            exchange.refusal += piece.decode("utf-8", "replace")
        if exchange.first_byte_s is None:
            exchange.first_byte_s = elapsed_s
        exchange.reply.feed(piece)
        if exchange.first_token_s is None and exchange.reply.has_token:
            exchange.first_token_s = elapsed_s

    def _refuse(self, host: str) -> None:
        self.tap.refused_hosts.append(host)
        self.close_connection = True
        self.send_error(403, "agents reach nothing but the daemon")

    def do_CONNECT(self) -> None:
        if self.path != self.tap.host:
            self._refuse(self.path)
            return
        # Some agents ask the proxy for this address too: the next request on the connection is for the daemon.
        self.close_connection = False
        self.send_response_only(200)
        self.end_headers()

    do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = do_OPTIONS = _forward

    def log_message(self, format: str, *args: Any) -> None:
        """The exchanges are the log."""
