"""Reads JSON bodies, within limits of size and time, and parameters. Parses both strictly. Errors name the field."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from itertools import islice
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request

from diskprefix.daemon.api.body_errors import first_error
from diskprefix.daemon.api.error_forms import HttpError
from diskprefix.daemon.api.parsed_request import note_misspelt
from diskprefix.daemon.json_values import MAX_LEVELS, count_values, path_below, whole_characters
from diskprefix.daemon.server.limits import LARGE_BYTES, BodyPace, CountedRequest, Turns
from diskprefix.daemon.server.log_context import log_context
from diskprefix.daemon.server.threads import NUM_BESIDE, Threads
from diskprefix.errors import InvalidRequest
from diskprefix.nearest import nearest
from diskprefix.printable import shown

Model = TypeVar("Model", bound=BaseModel)

_OWN_BYTES = 8 * 1024
"""The most memory of a parsed body without values."""
_PATIENCE_S = 60.0
"""The time after which a large body, with its pause, leaves its place to others."""
_NAME_CHARS, _MOST_UNKNOWN, _LIKE = 48, 16, 0.9
"""For misspelt fields: the longest name, the most unknown names of an object that are compared with the known ones, and
the least likeness, which `difflib` measures from 0 to 1: of `max_tokns` and `max_tokens` it is 0.95, and of
Anthropic's `speed` and `seed` 0.89."""
_PAUSE, _PAUSE_BESIDE = 1, 7
"""The pause after a large body, as a multiple of its parsing time: alone, and while the engine computes."""


class Bodies:
    """Reads the bodies of requests: large ones one at a time, by turns of their shares."""

    def __init__(self, threads: Threads, is_computing: Callable[[], bool] = lambda: False) -> None:
        self._threads = threads
        self._is_computing = is_computing
        self._turns, self._pace = Turns(1, _PATIENCE_S, NUM_BESIDE["large"]), BodyPace(is_computing)

    async def read_json(self, request: Request, model: type[Model], held: AsyncExitStack) -> Model:
        """Returns the body as `model`. Its share has the memory of the parsed body until `held` is closed, after the
        prompt is rendered. A large body takes a turn of its share, which lasts as long or until `end_large_turn`, and
        for a pause. Meanwhile the thread `large` does all work for the large body, so that the share's other requests
        do not lengthen the turn.

        Raises `InvalidRequest`, `HttpError` 415, and the errors of `BodyPace.whole_body` and of `CountedRequest.hold`.
        """
        _check_content_type(request)
        place: CountedRequest = request.state.place
        body = await self._pace.whole_body(request.headers, request.stream(), place.add)
        held.callback(place.release)
        # In a thread, because it would block the event loop.
        if len(body) <= LARGE_BYTES:
            return await self._parsed(request, body, model)
        record = log_context(request)
        turn = await self._turns.take(record.share, record.conversation)
        loop = asyncio.get_running_loop()
        took_s, began = 0.0, loop.time()

        def give_back() -> None:
            request.state.is_large = False
            pause = _PAUSE_BESIDE if self._is_computing() else _PAUSE
            loop.call_later(pause * took_s, self._turns.give_back, turn)

        request.state.is_large, request.state.large_turn = True, held.enter_context(ExitStack())
        request.state.large_turn.callback(give_back)
        try:
            return await self._parsed(request, body, model)
        finally:
            took_s = loop.time() - began

    async def _parsed(self, request: Request, body: bytes, model: type[Model]) -> Model:
        """Parses a body on a thread, and counts its memory."""
        parsed: tuple[Model, int] = await self._threads.run_for(request, "parsing", _parse, body, model)
        place: CountedRequest = request.state.place
        place.hold(parsed[1])
        return parsed[0]


def end_large_turn(request: Request) -> None:
    """Ends the turn of a large body early, if the request has one: see `Bodies.read_json`."""
    if (turn := getattr(request.state, "large_turn", None)) is not None:
        turn.close()


def _parse(body: bytes, model: type[Model]) -> tuple[Model, int]:
    """Returns the body as `model`, and the most bytes of memory that it takes: up to some 40 for each byte."""
    counted = count_values([body])
    if counted.too_many:
        raise InvalidRequest(f"the body has {counted.too_many}", code="body_too_complex")
    parsed = parse_json(body, model)
    return parsed, _OWN_BYTES + counted.num_bytes + _text_bytes(body)


def _text_bytes(body: bytes) -> int:
    """Returns the most bytes that the characters of a body take in memory: the widest one of a text sets the width of
    all."""
    text = body.decode("utf-8-sig")
    escaped = 4 if rb"\ud" in body or rb"\uD" in body else 2 if rb"\u" in body else 1
    return max(sys.getsizeof(text), escaped * len(text))


def _check_content_type(request: Request) -> None:
    """Raises `HttpError` 415 unless the content type is absent, JSON, a form (from `curl -d`) or plain text (from
    `fetch`).

    Without a preflight request, a page of another site can send each of these but JSON. `BrowserGuard` has refused such
    requests by their `Origin`. Old browsers send no `Origin` with a form, and a form can spell JSON only as plain text:
    plain text from a form is refused here.
    """
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise HttpError(415, f"content-encoding {shown(encoding)} is not supported; send the body uncompressed")
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind in ("application/json", "application/x-www-form-urlencoded") or kind.endswith("+json"):
        return
    if kind == "text/plain" and not _is_from_a_form(request.headers):
        return
    problem = f"content-type {shown(kind)} is not supported" if kind else "the content-type is empty"
    raise HttpError(415, f"{problem}; send application/json")


def _is_from_a_form(headers: Headers) -> bool:
    """Returns whether a browser sent the body as a form, and wants to show the answer as a page."""
    return (
        "upgrade-insecure-requests" in headers
        or headers.get("sec-fetch-mode") == "navigate"
        or "text/html" in headers.get("accept", "").lower()
    )


def parse_json(body: bytes, model: type[Model]) -> Model:
    """Returns `body` as `model`. Raises `InvalidRequest` with one line about the first error."""
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object", code="invalid_json")
    try:
        text = whole_characters(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid UTF-8 (byte {error.start}: 0x{body[error.start]:02x})", code="invalid_utf8"
        ) from error
    try:
        parsed = model.model_validate_json(text)
    except ValidationError as error:
        if text.lstrip().startswith("{") and (below := path_below(text)):
            levels = f"has more than {MAX_LEVELS} objects and lists inside each other"
            raise InvalidRequest.at(shown(".".join(map(str, below))), levels, "body_too_complex") from error
        raise _refusal_of(error) from error
    note_misspelt([*_misspelt(parsed, _require_finite(text))])
    return parsed


def read_parameters(request: Request, model: type[Model]) -> Model:
    """Returns the parameters in a request's query, and `x-…` in its headers. Raises `InvalidRequest`."""
    names = [field.alias or name for name, field in model.model_fields.items()]
    sources = {name: request.headers if name.startswith("x-") else request.query_params for name in names}
    try:
        return model.model_validate({name: source[name] for name, source in sources.items() if name in source})
    except ValidationError as error:
        raise _refusal_of(error) from error


def _misspelt(parsed: BaseModel, sent: object, path: str = "") -> Iterator[str]:
    """Yields the unknown fields of a body, and of the objects in its fields, that are like a known one."""
    if not isinstance(sent, dict) or type(parsed).model_config.get("extra") == "allow":
        return
    unknown = (name for name in sent if name not in type(parsed).model_fields and len(name) <= _NAME_CHARS)
    for name in islice(unknown, _MOST_UNKNOWN):
        if (meant := _meant(type(parsed), name)) is not None:
            yield f"{path}{name} (meant: {path}{meant}?)"
    for name in type(parsed).model_fields:
        if isinstance(below := getattr(parsed, name), BaseModel):
            yield from _misspelt(below, sent.get(name), f"{path}{name}.")


def _meant(model: type[BaseModel], name: str) -> str | None:
    """Returns the field of a model that is like an unknown name, None if there is none or `name` is its alias."""
    known = {field.alias or own for own, field in model.model_fields.items()}
    return None if name in known else nearest(name, known, _LIKE)


def _require_finite(text: str) -> Any:
    """Returns the parsed text, None if only pydantic parses it. Raises `InvalidRequest` for NaN, infinity, and numbers
    too large for a float: no reply could repeat them.

    pydantic refuses them where a number is expected, but not inside free-form objects, such as schemas. msgspec refuses
    them everywhere, but does not say where.
    """
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        for param in _infinite(json.loads(text), ()):
            raise InvalidRequest.at(param, "must be a finite number") from None
    return None


def _infinite(value: object, path: tuple[object, ...]) -> Iterator[str]:
    """Yields the paths of numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield shown(".".join(map(str, path)))
    elif isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _infinite(part, (*path, key))


def _refusal_of(error: ValidationError) -> InvalidRequest:
    """Returns the first error of pydantic in the words of this API."""
    at, problem, kind = first_error(error)
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {problem}", code="invalid_json")
    if not at:
        return InvalidRequest("the body must be a JSON object", code="invalid_json")
    return InvalidRequest.at(at, problem)
