"""The limits by which shares divide a daemon: bytes of bodies and their pace, requests in flight, and turns."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from diskprefix.daemon.api.error_forms import HttpError
from diskprefix.daemon.server.share import Share
from diskprefix.daemon.settings import Settings
from diskprefix.errors import QueueFull, ShareFull
from diskprefix.units import format_size

if TYPE_CHECKING:
    from starlette.types import Scope

MAX_BODY_BYTES = 32 * 1024**2
LARGE_BYTES = 1 << 20
"""A larger body lets all others go first. Agents send smaller ones."""
_MAX_BODIES = 4
"""The limit for the bytes of bodies that wait, as a multiple of the largest body."""
_OF_ADDRESSES = 2
"""Equal parts of addresses, of which anybody may have many, end at this multiple of a limit."""
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
    """The requests whose answers have not ended, and the bytes of the bodies that wait: as they were sent while they
    arrive, and then as they are in memory. For the event loop.

    Each share may take what is free, and always has an equal part of each limit, even if others have taken all of it.
    """

    def __init__(self, settings: Settings) -> None:
        self.max_requests = settings.max_queue + settings.max_sequences
        self._max_others = settings.max_sequences
        """The most requests above the limit of conversations that have no other request in flight."""
        self._of: Counter[Share] = Counter()
        self._of_conversation: Counter[tuple[Share, str]] = Counter()
        self.bytes_of: Counter[Share] = Counter()

    @property
    def num(self) -> int:
        return self._of.total()

    def counted(self, scope: Scope, share: Share, conversation: str = "") -> AbstractContextManager[CountedRequest]:
        """Counts a request until the returned context ends, if it may take memory: it has a body, or asks for a stored
        response. A body of declared length must have room. Its bytes count as they arrive, so that a body that never
        arrives takes no room.

        Raises `ShareFull` if the share has more than its part of the requests in flight, `QueueFull` if it is alone. A
        conversation with no request in flight has a place although others of its share have taken all.
        """
        if scope["method"] != "POST" and not scope["path"].startswith("/v1/responses"):
            return self._until_end(share, conversation, 0)
        is_first = self._of[share] and not self._of_conversation[share, conversation]
        has_spare = is_first and self._of[share] < self.max_requests + self._max_others
        if not has_spare and not self._fits(self._of, share, 1, self.max_requests, 1):
            raise self._refusal(
                self._of, share, f"{self.max_requests} requests are not answered yet", " or raise --max-queue"
            )
        declared = dict(scope["headers"]).get(b"content-length", b"").decode("latin-1")
        # A larger body is refused with a 413 when it is read.
        self.require_room(share, min(_declared(declared), MAX_BODY_BYTES))
        self._of[share] += 1
        self._of_conversation[share, conversation] += 1
        return self._until_end(share, conversation, 1)

    def require_room(self, share: Share, num_bytes: int, own_bytes: int = 0) -> None:
        """Raises `ShareFull` or `QueueFull` if there is no room for `num_bytes` more of a body, which has `own_bytes`
        already. Each share has room for one body."""
        limit = _MAX_BODIES * MAX_BODY_BYTES
        # In memory, one body may take more than its part.
        least = MAX_BODY_BYTES if self.bytes_of[share] > own_bytes else max(MAX_BODY_BYTES, own_bytes + num_bytes)
        if not self._fits(self.bytes_of, share, num_bytes, limit, least):
            raise self._refusal(self.bytes_of, share, f"the bodies that wait may have {format_size(limit)} together")

    @staticmethod
    def _fits(counts: Counter[Share], share: Share, number: int, limit: int, least: int) -> bool:
        """Returns whether a share may have `number` more: the limit of all is not reached, or the share has at most its
        part, which is not less than `least`."""
        total = counts.total() + number
        part = max(least, limit // len({*counts, share}))
        has_part = share.is_known or total <= _OF_ADDRESSES * limit
        return total <= limit or (counts[share] + number <= part and has_part)

    @staticmethod
    def _refusal(counts: Counter[Share], share: Share, reason: str, remedy: str = "") -> QueueFull:
        kind = ShareFull if counts.keys() - {share} else QueueFull
        of_all = ", and this client has its part of them" if kind is ShareFull else ""
        return kind(f"{reason}{of_all}; try again later{remedy}", retry_after_s=_RETRY_AFTER_S)

    @contextmanager
    def _until_end(self, share: Share, conversation: str, number: int) -> Iterator[CountedRequest]:
        place = CountedRequest(self, share)
        try:
            yield place
        finally:
            place.release()
            self._of -= Counter({share: number})
            self._of_conversation -= Counter({(share, conversation): number})


class CountedRequest:
    """One request in flight, and the bytes of its body that are in memory."""

    def __init__(self, in_flight: InFlight, share: Share) -> None:
        self._in_flight, self._share = in_flight, share
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Counts bytes that have arrived. Raises the errors of `InFlight.require_room`."""
        self._in_flight.require_room(self._share, num_bytes, self.num_bytes)
        self._count(num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Counts the parsed body, which takes `num_bytes`, in place of what has arrived. Raises the errors of
        `InFlight.require_room`."""
        more = num_bytes - self.num_bytes
        if more > 0:
            self._in_flight.require_room(self._share, more, self.num_bytes)
        self._count(more)

    def _count(self, num_bytes: int) -> None:
        self._in_flight.bytes_of += Counter({self._share: num_bytes})
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Gives back the room of the body, which is no longer in memory."""
        self._in_flight.bytes_of -= Counter({self._share: self.num_bytes})
        self.num_bytes = 0


class GivenTurn(Struct, eq=False, frozen=True):
    """A turn of a conversation of a share."""

    share: Share
    conversation: str


class Turns:
    """Lets `max_working` turns go on at a time, one share after the other, and within a share one conversation after
    the other. A share has at most half of the places, and a conversation a quarter, but at least one. For the event
    loop.

    Work that takes longer than `patience_s` gives up its place, so that other work goes on beside it. At most
    `max_beside` turns go on without a place, half of them of one share and a quarter of one conversation. So slow work
    cannot take all places for long.
    """

    def __init__(self, max_working: int, patience_s: float = math.inf, max_beside: int = 0) -> None:
        self._max_working = max_working
        self._patience_s, self._max_beside = patience_s, max_beside
        self._working: dict[GivenTurn, asyncio.TimerHandle | None] = {}
        """The turns, each with the timer that takes its place from it."""
        self._long: set[GivenTurn] = set()
        """The turns that have lasted longer than `patience_s`."""
        self._resting: Counter[Share] = Counter()
        """The shares that get no turn for a while after their last one."""
        self._waiting: list[tuple[GivenTurn, asyncio.Future[None]]] = []
        self._num_given = 0
        self._last: dict[Share | tuple[Share, str], int] = {}
        """The number of the last turn of each share and of each conversation. Cleared when nobody works."""

    @asynccontextmanager
    async def of(self, share: Share, conversation: str) -> AsyncIterator[None]:
        """A context for one turn."""
        turn = await self.take(share, conversation)
        try:
            yield
        finally:
            self.give_back(turn)

    async def take(self, share: Share, conversation: str) -> GivenTurn:
        """Waits for a turn, and takes it."""
        item = turn, given = GivenTurn(share, conversation), asyncio.get_running_loop().create_future()
        self._waiting.append(item)
        self._give()
        try:
            await given
        except asyncio.CancelledError:
            if item in self._waiting:
                self._waiting.remove(item)
            else:
                self.give_back(turn)
            raise
        return turn

    def give_back(self, turn: GivenTurn, rest_s: float = 0.0) -> None:
        """Ends a turn. Its share gets no other one for `rest_s`."""
        if (timer := self._working.pop(turn)) is not None:
            timer.cancel()
        self._long.discard(turn)
        if rest_s:
            self._resting[turn.share] += 1
            asyncio.get_running_loop().call_later(rest_s, self._end_rest, turn.share)
        self._give()

    def _lose_place(self, turn: GivenTurn) -> None:
        self._long.add(turn)
        self._give()

    def _end_rest(self, share: Share) -> None:
        self._resting[share] -= 1
        self._give()

    def _give(self) -> None:
        # Bound: each round gives a turn to one that waits.
        while able := [item for item in self._waiting if self._may_work(item[0])]:
            item = turn, given = min(able, key=lambda item: self._order(item[0]))
            self._waiting.remove(item)
            self._num_given += 1
            self._last[turn.share] = self._last[turn.share, turn.conversation] = self._num_given
            loop = asyncio.get_running_loop()
            has_timer = bool(self._max_beside)
            self._working[turn] = loop.call_later(self._patience_s, self._lose_place, turn) if has_timer else None
            # A cancelled `take` gives the turn back itself.
            if not given.done():
                given.set_result(None)
        if not self._working:
            self._last.clear()

    def _order(self, turn: GivenTurn) -> tuple[int, int]:
        return self._last.get(turn.share, 0), self._last.get((turn.share, turn.conversation), 0)

    def _may_work(self, turn: GivenTurn) -> bool:
        of_share = [other for other in self._working if other.share == turn.share]
        of_conversation = [other for other in of_share if other.conversation == turn.conversation]
        has_room = self._has_room(self._working, 1) and self._has_room(of_share, 2)
        return has_room and self._has_room(of_conversation, 4) and not self._resting[turn.share]

    def _has_room(self, turns: Collection[GivenTurn], divisor: int) -> bool:
        """Returns whether there is room beside these turns in a part of the places."""
        num_beside = min(len(self._long.intersection(turns)), self._max_beside // divisor)
        return len(turns) - num_beside < max(1, self._max_working // divisor)
