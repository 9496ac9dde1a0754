"""Requires an API key before the body of a request is read. `/health` answers without a key, but tells less."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from diskprefix.server.errors import refuse
from diskprefix.server.keys import ANYBODY, NOBODY, ApiKeys
from diskprefix.server.log_context import log_context

OPEN_PATHS = frozenset({"/health"})
"""For load balancers and service managers, which have no key."""


class Auth:
    """ASGI middleware: records who sent a request, or answers 401. Without keys, everybody is served."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        authorization = Headers(scope=scope).get("authorization")
        caller = ANYBODY if self._keys is None else self._keys.caller(authorization)
        if caller is None and scope["path"] in OPEN_PATHS:
            caller = NOBODY
        if caller is not None:
            log_context(Request(scope)).caller = caller
            await self._app(scope, receive, send)
            return
        missing = "an API key is needed: send the header Authorization: Bearer KEY"
        reason = "the API key is not one of this daemon's" if authorization else missing
        await refuse(scope, receive, send, 401, reason, {"WWW-Authenticate": "Bearer"})
