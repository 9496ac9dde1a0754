"""The application before it is imported: `/health` is answered from the first moment, and other requests wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Receive, Scope, Send

_UNKNOWN = ("message", "model", "cache", "queue_depth", "running")
_LOADING = json.dumps({"status": "loading"} | dict.fromkeys(_UNKNOWN)).encode()
"""What the route itself tells a caller without a key."""
_HEADERS = [(b"content-type", b"application/json"), (b"content-length", str(len(_LOADING)).encode())]


class Entrance:
    """ASGI application that hands everything to the one that `make_app` returns.

    `make_app` runs in a thread, because it imports FastAPI and all routes. Until it returns, `GET /health` is answered
    with the status alone. Imports neither FastAPI nor what the routes need.
    """

    def __init__(self, make_app: Callable[[], FastAPI], on_failure: Callable[[], None]) -> None:
        """`on_failure` is called on the event loop if `make_app` raises. `app` then raises the same."""
        self._make_app = make_app
        self._on_failure = on_failure
        self._making: asyncio.Task[FastAPI]
        self._lifespan = AsyncExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif not self._making.done() and (scope.get("method"), scope["path"]) == ("GET", "/health"):
            await send({"type": "http.response.start", "status": 503, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": _LOADING})
        else:
            app = await self.app()
            await app(scope, receive, send)

    async def app(self) -> FastAPI:
        """Returns the application once it is made and has started."""
        # Without the shield, a client that hangs up would cancel it.
        return await asyncio.shield(self._making)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Starts and ends with the server, as ASGI's lifespan protocol tells."""
        await receive()
        self._making = asyncio.create_task(self._make())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await asyncio.wait([self._making])
        await self._lifespan.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _make(self) -> FastAPI:
        try:
            app = await asyncio.to_thread(self._make_app)
            await self._lifespan.enter_async_context(app.router.lifespan_context(app))
        except BaseException:
            self._on_failure()
            raise
        return app
