"""The HTTP application: routes, middleware, error handlers, and the start and end of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from diskprefix.daemon import hooks
from diskprefix.daemon.server import answer, model_routes, status, stored_responses
from diskprefix.daemon.server.access_log import AccessLog
from diskprefix.daemon.server.daemon import Daemon, EngineLoader
from diskprefix.daemon.server.error_replies import HANDLERS
from diskprefix.daemon.server.guards import AllowedOrigins, Auth, BrowserGuard
from diskprefix.daemon.server.keys import ApiKeys, OwnerToken
from diskprefix.daemon.server.routes import AppRoute
from diskprefix.daemon.settings import Settings

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


def create_app(settings: Settings, load_engine: EngineLoader, access: ApiKeys | OwnerToken | None = None) -> Starlette:
    """Returns the application for `settings`. It loads the model in the background once an ASGI server has started it.

    `load_engine` makes the engine, on a thread of its own. `access` has the keys of `settings`, if the caller has read
    them already, or the owner's token. `app.state.daemon` is the `Daemon`, and `app.state.access` decides who may use
    it. Raises `SettingsError` for an invalid file of keys.
    """
    daemon = Daemon(settings, load_engine)
    if access is None:
        access = OwnerToken.drawn() if settings.api_keys is None else ApiKeys(settings.api_keys)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        daemon.start_loading()
        try:
            yield
        finally:
            await daemon.close()

    routes = [*answer.routes, *stored_responses.routes, *model_routes.routes, *model_routes.token_routes]
    known = {route.path for route in (*routes, *status.routes)} - {"/", "/dashboard"}
    app = Starlette(
        routes=[*routes, *status.routes, AppRoute("/openapi.json", _document), AppRoute("/docs", _document)],
        middleware=[
            Middleware(AccessLog, daemon=daemon),
            *([Middleware(AllowedOrigins, origins=settings.origins)] if settings.allowed_origins else []),
            Middleware(
                BrowserGuard,
                host=settings.host,
                has_keys=settings.api_keys is not None,
                origins=settings.origins,
            ),
            Middleware(Auth, access=access, in_flight=daemon.in_flight),
            Middleware(ExtraRoutes, known=known),
        ],
        exception_handlers=HANDLERS,
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.daemon, app.state.access, app.state.documents = daemon, access, None
    return app


class ExtraRoutes:
    """ASGI middleware that imports the routes of few requests at the first one for a path that is not `known`, so that
    the start does not wait for them."""

    def __init__(self, app: ASGIApp, known: Collection[str]) -> None:
        self._app, self._known, self._are_there = app, known, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._are_there and scope["type"] == "http" and scope["path"] not in self._known:
            self._are_there = True
            hooks.add_routes(scope["app"])
        await self._app(scope, receive, send)


async def _document(request: Request) -> Response:
    """Returns the OpenAPI document, or the page that shows it. Both are made once the model is loaded, which decides
    about sampling."""
    app: Starlette = request.app
    daemon: Daemon = app.state.daemon

    def make() -> dict[str, Response]:
        from diskprefix.daemon.server.openapi import PAGE_POLICY, document_of, page_of

        sampling = daemon.sampling.record["values"]
        document = document_of(app.routes, sampling, with_keys=isinstance(app.state.access, ApiKeys))
        page = Response(page_of(document), media_type="text/html", headers={"Content-Security-Policy": PAGE_POLICY})
        return {"/openapi.json": JSONResponse(document), "/docs": page}

    documents: dict[str, Response] | None = app.state.documents
    if documents is None:
        is_final = daemon.serving is not None
        documents = await daemon.threads.run("inspecting", make)
        app.state.documents = documents if is_final else None
    return documents[request.url.path]
