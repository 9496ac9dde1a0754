"""Requires an API key before the body of a request is read. `/` and `/health` answer without a key, but tell less."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from diskprefix.server.errors import refuse
from diskprefix.server.keys import ANYBODY, NOBODY, ApiKeys
from diskprefix.server.log_context import log_context

OPEN_PATHS = frozenset({"/", "/health"})
"""For load balancers and service managers, which have no key, and for clients that look whether anybody is here."""


class Auth:
    """ASGI middleware: records who sent a request, or answers 401. Without keys, everybody is served."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        authorization = _authorization(Headers(scope=scope))
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


def _authorization(headers: Headers) -> str | None:
    """Returns the header with the key. Anthropic's clients send the key alone, in a header of its own."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (key and f"Bearer {key}")
