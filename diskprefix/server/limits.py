"""The three limits by which callers share a daemon: bytes of a body, requests in flight, and turns.

A caller is the `account` of a `keys.Caller`: an API key, whatever salts its requests have. Without keys, all are one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from diskprefix.api.error_forms import HttpError
from diskprefix.errors import QueueFull, ShareFull
from diskprefix.nouns import SHARED, Tenant
from diskprefix.settings import Settings
from diskprefix.units import format_size

if TYPE_CHECKING:
    from starlette.types import Scope

MAX_BODY_BYTES = 32 * 1024**2
_PATIENCE_S, _LEAST_BYTES_PER_S = 30.0, 16 * 1024
"""The time for a body to arrive, and the least rate: 128 kbit/s suffice for any size."""
_RETRY_AFTER_S = 2


async def whole_body(headers: Mapping[str, str], pieces: AsyncIterable[bytes]) -> bytes:
    """Returns a body that arrives in pieces. Raises `HttpError` 413 if it is too large, 408 if it comes too slowly."""
    too_large = HttpError(413, f"the body is larger than {format_size(MAX_BODY_BYTES)}")
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise too_large
    body, began = bytearray(), asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(_PATIENCE_S) as limit:
            async for piece in pieces:
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
                limit.reschedule(began + _PATIENCE_S + len(body) / _LEAST_BYTES_PER_S)
    except TimeoutError as error:
        raise HttpError(408, f"the body did not arrive in time; {len(body)} bytes of it did") from error
    return bytes(body)


class InFlight:
    """The requests that are not answered to their end: their bodies arrive, they wait, run, or are being read. For the
    event loop."""

    def __init__(self, settings: Settings) -> None:
        self.most = settings.max_queue + settings.max_sequences
        self.most_of_key = max(1, settings.max_queue // 2) + settings.max_sequences
        self._of: Counter[Tenant] = Counter()

    @property
    def num(self) -> int:
        return self._of.total()

    def counted(self, scope: Scope, caller: Tenant) -> AbstractContextManager[None]:
        """Counts a request until the returned context ends, if it may take memory: one with a body, or for a stored
        response.

        Raises `ShareFull` for a key with too many of them, `QueueFull` if there are too many of all callers. A key that
        has none in flight has a place whatever others do.
        """
        if scope["method"] != "POST" and not scope["path"].startswith("/v1/responses"):
            return nullcontext()
        if caller != SHARED and self._of[caller] >= self.most_of_key:
            raise ShareFull(
                f"{self.most_of_key} requests with this API key are not answered yet, and the other places are for "
                "others; try again later or raise --max-queue",
                retry_after_s=_RETRY_AFTER_S,
            )
        if self.num >= self.most and (caller == SHARED or self._of[caller]):
            raise QueueFull(
                f"{self.most} requests are not answered yet; try again later or raise --max-queue",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._of[caller] += 1
        return self._until_end(caller)

    @contextmanager
    def _until_end(self, caller: Tenant) -> Iterator[None]:
        try:
            yield
        finally:
            self._of -= Counter({caller: 1})


class Turns:
    """Lets a number of callers work at a time, each on one thing. Who had a turn longest ago comes first. For the event
    loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._working: set[Hashable] = set()
        self._waiting: list[tuple[Hashable, asyncio.Future[None]]] = []
        self._num_given = 0
        self._last: dict[Hashable, int] = {}
        """The number of the last turn of each caller, while any works."""

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

    def give_back(self, caller: Hashable) -> None:
        self._working.remove(caller)
        self._give()

    def _give(self) -> None:
        while len(self._working) < self._most:
            able = [item for item in self._waiting if item[0] not in self._working]
            if not able:
                break
            item = min(able, key=lambda item: self._last.get(item[0], 0))
            self._waiting.remove(item)
            self._num_given += 1
            self._last[item[0]] = self._num_given
            self._working.add(item[0])
            # One that was cancelled gives its turn back when it notices.
            if not item[1].done():
                item[1].set_result(None)
        if not self._working:
            self._last.clear()
