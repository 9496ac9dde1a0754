"""The routes that the front answers itself: what is about all models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, RedirectResponse, Response

from diskprefix.api.error_forms import HttpError
from diskprefix.errors import NotReady
from diskprefix.extras.front import passing
from diskprefix.extras.front.listing import Listing, merged_metrics
from diskprefix.extras.front.passing import Incoming, NotTaken, WorkerGone
from diskprefix.extras.front.swaps import Phase, Place, Swaps
from diskprefix.extras.front.workers import ModelWorker
from diskprefix.extras.ollama.ollama_models import VERSION, require_served, running, shown_model, tag
from diskprefix.extras.web_page import CHAT_PAGE, DASHBOARD_PAGE, wants_page
from diskprefix.model.load.memory import available_ram_bytes
from diskprefix.printable import shown
from diskprefix.server.keys import Caller

if TYPE_CHECKING:
    from starlette.types import Message, Scope

_METRICS_S = 5.0
"""The time for a worker to answer with its metrics."""
_STORED_S = 40.0
"""The time for a worker to read or delete a stored response. A deletion waits for the disk."""


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

    async def response(self, scope: Scope, caller: Caller) -> Response | None:
        """Returns the answer to what is about all models, None for other requests. Raises `DiskPrefixError`."""
        method, path = scope["method"], scope["path"]
        if path.startswith("/models/") and path.endswith(("/load", "/unload")):
            if method != "POST":
                raise HttpError(405, f"{path} does not allow {shown(method)}; it allows POST")
            caller.require_owner()
            name, _, what = path.removeprefix("/models/").rpartition("/")
            return JSONResponse(await self._order(name, what, caller))
        require_served(path)
        if path == "/api/version":
            return JSONResponse(VERSION)
        if self._listing.only is not None:
            is_kept, is_loaded = self._listing.is_kept(self._listing.only), self._swaps.of(self._listing.only.name)
            if path == "/health" and not is_loaded:
                return JSONResponse({"status": "loading" if is_kept else "ok"}, 503 if is_kept else 200)
            return JSONResponse({"models": []}) if path == "/api/ps" and not is_loaded else None
        if path.startswith("/v1/responses/") and method != "POST" and b"model=" not in scope["query_string"]:
            return await self._stored(scope)
        return await self._of_several(path, scope, caller) if method in ("GET", "HEAD") else None

    async def _of_several(self, path: str, scope: Scope, caller: Caller) -> Response | None:
        match path:
            case "/" if wants_page(Headers(scope=scope)):
                return DASHBOARD_PAGE.response(is_several=True)
            case "/":
                # Importing server.status would take more time and memory than the rest of a front.
                welcome = {"name": "diskprefix", "docs": "/docs", "dashboard": "/dashboard", "chat": "/chat"}
                return JSONResponse(welcome, headers={"Vary": "Accept"})
            case "/dashboard":
                return RedirectResponse("./")
            case "/favicon.ico":
                return Response(status_code=204)
            case "/chat":
                return CHAT_PAGE.response()
            case "/health":
                models = {"models": {place.model: place.phase.name.lower() for place in self._swaps.places}}
                return JSONResponse({"status": "ok"} | (models if caller.sees_all else {}))
            case "/metrics":
                caller.require_admin()
                return await self._metrics(scope)
            case "/props" if b"model=" not in scope["query_string"]:
                caller.require_owner()
                places = [_shown_place(place) for place in self._swaps.places]
                return JSONResponse({"memory_limit": self._swaps.limit_bytes, "models": places})
            case "/api/tags":
                cards = self._cards(None, caller)["data"]
                return JSONResponse({"models": [tag(card, self._listing.facts[card["id"]]) for card in cards]})
            case "/api/ps":
                ready = [place for place in self._by_place if place.phase is Phase.READY]
                return JSONResponse({"models": [self._running(place, caller) for place in ready]})
        if path != "/v1/models" and not path.startswith("/v1/models/"):
            return None
        is_anthropic = "anthropic-version" in Headers(scope=scope)
        name = path.removeprefix("/v1/models").removeprefix("/") or None
        return JSONResponse(self._cards(name, caller, is_anthropic=is_anthropic))

    def _cards(self, name: str | None, caller: Caller, *, is_anthropic: bool = False) -> dict[str, Any]:
        return self._listing.cards(
            name,
            {place.model for place in self._swaps.places if place.phase is Phase.READY},
            self._swaps.limit_bytes or available_ram_bytes(),
            is_anthropic=is_anthropic,
            sees_all=caller.sees_all,
        )

    def _running(self, place: Place, caller: Caller) -> dict[str, Any]:
        idle_s = math.inf if place.is_pinned else place.expires_at() - asyncio.get_running_loop().time()
        return running(self._cards(place.model, caller), self._listing.facts[place.model], place.needed_bytes, idle_s)

    def shown(self, name: str, caller: Caller) -> Response:
        """Returns the answer of `/api/show`, which loads nothing."""
        return JSONResponse(shown_model(self._cards(name, caller), self._listing.facts[name]))

    @property
    def _ready(self) -> list[ModelWorker]:
        return [worker for place, worker in self._by_place.items() if place.phase is Phase.READY]

    async def _stored(self, scope: Scope) -> Response:
        """Returns what the first worker says that knows a stored response. Each reads what all models have stored; that
        of a newer one may not be written yet. Raises `NotReady` if no model is loaded."""
        answer = None
        for worker in self._ready:
            found = await _answer_of(worker, scope, _STORED_S)
            if found is None and scope["method"] == "DELETE":
                raise NotReady("the process of a model did not say in time whether it deleted the response; ask again")
            answer = found or answer
            if answer is not None and answer.status_code != 404:
                break
        if answer is None:
            raise NotReady("no model is loaded that could read stored responses; a request for a reply loads one")
        return answer

    async def _metrics(self, scope: Scope) -> Response:
        ready = self._ready
        found = await asyncio.gather(*(_answer_of(worker, scope, _METRICS_S) for worker in ready))
        texts = {
            worker.place.model: bytes(answer.body).decode()
            for worker, answer in zip(ready, found, strict=True)
            if answer is not None and answer.status_code == 200
        }
        loaded = {known.name: known.name in texts for known in self._listing.models()}
        return Response(merged_metrics(texts, loaded), media_type="text/plain; version=0.0.4; charset=utf-8")


def _shown_place(place: Place) -> dict[str, Any]:
    names = ("model", "needed_bytes", "is_pinned", "idle_unload_s", "num_active")
    return {name: getattr(place, name) for name in names} | {"phase": place.phase.name.lower()}


async def _answer_of(worker: ModelWorker, scope: Scope, limit_s: float) -> Response | None:
    """Returns the answer of a worker to a request without a body, None if there is none in time."""
    body = bytearray()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        body.extend(message.get("body", b""))

    # It must not wait for the body of the client.
    headers = [header for header in scope["headers"] if header[0] not in (b"content-length", b"transfer-encoding")]
    with suppress(NotTaken, WorkerGone, TimeoutError):
        async with asyncio.timeout(limit_s):
            status = await passing.pass_on(worker.path, {**scope, "headers": headers}, Incoming(receive), send)
        return Response(bytes(body), status, media_type="application/json")
    return None
