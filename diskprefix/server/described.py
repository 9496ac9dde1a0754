"""Completes the OpenAPI document: bodies that `read_json` reads, replies in a sentence, and errors before a route."""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

OUTSIDE_FASTAPI: set[type[BaseModel]] = set()
"""The bodies that routes refer to. FastAPI does not add their schemas to the document."""

_OF_BODIES = (400, 404, 408, 413, 415, 429)
_OF_ALL_ROUTES = (HTTPStatus.FORBIDDEN, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)
"""Another site's page, a failure, and too many connections or no model yet."""
_OBJECT = {"application/json": {"schema": {"type": "object"}}}
EVENTS = {"text/event-stream": {"schema": {"type": "string"}}}


def described(body: type[BaseModel], returns: str, *, streams: bool = False) -> dict[str, Any]:
    """Returns arguments for a router's decorator: the body, a sentence about what the route `returns`, and the errors.
    `streams`: with `stream: true` the reply is a stream of events."""
    OUTSIDE_FASTAPI.add(body)
    reference = {"$ref": f"#/components/schemas/{body.__name__}"}
    return replies(returns, *_OF_BODIES, streams=streams) | {
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}},
    }


def replies(returns: str, *errors: int, streams: bool = False) -> dict[str, Any]:
    """Returns arguments for a router's decorator: a sentence about what the route `returns`, and its errors."""
    said = f"{returns} With `stream: true` server-sent events." if streams else returns
    whole = {"description": said, "content": _OBJECT | (EVENTS if streams else {})}
    return {"response_model": None, "responses": {200: whole, **{status: _error(status) for status in errors}}}


def add_errors(document: dict[str, Any], without_key: Collection[str] | None) -> None:
    """Adds the errors before a route is called. With keys, `without_key` are the paths that need none, else None."""
    for path, methods in document["paths"].items():
        needs_key = without_key is not None and path not in without_key
        for status in (*_OF_ALL_ROUTES, *((HTTPStatus.UNAUTHORIZED,) if needs_key else ())):
            for operation in methods.values():
                operation["responses"].setdefault(str(status.value), _error(status))


def _error(status: int) -> dict[str, Any]:
    """An error has the form of the API that the route belongs to."""
    return {"description": HTTPStatus(status).phrase, "content": _OBJECT}
