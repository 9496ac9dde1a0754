"""The routes of the dashboard: the page and its data. The data are for callers who may see everything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from fastapi.exceptions import HTTPException
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Match
from starlette.types import Scope

from diskprefix.extras.watch.dashboard.entries import SavedPrompts
from diskprefix.extras.watch.dashboard.watch import UPDATE_S, Watch
from diskprefix.extras.web_page import wants_page
from diskprefix.server.daemon import Daemon
from diskprefix.server.described import EVENTS, replies
from diskprefix.server.status import require_owner

_SILENT_S = 8.0
"""The time without news after which a comment shows that the stream is alive."""

router = APIRouter(
    prefix="/dashboard",
    tags=["dashboard"],
    dependencies=[Depends(require_owner)],
    responses={401: {"description": "The caller is not the owner."}},
)


class Dashboard:
    """The objects that the routes share."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.watch = Watch(daemon)
        self.saved_prompts = SavedPrompts(daemon.threads)


def _dashboard(request: Request) -> Dashboard:
    dashboard: Dashboard = request.app.state.dashboard
    return dashboard


class PageRoute(APIRoute):
    """`GET /` for browsers. The daemon itself answers other clients."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return (match, child) if match is Match.FULL and wants_page(Headers(scope=scope)) else (Match.NONE, {})


@router.get(
    "/state",
    summary="State",
    **replies("The state. Values that are unknown while the model loads are null or empty.", 400),
)
async def state(request: Request, since: Annotated[int, Query(ge=0)] = 0) -> JSONResponse:
    """The daemon now: its requests, its memory, its store, its problems. `since`: the number of the last request in
    `ended` that the caller has."""
    watch = _dashboard(request).watch
    return JSONResponse(await watch.state() | {"ended": watch.ended(since)})


@router.get(
    "/events",
    summary="State as it changes",
    response_model=None,
    responses={200: {"content": EVENTS, "description": "Events named `state`, two a second at most."}},
)
async def events(request: Request) -> StreamingResponse:
    """The daemon's state whenever it has changed. `ended` has the requests since the event before."""
    dashboard = _dashboard(request)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(dashboard), media_type="text/event-stream", headers=headers)


async def _events(dashboard: Dashboard) -> AsyncIterator[bytes]:
    watch, loop = dashboard.watch, asyncio.get_running_loop()
    since, before, said_at = 0, None, loop.time()
    while dashboard.daemon.status != "stopping":
        now, ended = await watch.state(), watch.ended(since)
        news = {name: value for name, value in now.items() if name != "now"}
        if ended or news != before:
            since, before, said_at = ended[-1]["number"] if ended else since, news, loop.time()
            yield f"event: state\ndata: {json.dumps(now | {'ended': ended})}\n\n".encode()
        elif loop.time() >= said_at + _SILENT_S:
            said_at = loop.time()
            yield b": keepalive\n\n"
        await asyncio.sleep(UPDATE_S)


@router.get(
    "/entries", summary="Saved prompts", **replies("`total`, `entries`, the latest first, and `trees` of their blocks.")
)
async def entries(request: Request) -> JSONResponse:
    """The saved prompts, and the tree of what they share. Read from the store, at most every few seconds."""
    dashboard = _dashboard(request)
    serving = await dashboard.daemon.ready()
    store = serving.engine.cache.store
    return JSONResponse(await dashboard.saved_prompts.entries(store, with_texts=dashboard.watch.is_private))


@router.delete(
    "/entries/{entry_id}",
    summary="Delete a saved prompt",
    **replies("Counts of what was deleted.", 404),
)
async def delete_entry(request: Request, entry_id: str) -> JSONResponse:
    """Remove a saved prompt, with the blocks that nothing else needs. Without API keys, only on a loopback address."""
    dashboard = _dashboard(request)
    if not dashboard.watch.is_private:
        raise HTTPException(
            403, "a daemon without API keys that other machines reach deletes nothing: use `diskprefix purge` there"
        )
    serving = await dashboard.daemon.ready()
    purged = await dashboard.saved_prompts.delete(serving.engine.cache.delete, entry_id)
    return JSONResponse({"id": entry_id, "deleted": True} | purged.counts())
