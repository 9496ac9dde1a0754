"""The forms in which the APIs report an error. Imports quickly, because the router imports nothing else of `api`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from diskprefix.errors import DiskPrefixError, DiskStalled, NotReady, QueueFull
from diskprefix.printable import shown

ANTHROPIC_PATH, OLLAMA_PATH = "/v1/messages", "/api/"
_NOT_READY_RETRY_AFTER_S = 2
_CODES = {
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
    415: "unsupported_media_type",
}
_MAX_MESSAGE_CHARS = 1000
"""A bound for messages of libraries, which may repeat a request. Our own messages shorten the parts that they
repeat."""


def openai_error(error: DiskPrefixError) -> dict[str, Any]:
    """Returns an error in OpenAI's form."""
    param = error.param and shown(error.param)
    return {"error": {"message": one_line(error.message), "type": error.error_type, "param": param, "code": error.code}}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: DiskPrefixError, request_id: str) -> dict[str, Any]:
    """Returns an error in Anthropic's form, with code and parameter in its `details`."""
    status, openai = error.http_status, openai_error(error)["error"]
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"error_code": openai["code"], "param": openai["param"]}
    fault = {"type": kind, "message": openai["message"], "details": details}
    return {"type": "error", "error": fault, "request_id": request_id}


def error_body(scope: Mapping[str, Any], error: DiskPrefixError, request_id: str) -> dict[str, Any]:
    """Returns an error in the form of the API that was called. On any route, the header `anthropic-version` selects
    Anthropic's form."""
    if scope["path"].startswith(OLLAMA_PATH):
        return {"error": one_line(error.message)}
    if scope["path"].startswith(ANTHROPIC_PATH) or any(name == b"anthropic-version" for name, _ in scope["headers"]):
        return anthropic_error(error, request_id)
    return openai_error(error)


def one_line(message: str) -> str:
    """Returns a message on one line, cut to a readable length."""
    return shown(message, _MAX_MESSAGE_CHARS)


_VERSION_TWICE = re.compile(r"^(/v\d+)(?:/v\d+)+(?=/|$)")


def tidied_path(path: str) -> str:
    """Returns a path without a slash at the end, repeated slashes, and a repeated version, as from a client that adds
    `/v1` to a base URL with `/v1`."""
    return _VERSION_TWICE.sub(r"\1", "/" + "/".join(filter(None, path.split("/"))))


def no_such_route(method: str, path: str, meant: str | None) -> str:
    """Returns the message for an address without a route. `meant` is the path that the client probably meant."""
    advice = "/docs lists all routes" if meant is None else f"did you mean {meant}?"
    return f"no such route: {shown(method)} {shown(path)}; {advice}"


class HttpError(DiskPrefixError):
    """An error of HTTP itself: route, method, size, content type."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail, code=_CODES.get(status))
        self.http_status = status
        self.error_type = "invalid_request_error" if status < 500 else "server_error"


def error_headers(error: DiskPrefixError) -> dict[str, str]:
    """Returns the headers of an error: when to try again, what is missing, or that the rest of the body is not read."""
    if isinstance(error, QueueFull | NotReady | DiskStalled):
        return {"Retry-After": str(error.retry_after_s if isinstance(error, QueueFull) else _NOT_READY_RETRY_AFTER_S)}
    return {401: {"WWW-Authenticate": "Bearer"}, 408: {"Connection": "close"}}.get(error.http_status, {})
