"""What the OpenAPI document says of a route whose body FastAPI cannot see: `read_json` reads it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from diskprefix.server.errors import ErrorBody

OUTSIDE_FASTAPI: set[type[BaseModel]] = set()
"""The bodies and the events of streams that routes refer to. FastAPI does not add their schemas to the document."""

_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 500, 503)


def described(
    body: type[BaseModel],
    whole: type[BaseModel],
    chunk: type[BaseModel] | None = None,
    error: type[BaseModel] = ErrorBody,
) -> dict[str, Any]:
    """Returns the arguments for a router's decorator: what the route takes, `whole` or in a stream `chunk`s that it
    answers, and its errors."""
    answer: dict[str, Any] = {"model": whole}
    if chunk is not None:
        answer["description"] = "The reply; with `stream: true` server-sent events."
        answer["content"] = {"text/event-stream": {"schema": _reference(chunk)}}
    return {
        "response_model": None,
        "responses": {200: answer, **{status: {"model": error} for status in _ERRORS}},
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _reference(body)}}}
        },
    }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    OUTSIDE_FASTAPI.add(model)
    return {"$ref": f"#/components/schemas/{model.__name__}"}
