"""The routes of the pages for browsers, which rooms of the desk add, and of the token that a page keeps."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from diskprefix.daemon import rooms
from diskprefix.daemon.server.log_context import log_context
from diskprefix.daemon.server.routes import AppRoute, Routes

routes = Routes("pages")


class FrontRoute(AppRoute):
    """`GET /` for browsers. The daemon itself answers other clients."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return (match, child) if match is Match.FULL and rooms.wants_page(Headers(scope=scope)) else (Match.NONE, {})


async def _page(request: Request) -> Response:
    page = rooms.page_at(request.scope["route"].path)
    assert page is not None
    return page.response()


@routes.add("POST /page-token", "Token of a page", errors=[401])
async def page_token(request: Request) -> JSONResponse:
    """Exchange the key in `Authorization` for a `token` with the same rights that ends with the daemon's process.

    Pages keep only that: whoever listens on the daemon's port later gets what an open page sends.
    """
    return JSONResponse({"token": request.app.state.access.page_token(log_context(request).caller)})


def add_routes(app: Starlette) -> None:
    """Adds the pages; the one at `/` before the daemon's own route, and for browsers alone."""
    app.routes.extend([*routes, *(AppRoute(path, _page) for path in rooms.pages() if path != "/")])
    if "/" in rooms.pages():
        app.routes.insert(0, FrontRoute("/", _page))
