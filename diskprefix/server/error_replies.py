"""Writes every error in the form of the API that was called, with its status."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from diskprefix.api.dialect import Json, JsonLine, ServerSentEvent
from diskprefix.api.error_forms import (
    ANTHROPIC_PATH,
    OLLAMA_PATH,
    HttpError,
    error_body,
    error_headers,
    one_line,
    openai_error,
)
from diskprefix.errors import GOT, DiskPrefixError
from diskprefix.printable import shown
from diskprefix.server.log_context import CLIENT_CLOSED_REQUEST, log_context

log = logging.getLogger("diskprefix")

_RESPONSES_PATH = "/v1/responses"


def _written(scope: Scope, error: DiskPrefixError) -> Json:
    context = log_context(Request(scope))
    return error_body(scope, error.for_caller(sees_all=context.caller.sees_all), context.request_id)


def logged(error: DiskPrefixError) -> str:
    """Returns the message of an error without the value at fault, which may be part of a prompt."""
    return one_line(error.message.partition(GOT)[0])


def note_failure(scope: Scope, error: DiskPrefixError, late: str = "") -> None:
    """Notes an error and its status for the log and the metrics. If the reply had begun with 200, `late` says what
    happened to it, and the log has a line of its own with the id and the key of the request."""
    context = log_context(Request(scope))
    context.error, context.status = logged(error), error.http_status
    if late:
        key = f" of {context.caller.name}" if context.caller.name else ""
        log.error("%s (%s%s): %s", late, context.request_id, key, context.error)


def error_response(scope: Scope, error: DiskPrefixError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Returns the response for an error, with `headers` or else those that follow from the error."""
    return JSONResponse(_written(scope, error), error.http_status, headers or error_headers(error))


def stream_type(scope: Scope) -> str:
    """Returns the content type of a stream."""
    return "application/x-ndjson" if scope["path"].startswith(OLLAMA_PATH) else "text/event-stream"


def opening(scope: Scope) -> bytes:
    """Returns the first bytes of a stream, which are sent before the prompt is computed: a comment, or before lines of
    JSON a blank, because Ollama's clients take no empty line."""
    return b" " if scope["path"].startswith(OLLAMA_PATH) else b": diskprefix\n\n"


def early_sign(scope: Scope) -> bytes:
    """Returns a sign of life for a stream that has not begun. Anthropic's clients ignore comments."""
    if scope["path"].startswith(ANTHROPIC_PATH):
        return b'event: ping\ndata: {"type": "ping"}\n\n'
    return b" " if scope["path"].startswith(OLLAMA_PATH) else b": keepalive\n\n"


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
        detail = f"no such route: {method} {path}; /docs lists all routes"
    elif error.status_code == 405:
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
        detail = f"{path} does not allow {method}; it allows {headers['Allow']}"
    return error_response(request.scope, HttpError(error.status_code, detail), headers)


async def _on_client_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


HANDLERS: dict[Any, Callable[[Request, Exception], Awaitable[Response]]] = {
    DiskPrefixError: _on_diskprefix_error,
    HTTPException: _on_http_exception,
    ClientDisconnect: _on_client_disconnect,
}
"""By class of the exception."""
