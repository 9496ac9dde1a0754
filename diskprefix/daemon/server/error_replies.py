"""Writes every error in the form of the API that was called, with its status."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from diskprefix.daemon.api.dialect import Json, JsonLine, ServerSentEvent
from diskprefix.daemon.api.error_forms import (
    ANTHROPIC_PATH,
    OLLAMA_PATH,
    HttpError,
    error_body,
    error_headers,
    no_such_route,
    one_line,
    openai_error,
    tidied_path,
)
from diskprefix.daemon.server.log_context import CLIENT_CLOSED_REQUEST, log_context
from diskprefix.errors import GOT, DiskPrefixError
from diskprefix.printable import shown

log = logging.getLogger("diskprefix")

_RESPONSES_PATH = "/v1/responses"


def _written(scope: Scope, error: DiskPrefixError) -> Json:
    context = log_context(Request(scope))
    return error_body(scope, error.for_caller(sees_all=context.caller.sees_all), context.request_id)


def logged(error: DiskPrefixError) -> str:
    """Returns the message of an error without the value at fault, which may be part of a prompt."""
    return one_line(error.message.partition(GOT)[0])


def note_failure(scope: Scope, error: DiskPrefixError, late: str = "") -> None:
    """Notes an error and its status for the log and the metrics. For a reply that had begun with 200, `late` describes
    the failure, and the log gets a line of its own with the id and the key of the request."""
    context = log_context(Request(scope))
    context.error, context.status = logged(error), error.http_status
    if late:
        key = f" of {context.caller.name}" if context.caller.name else ""
        log.error("%s (%s%s): %s", late, context.request_id, key, context.error)


def error_response(scope: Scope, error: DiskPrefixError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Returns the response for an error. `headers` default to the headers of the error."""
    return JSONResponse(_written(scope, error), error.http_status, headers or error_headers(error))


class StreamForm(NamedTuple):
    """The form of an API's streams before the prompt is computed."""

    content_type: str = "text/event-stream"
    opening: bytes = b": diskprefix\n\n"
    """The first bytes."""
    sign: bytes = b": keepalive\n\n"
    """A sign of life."""


# Ollama's clients fail at an empty line, and Anthropic's ignore comments.
_FORMS = {
    OLLAMA_PATH: StreamForm("application/x-ndjson", b" ", b" "),
    ANTHROPIC_PATH: StreamForm(sign=b'event: ping\ndata: {"type": "ping"}\n\n'),
}


def stream_form(scope: Scope) -> StreamForm:
    return next((form for path, form in _FORMS.items() if scope["path"].startswith(path)), StreamForm())


def early_failure(scope: Scope, error: DiskPrefixError) -> bytes:
    """Returns the event that ends a stream which could not begin, in the form of the API that was called."""
    said = _written(scope, error)
    if scope["path"].startswith(OLLAMA_PATH):
        return JsonLine(said).encode()
    if scope["path"].startswith(_RESPONSES_PATH):
        said = openai_error(error)["error"] | {"type": "error", "sequence_number": 0}
    return ServerSentEvent(said, "error" if said.get("type") == "error" else None).encode()


async def refuse(scope: Scope, receive: Receive, send: Send, error: DiskPrefixError) -> None:
    """Answers a request from a middleware, and notes the reason for the log."""
    log_context(Request(scope)).error = logged(error)
    await error_response(scope, error)(scope, receive, send)


async def _on_diskprefix_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, DiskPrefixError)
    log_context(request).error = logged(error)
    if error.http_status == 500:
        log.error("request failed: %s", logged(error), exc_info=error)
    return error_response(request.scope, error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    detail, method, path = error.detail, shown(request.method), shown(request.url.path)
    if error.status_code == 404 and detail == "Not Found":
        detail = no_such_route(request.method, request.url.path, nearest_path(request))
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
        detail = f"{path} does not allow {method}; it allows {headers['Allow']}"
    return error_response(request.scope, HttpError(error.status_code, detail), headers)


_VERSION = re.compile(r"v\d+")


def nearest_path(request: Request) -> str | None:
    """Returns the path of the route that the client probably meant: it differs in slashes, capitals, or the prefix
    before the name, since base URLs are written with and without `/v1` and `/api`."""
    paths = {route.path for route in request.app.routes if isinstance(route, Route)}
    names = tidied_path(request.url.path.lower()).split("/")
    words = [word for word in names if word and word not in ("api", "openai", "anthropic") and not _VERSION.match(word)]
    if not words:
        return "/v1/models" if len(request.url.path) > 1 and "/v1/models" in paths else None
    # The route of llama.cpp's server.
    meant = "completions" if words == ["completion"] else "/".join(words)
    wanted = ["/".join(names), f"/v1/{meant}", f"/api/{meant}", f"/{meant}"]
    if "api" in names and "v1" not in names:
        wanted.insert(1, f"/api/{meant}")
    return next((path for path in wanted if path in paths), None)


async def _on_client_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    DiskPrefixError: _on_diskprefix_error,
    HTTPException: _on_http_exception,
    ClientDisconnect: _on_client_disconnect,
}
"""By class of the exception."""
