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

from diskprefix.app import load_engine
from diskprefix.errors import LoadInterrupted
from diskprefix.extras.daemon_call import Answer, Call, Say
from diskprefix.nouns import SHARED
from diskprefix.server.keys import OwnerToken
from diskprefix.settings import Settings

if TYPE_CHECKING:
    from starlette.applications import Starlette

_POLL_S = 0.1


@contextmanager
def in_this_process(settings: Settings, say: Say) -> Iterator[Call]:
    """Loads the application that `diskprefix serve` runs, and yields a function that calls it without a socket.

    At the end everything is written. Raises the error that prevented the load of the model, and
    `LoadInterrupted` for Ctrl-C meanwhile, which leaves the thread that loads.
    """

    # It takes a while.
    from diskprefix.server.http_app import create_app

    async def loaded() -> None:
        while daemon.status == "loading" and not interrupted.is_set():
            say(daemon.doing)
            await asyncio.sleep(_POLL_S)

    with asyncio.Runner() as runner, ExitStack() as stack:
        with _interrupts_held() as interrupted:
            token = OwnerToken("of-this-process", SHARED)
            application = create_app(settings, load_engine, token)
            daemon = application.state.daemon
            lifespan = application.router.lifespan_context(application)
            runner.run(lifespan.__aenter__())
            stack.callback(lambda: runner.run(lifespan.__aexit__(None, None, None)))
            runner.run(loaded())
        if daemon.failure is not None:
            raise daemon.failure
        yield lambda method, path, body: runner.run(_answered(application, token, method, path, body))


@contextmanager
def _interrupts_held() -> Iterator[threading.Event]:
    """Yields an event that Ctrl-C sets, and raises `LoadInterrupted` behind the block if it did. `KeyboardInterrupt` in
    the middle of an import or of the event loop's own code may come out as any other error. Another Ctrl-C, also while
    the process ends, ends it at once."""

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


async def _answered(application: Starlette, token: OwnerToken, method: str, path: str, body: object) -> Answer:
    """Returns the answer to one request of the owner, sent as an ASGI server sends it."""
    received: asyncio.Queue[Any] = asyncio.Queue()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    received.put_nowait({"type": "http.request", "body": b"" if body is None else json.dumps(body).encode()})
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    headers.append((b"authorization", f"Bearer {token.text}".encode()))
    scope: dict[str, Any] = {"type": "http", "scheme": "http", "method": method, "headers": headers}
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b""}
    # After the body the application waits for the client to disconnect, which this one never does.
    await application(scope, received.get, sent.put)
    start, *rest = [sent.get_nowait() for _ in range(sent.qsize())]
    return Answer(start["status"], b"".join(message.get("body", b"") for message in rest))
