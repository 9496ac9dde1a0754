"""Where `diskprefix warm` sends its requests: to a running daemon, or to the same application in this process.

In both cases the requests are like those of any client, so a later request restores what they saved.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, closing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from diskprefix import app
from diskprefix.errors import DiskPrefixError, NotReady, SettingsError
from diskprefix.printable import shown
from diskprefix.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from diskprefix.server.daemon import Daemon

T = TypeVar("T")
Say = Callable[[str], None]
"""Takes a line that says what is waited for."""

_CONNECT_S = 10.0
_POLL_S = 0.1
_INTERRUPTED_EXIT_CODE = 130


@dataclass(frozen=True)
class Answer:
    """An HTTP response. `body` is the parsed JSON, or None if it is no JSON."""

    status: int
    body: Any
    headers: Mapping[str, str] = field(default_factory=dict)
    """The names are in lower case."""

    @property
    def message(self) -> str:
        """The message of an error, on one line."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        text = error.get("message") if isinstance(error, dict) else None
        return shown(text, 1000) if isinstance(text, str) else f"HTTP status {self.status}"


class Target(Protocol):
    """Something that answers requests as the daemon does."""

    def call(self, method: str, path: str, body: object = None) -> Answer:
        """Send one request. Raises `NotReady` if there is no answer at all."""
        ...

    def wait_ready(self, say: Say) -> None:
        """Return when requests are served. Raises `DiskPrefixError` if they will never be."""
        ...

    def close(self) -> None:
        """Release everything. No request may follow."""
        ...


class OverHttp:
    """A running daemon."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """Raises `SettingsError` for a URL without a server, and for a key that a header cannot hold."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise SettingsError(f"--url: {url!r} is not a URL such as http://127.0.0.1:8642", param="--url")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise SettingsError("--api-key: a key has printable ASCII characters only", param="--api-key")
        self.url = url
        self._is_https = parts.scheme == "https"
        self._host, self._port = parts.hostname, port
        # OpenAI's clients take the address with /v1 at its end, so people may give it here too.
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def call(self, method: str, path: str, body: object = None) -> Answer:
        data = None if body is None else json.dumps(body).encode()
        try:
            with closing(self._connected()) as connection:
                connection.request(method, self._prefix + path, data, self._headers)
                response = connection.getresponse()
                content = response.read()
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NotReady(
                f"no daemon answers at {self.url} ({shown(reason)}); start one with `diskprefix serve`, give its "
                "address with --url, or load the model here with --alone"
            ) from error
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, _json_or_none(content), headers)

    def _connected(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=_CONNECT_S)
        connection.connect()
        # The time limit is for connecting only: an answer takes as long as the prompt.
        connection.sock.settimeout(None)
        return connection

    def wait_ready(self, say: Say) -> None:
        while True:
            body = self.call("GET", "/health").body
            status = body.get("status") if isinstance(body, dict) else None
            if status in ("ok", "degraded"):
                return
            if status not in ("loading", "stopping", "failed"):
                raise NotReady(
                    f"what answers at {self.url} is no diskprefix daemon; give the address of one with --url"
                )
            if status != "loading":
                raise NotReady(f"the daemon at {self.url} serves no requests: its status is {status}")
            say(f"the daemon is loading its model: {shown(str(body.get('message') or '…'))}")
            time.sleep(_POLL_S)

    def close(self) -> None:
        pass


class InProcess:
    """The application that `diskprefix serve` runs, in this process. There is no socket, so nobody else reaches it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._runner = asyncio.Runner()
        self._app: FastAPI | None = None
        self._lifespan: AbstractAsyncContextManager[object] | None = None

    @property
    def _daemon(self) -> Daemon:
        assert self._app is not None
        daemon: Daemon = self._app.state.daemon
        return daemon

    def wait_ready(self, say: Say) -> None:
        # The imports below take seconds.
        say("starting")
        self._app = app.create_application(self._settings)
        self._lifespan = self._app.router.lifespan_context(self._app)
        self._runner.run(self._lifespan.__aenter__())
        self._runner.run(self._until_loaded(say))
        failure = self._daemon.failure
        if isinstance(failure, DiskPrefixError):
            raise failure
        if failure is not None:
            raise DiskPrefixError(f"loading failed unexpectedly: {failure}") from failure

    async def _until_loaded(self, say: Say) -> None:
        while self._daemon.status == "loading":
            say(self._daemon.doing)
            await asyncio.sleep(_POLL_S)

    def call(self, method: str, path: str, body: object = None) -> Answer:
        data = b"" if body is None else json.dumps(body).encode()
        return self._runner.run(self._ask(method, path, data))

    async def _ask(self, method: str, path: str, data: bytes) -> Answer:
        assert self._app is not None
        sent = asyncio.Event()
        started: dict[str, Any] = {}
        content = bytearray()

        async def receive() -> dict[str, Any]:
            if not sent.is_set():
                sent.set()
                return {"type": "http.request", "body": data, "more_body": False}
            # Here the application waits for the client to disconnect, which this one never does.
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                started.update(message)
            content.extend(message.get("body", b""))

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": None,
            "server": ("localhost", 0),
            "state": {},
        }
        await self._app(scope, receive, send)
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in started["headers"]}
        return Answer(started["status"], _json_or_none(bytes(content)), headers)

    def close(self) -> None:
        """Write what is pending, and stop."""
        if self._lifespan is not None:
            self._runner.run(self._lifespan.__aexit__(None, None, None))
            if self._daemon.is_loading:
                # Loading was interrupted. Its thread cannot be stopped, and Python would wait for it at exit.
                sys.stderr.write("error: interrupted\n")
                sys.stderr.flush()
                os._exit(_INTERRUPTED_EXIT_CODE)
        self._runner.close()


def _json_or_none(content: bytes) -> Any:
    with suppress(ValueError):
        return json.loads(content)
    return None
