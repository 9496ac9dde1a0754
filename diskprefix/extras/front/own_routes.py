"""The routes that the front answers itself: what is about all models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers

from diskprefix.api.error_forms import HttpError
from diskprefix.extras.front.front_messages import send_json
from diskprefix.extras.front.listing import Listing, merged_metrics
from diskprefix.extras.front.passing import Incoming, NotTaken, Way, WorkerGone
from diskprefix.extras.front.swaps import Phase, Place, Swaps
from diskprefix.extras.front.workers import ModelWorker
from diskprefix.model.load.memory import available_ram_bytes
from diskprefix.printable import shown
from diskprefix.server.keys import ADMIN, WITHOUT_TOKEN, Caller

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import Message, Scope, Send

_METRICS_S = 5.0
"""The time for a worker to answer with its metrics."""


class OwnRoutes:
    """The routes of the front. `by_place`: the workers that there are; `order` loads or unloads a model by its name."""

    def __init__(
        self,
        listing: Listing,
        swaps: Swaps,
        by_place: Mapping[Place, ModelWorker],
        order: Callable[[str, str, Caller], Awaitable[dict[str, str]]],
    ) -> None:
        self._listing, self._swaps, self._by_place, self._order = listing, swaps, by_place, order

    async def answer(self, scope: Scope, send: Send, caller: Caller) -> bool:
        """Answers what is about all models. Returns False for other requests. Raises `DiskPrefixError`."""
        method, path = scope["method"], scope["path"]
        if path.startswith("/models/") and path.endswith(("/load", "/unload")):
            if method != "POST":
                raise HttpError(405, f"{path} does not allow {shown(method)}; it allows POST")
            _require_owner(caller)
            name, _, what = path.removeprefix("/models/").rpartition("/")
            await send_json(send, await self._order(name, what, caller))
            return True
        if self._listing.only is not None:
            if path == "/health" and self._swaps.of(self._listing.only.name) is None:
                is_kept = self._listing.is_kept(self._listing.only)
                await send_json(send, {"status": "loading" if is_kept else "ok"}, 503 if is_kept else 200)
                return True
            return False
        if method not in ("GET", "HEAD"):
            return False
        wants = Headers(scope=scope)
        if path == "/":
            await _send_page(wants, send)
        elif path == "/dashboard":
            await send_json(send, {}, 307, {"Location": "./"})
        elif path == "/favicon.ico":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        elif path == "/chat":
            await _send_chat_page(send)
        elif path == "/health":
            models = {"models": {place.model: place.phase.name.lower() for place in self._swaps.places}}
            await send_json(send, {"status": "ok"} | (models if caller.sees_all else {}))
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            loaded = {place.model for place in self._swaps.places if place.phase is Phase.READY}
            name = path.removeprefix("/v1/models").removeprefix("/") or None
            limit = self._swaps.limit_bytes or available_ram_bytes()
            cards = self._listing.cards(
                name, loaded, limit, is_anthropic="anthropic-version" in wants, sees_all=caller.sees_all
            )
            await send_json(send, cards)
        elif path == "/metrics":
            _require_admin(caller)
            await self._send_metrics(scope, send)
        elif path == "/props" and b"model=" not in scope["query_string"]:
            _require_owner(caller)
            places = [_shown_place(place) for place in self._swaps.places]
            await send_json(send, {"memory_limit": self._swaps.limit_bytes, "models": places})
        else:
            return False
        return True

    async def _send_metrics(self, scope: Scope, send: Send) -> None:
        ready = [worker for place, worker in self._by_place.items() if place.phase is Phase.READY]
        found = await asyncio.gather(*(_metrics_of(worker, scope) for worker in ready))
        texts = {worker.place.model: text for worker, text in zip(ready, found, strict=True) if text is not None}
        loaded = {known.name: known.name in texts for known in self._listing.models()}
        merged = merged_metrics(texts, loaded).encode()
        headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": merged})


async def _send_page(wants: Headers, send: Send) -> None:
    """Answers a browser with the dashboard, others with JSON."""
    from diskprefix.extras.web_page import DASHBOARD_PAGE, wants_page

    if not wants_page(wants):
        # Importing server.status would take more time and memory than the rest of a front.
        welcome = {"name": "diskprefix", "docs": "/docs", "dashboard": "/dashboard", "chat": "/chat"}
        await send_json(send, welcome, headers={"Vary": "Accept"})
        return
    await _send_response(DASHBOARD_PAGE.response(is_several=True), send)


async def _send_chat_page(send: Send) -> None:
    from diskprefix.extras.web_page import CHAT_PAGE

    await _send_response(CHAT_PAGE.response(), send)


async def _send_response(response: Response, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


def _require_admin(caller: Caller) -> None:
    if not caller.sees_all:
        raise HttpError(403, f"this is about everybody's requests: only the key named {ADMIN} may do it")


def _require_owner(caller: Caller) -> None:
    _require_admin(caller)
    if not caller.is_owner:
        raise HttpError(401, WITHOUT_TOKEN)


def _shown_place(place: Place) -> dict[str, Any]:
    names = ("model", "needed_bytes", "is_pinned", "idle_unload_s", "num_active")
    return {name: getattr(place, name) for name in names} | {"phase": place.phase.name.lower()}


async def _metrics_of(worker: ModelWorker, scope: Scope) -> str | None:
    """Returns the metrics of a worker, None if it does not answer in time."""
    with suppress(NotTaken, WorkerGone, TimeoutError):
        async with asyncio.timeout(_METRICS_S):
            status, body = await _fetched(scope, worker.way)
        return body.decode() if status == 200 else None
    return None


async def _fetched(scope: Scope, way: Way) -> tuple[int, bytes]:
    """Returns the status and the body of a worker's answer to a request without one. Raises `NotTaken` and
    `WorkerGone`."""
    body = bytearray()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        body.extend(message.get("body", b""))

    incoming = Incoming(receive)
    incoming.end()
    headers = [header for header in scope["headers"] if header[0] not in (b"content-length", b"transfer-encoding")]
    return await way.pass_on({**scope, "headers": headers}, incoming, send), bytes(body)
