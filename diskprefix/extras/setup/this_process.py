"""Sends requests to the daemon's application in this process, without a socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from diskprefix.app import load_engine
from diskprefix.errors import LoadInterrupted
from diskprefix.extras.daemon_call import Answer, Call, Say
from diskprefix.server.keys import OwnerToken
from diskprefix.settings import Settings
from diskprefix.values import SHARED

if TYPE_CHECKING:
    from starlette.applications import Starlette

_POLL_S = 0.1


@contextmanager
def in_this_process(settings: Settings, say: Say) -> Iterator[Call]:
    """Loads the application that `diskprefix serve` runs, and yields a function that calls it without a socket.
    Everything is written at the end of the context.

    Raises the error that prevented the load of the model, and `LoadInterrupted` for Ctrl-C meanwhile, which leaves the
    loading thread running.
    """

    # The import takes a while.
    from diskprefix.server.http_app import create_app

    async def loaded() -> None:
        while daemon.status == "loading" and not interrupted.is_set():
            say(daemon.doing)
            await asyncio.sleep(_POLL_S)

    with asyncio.Runner() as runner, ExitStack() as stack:
        with _hold_interrupts() as interrupted:
            token = OwnerToken("of-this-process", SHARED)
            application = create_app(settings, load_engine, token)
            daemon = application.state.daemon
            lifespan = application.router.lifespan_context(application)
            runner.run(lifespan.__aenter__())
            stack.callback(lambda: runner.run(lifespan.__aexit__(None, None, None)))
            runner.run(loaded())
        if daemon.failure is not None:
            raise daemon.failure
        yield lambda method, path, body: runner.run(_request(application, token, method, path, body))


@contextmanager
def _hold_interrupts() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C sets, and raises `LoadInterrupted` after the block if it was set: within an import or
    the event loop's own code, `KeyboardInterrupt` may turn into any other error. A second Ctrl-C ends the process at
    once, even while it is ending."""

    def hold(_number: int, _frame: FrameType | None) -> None:
        if event.is_set():
            os._exit(LoadInterrupted.exit_code)
        event.set()

    event = threading.Event()
    before = signal.signal(signal.SIGINT, hold)
    try:
        yield event
    finally:
        if not event.is_set():
            signal.signal(signal.SIGINT, before)
        if event.is_set():
            raise LoadInterrupted("interrupted")


async def _request(application: Starlette, token: OwnerToken, method: str, path: str, body: object) -> Answer:
    """Returns the answer to a request of the owner, sent as an ASGI server sends it."""
    received: asyncio.Queue[Any] = asyncio.Queue()
    received.put_nowait({"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()})
    headers = {"host": "localhost", "content-type": "application/json", "authorization": f"Bearer {token.text}"}
    scope: dict[str, Any] = {"type": "http", "scheme": "http", "method": method, "headers": Headers(headers).raw}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b""}
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    # After the body, the application waits for the client to disconnect, which never happens.
    await application(scope, received.get, send)
    return Answer(sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:]))
