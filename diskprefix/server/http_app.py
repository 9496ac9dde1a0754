"""The HTTP application: routes, middleware, error handlers, and the start and end of the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from pydantic.json_schema import models_json_schema
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diskprefix import hooks
from diskprefix.server import answer, model_routes, status, stored_responses
from diskprefix.server.access_log import AccessLog
from diskprefix.server.daemon import Daemon, EngineLoader
from diskprefix.server.described import OUTSIDE_FASTAPI, add_errors
from diskprefix.server.error_replies import HANDLERS
from diskprefix.server.guards import OPEN_PATHS, Auth, BrowserGuard
from diskprefix.server.keys import ApiKeys, OwnerToken
from diskprefix.settings import Settings
from diskprefix.version import __version__

_DESCRIPTION = """An OpenAI-compatible server for one local model that keeps the model's prefix (KV) cache on disk: a
prompt whose beginning was seen before is restored instead of computed, bit for bit, also after a restart of the daemon.

Every reply says what the cache did (`prefix_cache`) and where the time went (`timings`)."""


def create_app(settings: Settings, load_engine: EngineLoader, who: ApiKeys | OwnerToken | None = None) -> FastAPI:
    """Returns the application for `settings`. It loads the model in the background once an ASGI server has started it.

    `load_engine` makes the engine, on a thread of its own. `who` are the keys of `settings`, if the caller has read
    them already, or the owner's token. The `Daemon` is `app.state.daemon`, and `app.state.who` who may use it. Raises
    `SettingsError` for a file of keys that is wrong.
    """
    daemon = Daemon(settings, load_engine)
    if who is None:
        who = OwnerToken.of_user() if settings.api_keys is None else ApiKeys(settings.api_keys)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        daemon.start_loading()
        try:
            yield
        finally:
            await daemon.close()

    # The /docs of FastAPI itself would fetch scripts from a CDN and run them on this origin.
    app = FastAPIOffline(
        redoc_url=None,
        title="diskprefix",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        redirect_slashes=False,
        swagger_ui_parameters={"validatorUrl": None},
        exception_handlers=HANDLERS,
    )
    app.state.daemon, app.state.who = daemon, who
    app.add_middleware(_HeadAsGet)
    app.add_middleware(Auth, who=who, in_flight=daemon.in_flight)
    app.add_middleware(BrowserGuard, host=settings.host, has_keys=settings.api_keys is not None)
    app.add_middleware(AccessLog, daemon=daemon)
    app.include_router(answer.router)
    app.include_router(stored_responses.router)
    app.include_router(model_routes.router)
    app.include_router(model_routes.token_router)
    app.include_router(status.router)
    hooks.add_routes(app)
    _complete_openapi(app, with_keys=isinstance(who, ApiKeys))
    return app


class _HeadAsGet:
    """ASGI middleware that answers HEAD as GET without a body. FastAPI's routes of GET refuse it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        asked = {**scope, "method": "GET"}
        await self._app(asked, receive, send_head)
        # The log has it.
        scope["route"] = asked.get("route")


def _complete_openapi(app: FastAPI, *, with_keys: bool) -> None:
    """Adds what FastAPI does not see: errors before a route, the schemas that routes refer to, and the API key."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = generate()
        add_errors(schema, OPEN_PATHS if with_keys else None)
        models = sorted(OUTSIDE_FASTAPI, key=lambda model: model.__name__)
        _, extra = models_json_schema(
            [(model, "validation") for model in models], ref_template="#/components/schemas/{model}"
        )
        schema["components"]["schemas"] = extra["$defs"] | schema["components"]["schemas"]
        _without_422(schema)
        if with_keys:
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"key": []}]
            for path in OPEN_PATHS & schema["paths"].keys():
                schema["paths"][path]["get"]["security"] = [{}, {"key": []}]
        return schema

    app.openapi = openapi  # type: ignore[method-assign]  # the way that FastAPI documents


def _without_422(schema: dict[str, Any]) -> None:
    """Leaves out the errors of FastAPI: here a wrong query is a 400, as a wrong body is."""
    for name in ("HTTPValidationError", "ValidationError"):
        schema["components"]["schemas"].pop(name, None)
    for methods in schema["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
