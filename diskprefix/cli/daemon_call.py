"""Sends requests to a running daemon, or to the same application in this process."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlsplit

from diskprefix import app
from diskprefix.errors import NotReady, SettingsError
from diskprefix.printable import shown
from diskprefix.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

Say = Callable[[str], None]
"""Takes a line that says what the command waits for."""

_CONNECT_S = 10.0
_POLL_S = 0.1
_INTERRUPTED_EXIT_CODE = 130


@dataclass(frozen=True)
class Answer:
    """An HTTP response. `content` should be JSON."""

    status: int
    content: bytes

    @property
    def body(self) -> Any:
        """The parsed JSON, or None if it is no JSON."""
        with suppress(ValueError):
            return json.loads(self.content)
        return None

    @property
    def message(self) -> str:
        """The message of an error, on one line."""
        body = self.body
        error = body.get("error") if isinstance(body, dict) else None
        text = error.get("message") if isinstance(error, dict) else None
        return shown(text, 1000) if isinstance(text, str) else f"HTTP status {self.status}"


Call: TypeAlias = Callable[[str, str, object], Answer]
"""Sends a request with a method, a path and a JSON body (None for none). Raises `NotReady` if there is no answer."""


def running_daemon(url: str, api_key: str | None, otherwise: str = "") -> Call:
    """Returns a function that calls the daemon at `url`. Raises `SettingsError` for an invalid URL or key.

    `otherwise` is added to the message of `NotReady`, which the function raises if nothing answers.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
        raise SettingsError(f"--url: {url!r} is not a URL such as http://127.0.0.1:8642")
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        if not (api_key.isascii() and api_key.isprintable()):
            raise SettingsError("--api-key: a key has printable ASCII characters only")
        headers["Authorization"] = f"Bearer {api_key}"
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    # OpenAI's clients take the address with /v1 at its end, so people may give it here too.
    prefix = parts.path.rstrip("/").removesuffix("/v1")

    def call(method: str, path: str, body: object) -> Answer:
        data = None if body is None else json.dumps(body)
        try:
            with closing(kind(parts.hostname or "", port, timeout=_CONNECT_S)) as connection:
                connection.connect()
                # The time limit is for connecting only: an answer takes as long as the prompt.
                connection.sock.settimeout(None)
                connection.request(method, prefix + path, data, headers)
                response = connection.getresponse()
                return Answer(response.status, response.read())
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NotReady(
                f"no daemon answers at {url} ({shown(reason)}); start one with `diskprefix serve`, or give its "
                f"address with --url{otherwise}"
            ) from error

    return call


def wait_ready(call: Call, url: str, say: Say) -> None:
    """Returns when the daemon at `url` serves requests. Raises `NotReady` if it never will."""
    while True:
        body = call("GET", "/health", None).body
        status = body.get("status") if isinstance(body, dict) else None
        if status in ("ok", "degraded"):
            return
        if status in ("stopping", "failed"):
            raise NotReady(f"the daemon at {url} serves no requests: its status is {status}")
        if status != "loading":
            raise NotReady(f"what answers at {url} is no diskprefix daemon; give the address of one with --url")
        say(f"the daemon is loading its model: {shown(str(body.get('message') or '…'))}")
        time.sleep(_POLL_S)


@contextmanager
def in_this_process(settings: Settings, say: Say) -> Iterator[Call]:
    """Loads the application that `diskprefix serve` runs, and yields a function that calls it without a socket.

    At the end everything is written. Raises the error that prevented the load of the model.
    """
    application = app.create_application(settings)
    daemon = application.state.daemon
    lifespan = application.router.lifespan_context(application)

    async def loaded() -> None:
        while daemon.status == "loading":
            say(daemon.doing)
            await asyncio.sleep(_POLL_S)

    with asyncio.Runner() as runner:
        runner.run(lifespan.__aenter__())
        try:
            runner.run(loaded())
            if daemon.failure is not None:
                raise daemon.failure
            yield lambda method, path, body: runner.run(_answered(application, method, path, body))
        finally:
            runner.run(lifespan.__aexit__(None, None, None))
            if daemon.is_loading:
                # Loading was interrupted. Its thread cannot be stopped, and Python would wait for it at exit.
                sys.stderr.write("error: interrupted\n")
                sys.stderr.flush()
                os._exit(_INTERRUPTED_EXIT_CODE)


async def _answered(application: FastAPI, method: str, path: str, body: object) -> Answer:
    """Returns the answer to one request, sent as an ASGI server sends it."""
    received: asyncio.Queue[Any] = asyncio.Queue()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    received.put_nowait({"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()})
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "scheme": "http", "method": method, "headers": headers}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b""}
    # After the body the application waits for the client to disconnect, which this one never does.
    await application(scope, received.get, sent.put)
    start, *rest = [sent.get_nowait() for _ in range(sent.qsize())]
    return Answer(start["status"], b"".join(message.get("body", b"") for message in rest))
