"""Completes the OpenAPI document: bodies that `read_json` reads, streams, and errors before a route."""

from __future__ import annotations

from collections.abc import Collection
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel

from diskprefix.api.error_forms import ANTHROPIC_PATH
from diskprefix.api.figures import AnthropicErrorBody
from diskprefix.server.error_replies import ErrorBody

OUTSIDE_FASTAPI: set[type[BaseModel]] = set()
"""The bodies and the events of streams that routes refer to. FastAPI does not add their schemas to the document."""

_OF_BODIES = (400, 404, 408, 413, 415, 429)
_OF_ALL_ROUTES = (HTTPStatus.FORBIDDEN, HTTPStatus.INTERNAL_SERVER_ERROR, HTTPStatus.SERVICE_UNAVAILABLE)
"""Another site's page, a failure, and too many connections or no model yet."""


def described(
    body: type[BaseModel],
    whole: type[BaseModel],
    stream: dict[str, Any] | None = None,
    error: type[BaseModel] = ErrorBody,
) -> dict[str, Any]:
    """Returns arguments for a router's decorator: the body, the `whole` answer or the `stream`, and the errors."""
    answer: dict[str, Any] = {"model": whole}
    if stream is not None:
        answer["description"] = "The reply; with `stream: true` server-sent events."
        answer["content"] = stream
    return {
        "response_model": None,
        "responses": {200: answer, **{status: {"model": error} for status in _OF_BODIES}},
        "openapi_extra": {
            "requestBody": {"required": True, "content": {"application/json": {"schema": _reference(body)}}}
        },
    }


def events(data: type[BaseModel]) -> dict[str, Any]:
    """Returns the content of a stream of server-sent events, each of which has `data` as JSON."""
    return _events(_as_json(_reference(data)))


def openai_events(chunk: type[BaseModel]) -> dict[str, Any]:
    """Returns the content of one of OpenAI's streams: it ends with `[DONE]`, or with an error."""
    return _events({"anyOf": [_as_json({"anyOf": [_reference(chunk), _reference(ErrorBody)]}), {"const": "[DONE]"}]})


def _events(data: dict[str, Any]) -> dict[str, Any]:
    """An event is an object with its fields as texts, as OpenAPI has it."""
    event = {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}
    return {"text/event-stream": {"schema": event}}


def _as_json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}


def add_errors(document: dict[str, Any], without_key: Collection[str] | None) -> None:
    """Adds the errors before a route is called. With keys, `without_key` are the paths that need none, else None."""
    for path, methods in document["paths"].items():
        error = AnthropicErrorBody if path.startswith(ANTHROPIC_PATH) else ErrorBody
        needs_key = without_key is not None and path not in without_key
        for status in (*_OF_ALL_ROUTES, *((HTTPStatus.UNAUTHORIZED,) if needs_key else ())):
            content = {"application/json": {"schema": _reference(error)}}
            for operation in methods.values():
                said = {"description": status.phrase, "content": content}
                operation["responses"].setdefault(str(status.value), said)


def _reference(model: type[BaseModel]) -> dict[str, str]:
    OUTSIDE_FASTAPI.add(model)
    return {"$ref": f"#/components/schemas/{model.__name__}"}


for _error in (ErrorBody, AnthropicErrorBody):
    _reference(_error)
