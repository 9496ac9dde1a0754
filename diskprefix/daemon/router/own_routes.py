"""The routes that the router answers itself, because they are about all models."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, RedirectResponse, Response

from diskprefix.daemon import rooms
from diskprefix.daemon.api.error_forms import HttpError
from diskprefix.daemon.ollama.ollama_models import VERSION, require_served, running, shown_model, tag
from diskprefix.daemon.router import passing
from diskprefix.daemon.router.listing import Listing, merged_metrics
from diskprefix.daemon.router.passing import Incoming, NotTaken, WorkerGone
from diskprefix.daemon.router.swaps import Phase, Slot, Swaps
from diskprefix.daemon.router.workers import ModelWorker
from diskprefix.daemon.server.guards import share_of
from diskprefix.daemon.server.keys import Caller
from diskprefix.daemon.server.share import Share
from diskprefix.errors import NotReady
from diskprefix.printable import shown
from diskprefix.runtime.memory import available_ram_bytes

if TYPE_CHECKING:
    from starlette.types import Message, Scope

_METRICS_S = 5.0
"""The time for a worker to answer with its metrics."""
_STORED_S = 40.0
"""The time for a worker to read or delete a stored response. A deletion waits for the disk."""


class OwnRoutes:
    """The routes of the router. `load_or_unload` takes a model's name, "load" or "unload", and a share."""

    def __init__(
        self,
        listing: Listing,
        swaps: Swaps[ModelWorker],
        load_or_unload: Callable[[str, str, Share], Awaitable[dict[str, str]]],
        page_token: Callable[[Caller], str],
    ) -> None:
        self._listing, self._swaps = listing, swaps
        self._load_or_unload, self._page_token = load_or_unload, page_token

    async def response(self, scope: Scope, caller: Caller) -> Response | None:
        """Returns the router's own answer, or None for a request to pass on. Raises `DiskPrefixError`."""
        method, path = scope["method"], scope["path"]
        if path.startswith("/models/") and path.endswith(("/load", "/unload")):
            if method != "POST":
                raise HttpError(405, f"{path} does not allow {shown(method)}; it allows POST")
            caller.require_owner()
            name, _, action = path.removeprefix("/models/").rpartition("/")
            return JSONResponse(await self._load_or_unload(name, action, share_of(scope, caller)))
        if (method, path) == ("POST", "/page-token"):
            return JSONResponse({"token": self._page_token(caller)})
        require_served(path)
        if path == "/api/version":
            return JSONResponse(VERSION)
        if self._listing.only is not None:
            stays_loaded = self._listing.stays_loaded(self._listing.only)
            is_loaded = self._swaps.find(self._listing.only.name)
            if path == "/health" and not is_loaded:
                return JSONResponse({"status": "loading" if stays_loaded else "ok"}, 503 if stays_loaded else 200)
            return JSONResponse({"models": []}) if path == "/api/ps" and not is_loaded else None
        if path.startswith("/v1/responses/") and method != "POST" and b"model=" not in scope["query_string"]:
            return await self._stored(scope)
        return await self._of_several(path, scope, caller) if method in ("GET", "HEAD") else None

    async def _of_several(self, path: str, scope: Scope, caller: Caller) -> Response | None:
        match path:
            case "/" if not rooms.wants_page(Headers(scope=scope)) or "/" not in rooms.pages():
                return JSONResponse(rooms.welcome(), headers={"Vary": "Accept"})
            case "/dashboard":
                return RedirectResponse("./")
            case "/favicon.ico":
                return Response(status_code=204)
            case "/health":
                models = {"models": {slot.model: slot.phase.name.lower() for slot in self._swaps.slots}}
                return JSONResponse({"status": "ok"} | (models if caller.sees_all else {}))
            case "/metrics":
                caller.require_admin()
                return await self._metrics(scope)
            case "/props" if b"model=" not in scope["query_string"]:
                caller.require_owner()
                slots = [_slot_json(slot) for slot in self._swaps.slots]
                return JSONResponse({"memory_limit": self._swaps.limit_bytes, "models": slots})
            case "/api/tags":
                cards = self._cards(None, caller)["data"]
                return JSONResponse({"models": [tag(card, self._listing.facts[card["id"]]) for card in cards]})
            case "/api/ps":
                return JSONResponse({"models": [self._running(slot, caller) for slot in self._ready]})
        if (page := rooms.page_at(path)) is not None:
            return page.response(is_several=path == "/")
        if path != "/v1/models" and not path.startswith("/v1/models/"):
            return None
        is_anthropic = "anthropic-version" in Headers(scope=scope)
        name = path.removeprefix("/v1/models").removeprefix("/") or None
        return JSONResponse(self._cards(name, caller, is_anthropic=is_anthropic))

    def _cards(self, name: str | None, caller: Caller, *, is_anthropic: bool = False) -> dict[str, Any]:
        return self._listing.cards(
            name,
            {slot.model for slot in self._swaps.slots if slot.phase is Phase.READY},
            self._swaps.limit_bytes or available_ram_bytes(),
            is_anthropic=is_anthropic,
            sees_all=caller.sees_all,
        )

    def _running(self, slot: Slot, caller: Caller) -> dict[str, Any]:
        idle_s = math.inf if slot.is_pinned else slot.expires_at() - asyncio.get_running_loop().time()
        return running(self._cards(slot.model, caller), self._listing.facts[slot.model], slot.needed_bytes, idle_s)

    def shown(self, name: str, caller: Caller) -> Response:
        """Returns the answer of `/api/show`."""
        return JSONResponse(shown_model(self._cards(name, caller), self._listing.facts[name]))

    @property
    def _ready(self) -> list[ModelWorker]:
        return [worker for worker in self._swaps.slots if worker.phase is Phase.READY]

    async def _stored(self, scope: Scope) -> Response:
        """Returns the answer of the first worker that knows a stored response. A response that another worker has just
        stored may not be on the disk yet. Raises `NotReady` if no model is loaded."""
        answer = None
        for worker in self._ready:
            response = await _answer_of(worker, scope, _STORED_S)
            if response is None and scope["method"] == "DELETE":
                raise NotReady("the process of a model did not say in time whether it deleted the response; ask again")
            answer = response or answer
            if answer is not None and answer.status_code != 404:
                break
        if answer is None:
            raise NotReady("no model is loaded that could read stored responses; a request for a reply loads one")
        return answer

    async def _metrics(self, scope: Scope) -> Response:
        ready = self._ready
        answers = await asyncio.gather(*(_answer_of(worker, scope, _METRICS_S) for worker in ready))
        texts = {
            worker.model: bytes(answer.body).decode()
            for worker, answer in zip(ready, answers, strict=True)
            if answer is not None and answer.status_code == 200
        }
        loaded = {known.name: known.name in texts for known in self._listing.models()}
        return Response(merged_metrics(texts, loaded), media_type="text/plain; version=0.0.4; charset=utf-8")


def _slot_json(slot: Slot) -> dict[str, Any]:
    names = ("model", "needed_bytes", "is_pinned", "idle_unload_s", "num_active")
    return {name: getattr(slot, name) for name in names} | {"phase": slot.phase.name.lower()}


async def _answer_of(worker: ModelWorker, scope: Scope, limit_s: float) -> Response | None:
    """Returns the answer of a worker to a request without a body, or None after `limit_s`."""
    body = bytearray()

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Message) -> None:
        body.extend(message.get("body", b""))

    # The worker must not wait for a body.
    headers = [header for header in scope["headers"] if header[0] not in (b"content-length", b"transfer-encoding")]
    with suppress(NotTaken, WorkerGone, TimeoutError):
        async with asyncio.timeout(limit_s):
            status = await passing.pass_on(worker.path, {**scope, "headers": headers}, Incoming(receive), send)
        return Response(bytes(body), status, media_type="application/json")
    return None
