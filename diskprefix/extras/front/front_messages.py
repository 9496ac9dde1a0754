"""The fields of a body that the front reads, and its refusals."""

from __future__ import annotations

import logging
import math
import re
import uuid
from typing import TYPE_CHECKING, Annotated

import msgspec
from starlette.responses import JSONResponse

from diskprefix.api.error_forms import error_body, error_headers, one_line
from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.json_values import whole_characters
from diskprefix.printable import shown
from diskprefix.units import parse_duration

if TYPE_CHECKING:
    from starlette.types import Scope

log = logging.getLogger("diskprefix")

_BETWEEN = re.compile(r"(?<=[a-z])(?=[\d.])", re.ASCII)
"""The place between the parts of a duration as Go writes it: `1h30m`."""


class Named(msgspec.Struct):
    """The fields of a body that the front reads."""

    model: str | None = None
    keep_alive: Annotated[str, msgspec.Meta(max_length=100)] | float | None = None


def read_named(body: bytes) -> Named:
    """Returns the model's name in a body. Raises `InvalidRequest`."""
    try:
        return msgspec.json.decode(whole_characters(body.decode("utf-8-sig")), type=Named)
    except msgspec.ValidationError as error:
        field_name = "keep_alive" if "keep_alive" in str(error) else "model"
        raise InvalidRequest.at(field_name, f"is wrong: {one_line(str(error))}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {one_line(str(error))}", code="invalid_json") from error


def keep_alive_seconds(value: str | float) -> float:
    """Returns the seconds that a request says, infinite for what is negative. Raises `InvalidRequest`.

    Ollama's clients in Go send `1h30m0s`.
    """
    text = str(value)
    unsigned = text[1:] if text[1:2].isdigit() and text[0] == "-" else text
    try:
        seconds = float(unsigned)
    except ValueError:
        try:
            seconds = sum(parse_duration(part, param="keep_alive") for part in _BETWEEN.split(unsigned))
        except DiskPrefixError as error:
            raise InvalidRequest(error.message, param="keep_alive") from error
    return math.inf if text != unsigned or not seconds >= 0 else seconds


def refusal(scope: Scope, error: DiskPrefixError, *, sees_all: bool) -> JSONResponse:
    """Returns an error in the form of the API that was called, as a caller may see it who `sees_all` or not."""
    request_id = f"req_{uuid.uuid4().hex[:24]}"
    said = error_body(scope, error.told_to(sees_all=sees_all), request_id)
    headers = {"x-request-id": request_id, "request-id": request_id} | error_headers(error)
    log.info("[front] %s %s %d: %s", scope["method"], shown(scope["path"]), error.http_status, one_line(error.message))
    return JSONResponse(said, error.http_status, headers)
