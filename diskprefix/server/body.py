"""Reads JSON bodies within limits of size, time and memory, and parses them strictly. Errors name the field."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from fastapi.exceptions import HTTPException
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from diskprefix.api.fields import REFUSED
from diskprefix.errors import GOT, InvalidRequest, QueueFull, ShareFull
from diskprefix.json_values import count_values
from diskprefix.nouns import Tenant
from diskprefix.printable import shown
from diskprefix.server.threads import Kind, QueuePlace, Threads
from diskprefix.units import format_size

Model = TypeVar("Model", bound=BaseModel)

_SHOWN_CHARS = 60
_PATIENCE_S, _LEAST_BYTES_PER_S = 30.0, 16 * 1024
"""The time for a body to arrive or a large reply to be read, and the least rate: 128 kbit/s suffice for any size."""

_SMALL_BYTES, _LARGE_BYTES = 64 * 1024, 1 << 20
"""Sizes of bodies. The length of the queue bounds the memory of small ones, and they never wait. Large ones,
above those of agents, let all others go first."""
_LARGE_BYTES_PER_S, _BESIDE_BYTES_PER_S = 64 << 20, 8 << 20
"""The rates at which all large bodies are read, which takes the event loop's time: alone, and beside the engine."""
_PAUSE, _PAUSE_BESIDE = 1, 7
"""The pause after parsing a large body, as a multiple of the time of parsing: alone, and while the engine computes."""
_BODIES_ARRIVING, _BODIES_OF_ONE, _BODIES_IN_MEMORY = 8, 4, 8
"""Bodies of the largest size that may be arriving or wait for memory, those of one caller, and the memory of those that
are parsed and rendered: 256, 128 and 256 MiB, if a body may have 32."""
_MEMORY_PER_BYTE, _MEMORY_PER_PART, _MEMORY_PER_VALUE = 6, 512, 40
"""Bytes that a byte of a body, a part and a value take until its prompt is rendered, at most. Measured."""


@asynccontextmanager
async def patience() -> AsyncIterator[Callable[[int], None]]:
    """Bounds the time of a transfer. Call the yielded function with the number of bytes that have passed so far.

    Raises `TimeoutError` if the peer is too slow.
    """
    started = asyncio.get_running_loop().time()
    async with asyncio.timeout_at(started + _PATIENCE_S) as limit:
        yield lambda num_bytes: limit.reschedule(started + _PATIENCE_S + num_bytes / _LEAST_BYTES_PER_S)


class Bodies:
    """Reads the bodies of requests, and bounds the memory of those that are read, parsed and rendered at one time."""

    def __init__(self, max_bytes: int, threads: Threads, is_computing: Callable[[], bool] = lambda: False) -> None:
        """`max_bytes` is the largest size of a body. `is_computing` tells whether the engine has requests."""
        self._max_bytes = max_bytes
        self._threads = threads
        self._is_computing = is_computing
        self._arriving_bytes: Counter[Tenant] = Counter()
        self._memory = _Budget(_BODIES_IN_MEMORY * max_bytes)
        self._parsing_turn = asyncio.Lock()
        self._read_until = 0.0
        """The time, on the loop's clock, before which no more of a large body is read."""

    async def read_json(self, request: Request, model: type[Model], place: QueuePlace) -> Model:
        """Returns the body as `model`. Its memory counts until `place.memory` is closed.

        A large body waits until there is memory for it. Raises `InvalidRequest`, `HTTPException` with status 408, 413
        or 415, or `QueueFull` if too much of other bodies has arrived.
        """
        _check_content_type(request)
        with ExitStack() as arriving:
            body = await self._read(request, arriving, place.caller)
            place.is_large = len(body) > _LARGE_BYTES
            kind: Kind = "large" if place.is_large else "parsing"
            if len(body) > _SMALL_BYTES:
                await self._memory.take(await self._threads.run(kind, _memory_of, body), place)
            # In a thread, because a large body would block the event loop.
            if place.is_large:
                return await self._parse_large(body, model)
            return await self._threads.run("parsing", parse_json, body, model)

    async def _read(self, request: Request, arriving: ExitStack, caller: Tenant) -> bytes:
        too_large = HTTPException(
            413, f"the body is larger than {format_size(self._max_bytes)} (--max-body-bytes)", {"Connection": "close"}
        )
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_bytes:
            raise too_large
        body = bytearray()
        arriving.callback(lambda: self._forget(caller, len(body)))
        try:
            async with patience() as extend:
                async for chunk in request.stream():
                    body += chunk
                    self._arriving_bytes[caller] += len(chunk)
                    if len(body) > self._max_bytes:
                        raise too_large
                    if len(body) > _SMALL_BYTES:
                        self._require_room(caller)
                    if len(body) > _LARGE_BYTES:
                        await self._pause(len(chunk))
                    extend(len(body))
        except TimeoutError as error:
            message = f"the body did not arrive in time; {len(body)} bytes of it did"
            raise HTTPException(408, message, {"Connection": "close"}) from error
        return bytes(body)

    async def _parse_large(self, body: bytes, model: type[Model]) -> Model:
        """Parses one body after the other, with a pause behind each for the engine and the requests of others."""
        took_s = 0.0

        def timed() -> Model:
            nonlocal took_s
            began = time.perf_counter()
            try:
                return parse_json(body, model)
            finally:
                took_s = time.perf_counter() - began

        await self._parsing_turn.acquire()
        try:
            return await self._threads.run("large", timed)
        finally:
            pause = _PAUSE_BESIDE if self._is_computing() else _PAUSE
            asyncio.get_running_loop().call_later(pause * took_s, self._parsing_turn.release)

    async def _pause(self, num_bytes: int) -> None:
        """Waits until large bodies may have `num_bytes` more. The client waits too: the socket is not read."""
        now = asyncio.get_running_loop().time()
        rate = _BESIDE_BYTES_PER_S if self._is_computing() else _LARGE_BYTES_PER_S
        self._read_until = max(now, self._read_until) + num_bytes / rate
        await asyncio.sleep(max(0.0, self._read_until - now))

    def _require_room(self, caller: Tenant) -> None:
        if self._arriving_bytes[caller] > _BODIES_OF_ONE * self._max_bytes:
            raise ShareFull("your other large bodies are being read; try again later", retry_after_s=1)
        if self._arriving_bytes.total() > _BODIES_ARRIVING * self._max_bytes:
            raise QueueFull("other requests with large bodies are being read; try again later", retry_after_s=1)

    def _forget(self, caller: Tenant, num_bytes: int) -> None:
        self._arriving_bytes -= Counter({caller: num_bytes})


class _Budget:
    """Memory, given to the caller who has had the least: many bodies of one caller delay those of another by one."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = self._free = num_bytes
        self._waiting: list[tuple[Tenant, int, asyncio.Future[None]]] = []
        self._given: Counter[Tenant] = Counter()
        """Bytes, to those who wait and those who waited beside them."""

    async def take(self, num_bytes: int, place: QueuePlace) -> None:
        """Waits for memory, and takes it until `place.memory` is closed. What is more than all gets all."""
        wanted = min(num_bytes, self._num_bytes)
        given = asyncio.get_running_loop().create_future()
        item = (place.caller, wanted, given)
        self._waiting.append(item)
        self._give_next()
        try:
            await given
        except asyncio.CancelledError:
            if item in self._waiting:
                self._waiting.remove(item)
            if not given.cancelled():
                self._free += wanted
            self._give_next()
            raise
        place.memory.callback(self._take_back, wanted)

    def _take_back(self, num_bytes: int) -> None:
        self._free += num_bytes
        self._give_next()

    def _give_next(self) -> None:
        self._waiting = [one for one in self._waiting if not one[2].cancelled()]
        while self._waiting:
            item = min(self._waiting, key=lambda one: self._given[one[0]])
            caller, wanted, given = item
            if wanted > self._free:
                return
            self._free -= wanted
            self._given[caller] += wanted
            self._waiting.remove(item)
            given.set_result(None)
        self._given.clear()


def _memory_of(body: bytes) -> int:
    """Returns the most bytes that a body takes until its prompt is rendered. Raises `InvalidRequest`."""
    counted = count_values([body])
    if counted.too_many:
        raise InvalidRequest(f"the body has {counted.too_many}", code="body_too_complex")
    return _MEMORY_PER_BYTE * len(body) + _MEMORY_PER_PART * counted.parts + _MEMORY_PER_VALUE * counted.values


def _check_content_type(request: Request) -> None:
    """Raises `HTTPException` 415 unless the content type is JSON, what `curl -d` sends, or absent.

    Web pages could send the latter two without asking; `BrowserGuard` has refused them before.
    """
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding != "identity":
        raise HTTPException(415, f"content-encoding {shown(encoding)} is not supported; send the body uncompressed")
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind in ("application/json", "application/x-www-form-urlencoded") or kind.endswith("+json"):
        return
    raise HTTPException(415, f"content-type {shown(kind) or 'of the body'} is not supported; send application/json")


def parse_json(body: bytes, model: type[Model]) -> Model:
    """Returns `body` as `model`. Raises `InvalidRequest` with one line about the first error."""
    if not body.strip():
        raise InvalidRequest("the body is empty; send a JSON object", code="invalid_json")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not valid UTF-8 (byte {error.start}: 0x{body[error.start]:02x})", code="invalid_utf8"
        ) from error
    try:
        found = model.model_validate_json(text)
    except ValidationError as error:
        raise refusal_of(error.errors(include_url=False)[0]) from error
    _require_finite(text)
    return found


def _require_finite(text: str) -> None:
    """Raises `InvalidRequest` for a number that JSON does not know, or no float holds: no reply could repeat it.

    pydantic refuses it where a number is expected, but not inside objects of any content, such as schemas. msgspec
    refuses it everywhere, but does not say where.
    """
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        for param in _infinite(json.loads(text), ()):
            raise InvalidRequest.at(param, "must be a finite number") from None


def _infinite(value: object, path: tuple[object, ...]) -> Iterator[str]:
    """Yields the paths of numbers that are not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        yield shown(".".join(map(str, path)))
    elif isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _infinite(part, (*path, key))


def refusal_of(first: Any) -> InvalidRequest:
    """Returns an error of pydantic, which is a dict, in the words of this API."""
    if first["type"] == "json_invalid":
        reason = str(first.get("ctx", {}).get("error", first["msg"]))
        return InvalidRequest(f"the body is not valid JSON: {reason}", code="invalid_json")
    # The tags of unions, such as `~list`, are left out.
    param = shown(".".join(str(part) for part in first["loc"] if not str(part).startswith("~")))
    if not param:
        return InvalidRequest("the body must be a JSON object", code="invalid_json")
    return InvalidRequest.at(param, _explain(first))


def _explain(error: Any) -> str:
    """Returns pydantic's message in the words of this API, with the beginning of the wrong value."""
    match error["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            return "is not a known field"
        case "none_required":
            return "is not supported"
        case "too_short" | "string_too_short" if not error["input"]:
            return "must not be empty"
        case "too_long":
            return f"must have at most {error['ctx']['max_length']} items (got {error['ctx']['actual_length']})"
    if error["type"] == REFUSED:
        return str(error["msg"])
    message = (
        str(error["msg"])
        .replace("Input should be", "must be")
        .replace("String should", "must")
        .replace("valid array", "list")
    )
    return f"{message[:1].lower()}{message[1:]}{GOT}{_shown(error['input'])})"


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return shown(json.dumps(value, ensure_ascii=False), _SHOWN_CHARS)
