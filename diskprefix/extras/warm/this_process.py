"""Sends requests to the daemon's application in this process, without a socket."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from diskprefix import app
from diskprefix.extras.daemon_call import Answer, Call, Say
from diskprefix.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

_POLL_S = 0.1
_INTERRUPTED_EXIT_CODE = 130


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
