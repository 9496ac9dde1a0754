"""The limits by which callers share a daemon: bytes of bodies and their pace, requests in flight, and turns.

A caller is the `account` of a `keys.Caller`: an API key, whatever salts its requests have. Without keys, all clients
are one caller.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from diskprefix.api.error_forms import HttpError
from diskprefix.errors import QueueFull, ShareFull
from diskprefix.settings import Settings
from diskprefix.units import format_size
from diskprefix.values import SHARED, Tenant

if TYPE_CHECKING:
    from starlette.types import Scope

MAX_BODY_BYTES = 32 * 1024**2
LARGE_BYTES = 1 << 20
"""A larger body lets all others go first. Agents send smaller ones."""
_MAX_BODIES, _MAX_BODIES_OF_KEY = 4, 2
"""Bytes of bodies that wait, as multiples of the largest body: of all callers, and of one key."""
_PATIENCE_S, _MIN_BYTES_PER_S = 30.0, 16 * 1024
"""The time for a body to arrive, and the least rate: 128 kbit/s suffice for any size."""
_BYTES_PER_S, _BYTES_PER_S_BESIDE = 64 << 20, 8 << 20
"""The rates at which all large bodies are read: alone, and while the engine computes."""
_RETRY_AFTER_S = 2


class BodyPace:
    """Slows the reading of large bodies: their sockets are not read for a while. For the event loop."""

    def __init__(self, is_computing: Callable[[], bool] = lambda: False) -> None:
        """`is_computing` tells whether the engine has requests."""
        self._is_computing = is_computing
        self._read_until = 0.0
        """The time, on the loop's clock, before which no more of a large body is read."""

    async def whole_body(
        self, headers: Mapping[str, str], pieces: AsyncIterable[bytes], add: Callable[[int], None] = lambda _: None
    ) -> bytes:
        """Returns a body. Raises `HttpError` 413 or 408 for a large or slow one, and errors of `add`, which counts."""
        too_large = HttpError(413, f"the body is larger than {format_size(MAX_BODY_BYTES)}")
        if _declared(headers.get("content-length", "")) > MAX_BODY_BYTES:
            raise too_large
        loop, body, num_bytes = asyncio.get_running_loop(), list[bytes](), 0
        began = loop.time()
        try:
            async with asyncio.timeout(_PATIENCE_S) as limit:
                async for piece in pieces:
                    body.append(piece)
                    num_bytes += len(piece)
                    if num_bytes > MAX_BODY_BYTES:
                        raise too_large
                    add(len(piece))
                    limit.reschedule(began + _PATIENCE_S + num_bytes / _MIN_BYTES_PER_S)
                    if num_bytes > LARGE_BYTES:
                        rate = _BYTES_PER_S_BESIDE if self._is_computing() else _BYTES_PER_S
                        self._read_until = max(loop.time(), self._read_until) + len(piece) / rate
                        await asyncio.sleep(self._read_until - loop.time())
        except TimeoutError as error:
            raise HttpError(408, f"the body did not arrive in time; {num_bytes} bytes of it did") from error
        return b"".join(body)


def _declared(content_length: str) -> int:
    return int(content_length) if content_length.isdigit() else 0


class InFlight:
    """The requests whose answers have not ended, and the bytes of the bodies that wait. For the event loop."""

    def __init__(self, settings: Settings) -> None:
        self.max_requests = settings.max_queue + settings.max_sequences
        self.max_of_key = max(1, settings.max_queue // 2) + settings.max_sequences
        self._has_keys = settings.api_keys is not None
        self._of: Counter[Tenant] = Counter()
        self.bytes_of: Counter[Tenant] = Counter()

    @property
    def num(self) -> int:
        return self._of.total()

    def counted(self, scope: Scope, caller: Tenant) -> AbstractContextManager[CountedRequest]:
        """Counts a request until the returned context ends, if it may take memory: it has a body, or asks for a stored
        response. A body of declared length must have room. Its bytes count as they arrive, so that a body that never
        arrives takes no room.

        Raises `ShareFull` if the key has too many requests in flight, `QueueFull` if all callers together have too
        many. A key with no request in flight always has a place, and room for a body.
        """
        if scope["method"] != "POST" and not scope["path"].startswith("/v1/responses"):
            return self._until_end(caller, 0)
        if caller != SHARED and self._of[caller] >= self.max_of_key:
            raise ShareFull(
                f"{self.max_of_key} requests with this API key are not answered yet, and the other places are for "
                "others; try again later or raise --max-queue",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self.num >= self.max_requests and not (self._has_keys and not self._of[caller]):
            raise QueueFull(
                f"{self.max_requests} requests are not answered yet; try again later or raise --max-queue",
                retry_after_s=_RETRY_AFTER_S,
            )
        declared = dict(scope["headers"]).get(b"content-length", b"").decode("latin-1")
        # A larger body is refused with a 413 when it is read.
        self.require_room(caller, min(_declared(declared), MAX_BODY_BYTES))
        self._of[caller] += 1
        return self._until_end(caller, 1)

    def require_room(self, caller: Tenant, num_bytes: int) -> None:
        """Raises `ShareFull` or `QueueFull` if there is no room for `num_bytes` more of bodies."""
        held, whose = self.bytes_of[caller] + num_bytes, ""
        if caller != SHARED and held > _MAX_BODIES_OF_KEY * MAX_BODY_BYTES:
            error: type[QueueFull] = ShareFull
            limit, whose = _MAX_BODIES_OF_KEY * MAX_BODY_BYTES, " with this API key"
        elif self.bytes_of.total() + num_bytes > _MAX_BODIES * MAX_BODY_BYTES and not (
            self._has_keys and held <= MAX_BODY_BYTES
        ):
            error, limit = QueueFull, _MAX_BODIES * MAX_BODY_BYTES
        else:
            return
        said = f"the bodies of requests{whose} that wait may have {format_size(limit)} together; try again later"
        raise error(said, retry_after_s=_RETRY_AFTER_S)

    @contextmanager
    def _until_end(self, caller: Tenant, number: int) -> Iterator[CountedRequest]:
        place = CountedRequest(self, caller)
        try:
            yield place
        finally:
            place.release()
            self._of -= Counter({caller: number})


class CountedRequest:
    """One request in flight, and the bytes of its body that are in memory."""

    def __init__(self, in_flight: InFlight, caller: Tenant) -> None:
        self._in_flight, self._caller = in_flight, caller
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Counts bytes that have arrived. Raises the errors of `InFlight.require_room`."""
        self._in_flight.require_room(self._caller, num_bytes)
        self._in_flight.bytes_of[self._caller] += num_bytes
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Gives back the room of the body, which is no longer in memory."""
        self._in_flight.bytes_of -= Counter({self._caller: self.num_bytes})
        self.num_bytes = 0


class Turns:
    """Lets `max_working` callers work at a time, one turn each, the least recent first. For the event loop.

    Work that takes longer than `patience_s` keeps its turn and gives up its place, so that another caller works beside
    it. At most `max_beside` callers work without a place. So slow work cannot take all places for long.
    """

    def __init__(self, max_working: int, patience_s: float = math.inf, max_beside: int = 0) -> None:
        self._max_working = max_working
        self._patience_s, self._max_beside = patience_s, max_beside
        self._long: set[Hashable] = set()
        """The callers whose work takes longer than `patience_s`. At most `max_beside` of them have no place."""
        self._timers: dict[Hashable, asyncio.TimerHandle] = {}
        self._working: set[Hashable] = set()
        self._resting: set[Hashable] = set()
        """The callers that get no turn for a while after their last one."""
        self._waiting: list[tuple[Hashable, asyncio.Future[None]]] = []
        self._num_given = 0
        self._last: dict[Hashable, int] = {}
        """The number of each caller's last turn. Cleared when nobody works."""

    @asynccontextmanager
    async def of(self, caller: Hashable) -> AsyncIterator[None]:
        """A context for one turn."""
        await self.take(caller)
        try:
            yield
        finally:
            self.give_back(caller)

    async def take(self, caller: Hashable) -> None:
        """Waits for a turn, and takes it."""
        item = caller, asyncio.get_running_loop().create_future()
        self._waiting.append(item)
        self._give()
        try:
            await item[1]
        except asyncio.CancelledError:
            if item in self._waiting:
                self._waiting.remove(item)
            else:
                self.give_back(caller)
            raise

    def give_back(self, caller: Hashable, rest_s: float = 0.0) -> None:
        """Ends a turn. The caller gets no other one for `rest_s`."""
        self._working.remove(caller)
        self._long.discard(caller)
        if caller in self._timers:
            self._timers.pop(caller).cancel()
        if rest_s:
            self._resting.add(caller)
            asyncio.get_running_loop().call_later(rest_s, self._end_rest, caller)
        self._give()

    def _lose_place(self, caller: Hashable) -> None:
        del self._timers[caller]
        self._long.add(caller)
        self._give()

    def _end_rest(self, caller: Hashable) -> None:
        self._resting.remove(caller)
        self._give()

    def _give(self) -> None:
        while len(self._working) - min(len(self._long), self._max_beside) < self._max_working:
            busy = self._working | self._resting
            able = [item for item in self._waiting if item[0] not in busy]
            if not able:
                break
            item = min(able, key=lambda item: self._last.get(item[0], 0))
            self._waiting.remove(item)
            self._num_given += 1
            self._last[item[0]] = self._num_given
            self._working.add(item[0])
            if self._max_beside:
                loop = asyncio.get_running_loop()
                self._timers[item[0]] = loop.call_later(self._patience_s, self._lose_place, item[0])
            # A cancelled `take` gives the turn back itself.
            if not item[1].done():
                item[1].set_result(None)
        if not self._working:
            self._last.clear()
