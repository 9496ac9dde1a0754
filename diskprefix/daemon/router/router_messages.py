"""The fields of a body that the router reads, and its refusals."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING, Annotated

import msgspec
from starlette.responses import JSONResponse

from diskprefix.daemon.api.error_forms import error_body, error_headers, one_line
from diskprefix.daemon.json_values import whole_characters
from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.printable import shown

if TYPE_CHECKING:
    from starlette.types import Scope

log = logging.getLogger("diskprefix")


class Routing(msgspec.Struct):
    """The fields of a body that choose a model and how long it stays."""

    model: str | None = None
    keep_alive: Annotated[str, msgspec.Meta(max_length=100)] | float | None = None


def read_routing(body: bytes) -> Routing:
    """Returns the fields of a JSON body. Raises `InvalidRequest`."""
    try:
        return msgspec.json.decode(whole_characters(body.decode("utf-8-sig")), type=Routing)
    except msgspec.ValidationError as error:
        field_name = "keep_alive" if "keep_alive" in str(error) else "model"
        raise InvalidRequest.at(field_name, f"is wrong: {one_line(str(error))}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {one_line(str(error))}", code="invalid_json") from error


def refusal(scope: Scope, error: DiskPrefixError, *, sees_all: bool) -> JSONResponse:
    """Returns an error in the form of the API that was called. Only a caller who `sees_all` gets it in full."""
    request_id = f"req_{uuid.uuid4().hex[:24]}"
    body = error_body(scope, error.for_caller(sees_all=sees_all), request_id)
    headers = {"x-request-id": request_id, "request-id": request_id} | error_headers(error)
    log.info("[router] %s %s %d: %s", scope["method"], shown(scope["path"]), error.http_status, one_line(error.message))
    return JSONResponse(body, error.http_status, headers)
