"""One request in the engine, as the event loop sees it. A client that leaves cancels its request at once."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from msgspec.structs import replace
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from diskprefix.daemon.engine.request import (
    DoneEvent,
    EchoEvent,
    ErrorEvent,
    Event,
    FinishEvent,
    GenerateRequest,
    ProgressEvent,
    ReadEvent,
    TextEvent,
    Usage,
)
from diskprefix.errors import DiskPrefixError

if TYPE_CHECKING:
    from diskprefix.daemon.engine.gauges import Activity
    from diskprefix.daemon.engine.inbox import Inbox

log = logging.getLogger("diskprefix")

LiveEvent: TypeAlias = ProgressEvent | TextEvent | ReadEvent | EchoEvent | FinishEvent | DoneEvent

MAX_WAITING_BYTES = 16 * 1024**2
"""The most bytes of events that wait for a slow client: about 65 000 tokens of plain text.

The engine does not wait for a client, because other requests wait for the engine.
"""
_BYTES_PER_EVENT, _BYTES_PER_TOKEN, _BYTES_PER_LOGPROB = 160, 36, 400
"""Memory that a `TextEvent` without its text, a token id and a `TokenLogprob` take, roughly."""


class EventBuffer:
    """The events of one request that wait to be sent, in order, within `MAX_WAITING_BYTES`.

    `get` joins adjacent texts of one choice, so that a slow client gets fewer, longer chunks. `put` may be called from
    any thread, `get` on the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._waiting: deque[Event | None] = deque()
        self._num_bytes = 0
        self._is_full = False
        self._filled = asyncio.Event()

    def put(self, event: Event | None) -> bool:
        """Adds an event; None stands for the client's disconnect. Returns False if it no longer fits.

        The first event that does not fit becomes an `ErrorEvent`, and all later ones are dropped.
        """
        with self._lock:
            if self._is_full:
                return False
            self._num_bytes += _size(event)
            if self._num_bytes > MAX_WAITING_BYTES:
                self._is_full = True
                event = ErrorEvent(DiskPrefixError("the client reads too slowly", code="client_too_slow"))
            was_empty = not self._waiting
            self._waiting.append(event)
        if was_empty:
            self._loop.call_soon_threadsafe(self._filled.set)
        return not self._is_full

    async def get(self) -> Event | None:
        """Returns the next event, or the texts that wait next as one event, and removes it. Waits if there is none."""
        while not (taken := self._take()):
            await self._filled.wait()
        texts = [event for event in taken if isinstance(event, TextEvent)]
        return _joined(texts) if len(texts) > 1 else taken[0]

    def _take(self) -> list[Event | None]:
        """Removes and returns the next event. If it is a text, the texts of its choice that follow it come too."""
        taken: list[Event | None] = []
        with self._lock:
            while self._waiting and (not taken or _is_continued(taken[0], self._waiting[0])):
                taken.append(self._waiting.popleft())
                self._num_bytes -= _size(taken[-1])
            if not taken:
                self._filled.clear()
        return taken


def _is_continued(event: Event | None, following: Event | None) -> bool:
    return isinstance(event, TextEvent) and isinstance(following, TextEvent) and event.choice == following.choice


def _joined(texts: list[TextEvent]) -> TextEvent:
    return TextEvent(
        texts[0].choice,
        "".join(event.text for event in texts),
        tuple(token_id for event in texts for token_id in event.token_ids),
        tuple(logprob for event in texts for logprob in event.logprobs),
    )


def _size(event: Event | None) -> int:
    """Returns the bytes that an event takes in memory, roughly."""
    if not isinstance(event, TextEvent):
        return 0
    num_logprobs = sum(1 + len(logprob.top) for logprob in event.logprobs)
    num_bytes = _BYTES_PER_EVENT + _BYTES_PER_TOKEN * len(event.token_ids) + _BYTES_PER_LOGPROB * num_logprobs
    return num_bytes + sys.getsizeof(event.text)


async def disconnected(receive: Receive) -> None:
    """Returns when the client has left. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Generation:
    """A request in the engine, and its events. `next` raises `ClientDisconnect` if the client left, and the engine's
    error if the request failed. Call `close` at the end, at least once: it cancels a request that still runs."""

    def __init__(
        self,
        inbox: Inbox,
        request: GenerateRequest,
        receive: Receive,
        on_done: Callable[[DoneEvent], None],
        on_cancelled: Callable[[Activity], None],
    ) -> None:
        """Submits the request. Raises `QueueFull` or `NotReady`. `on_cancelled` gets the progress at that time."""
        self._loop = asyncio.get_running_loop()
        self._events = EventBuffer(self._loop)
        self._id = request.id
        self._on_done = on_done
        self._on_cancelled = on_cancelled
        self._has_ended = False
        self._closed = False
        self._activities = inbox.activities
        self._ticket = inbox.submit(request, self._emit)
        self._watch = asyncio.create_task(self._wait_for_disconnect(receive))

    async def next(self, timeout_s: float) -> LiveEvent | None:
        """Returns the next event, or None if there is none for `timeout_s` seconds. A `DoneEvent` is the last one."""
        try:
            async with asyncio.timeout(timeout_s):
                event = await self._events.get()
        except TimeoutError:
            return None
        if event is None:
            raise ClientDisconnect
        self._has_ended = isinstance(event, ErrorEvent | DoneEvent)
        if isinstance(event, ErrorEvent):
            raise event.error
        if isinstance(event, DoneEvent):
            self._on_done(event)
        return event

    def close(self) -> None:
        """Cancels the request if it still runs, and ignores its events."""
        self._closed = True
        self._cancel()
        self._watch.cancel()

    def _emit(self, event: Event) -> None:
        """Called in the engine's thread."""
        if not self._closed and not self._events.put(event):
            self._loop.call_soon_threadsafe(self._cancel_slow)

    def _cancel_slow(self) -> None:
        if not self._ticket.cancelled:
            log.warning("[server] %s cancelled: the client reads too slowly", self._id)
            self._cancel()

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        await disconnected(receive)
        self._cancel()
        self._events.put(None)

    def _cancel(self) -> None:
        if not self._has_ended and not self._ticket.cancelled:
            for activity in self._activities():
                if activity.id == self._id:
                    self._on_cancelled(activity)
        self._ticket.cancel()


class Generations:
    """Like `Generation`, for a body with several prompts. Their requests run one after the other.

    Each prompt has `num_choices` choices, which are numbered through. One `DoneEvent` stands for all requests.
    """

    def __init__(self, begin: Sequence[Callable[[], Generation]], num_choices: int) -> None:
        """Submits the first request. Each of `begin` submits one."""
        first, *self._waiting = begin
        self._running = first()
        self._num_choices = num_choices
        self._done: list[DoneEvent] = []

    async def next(self, timeout_s: float) -> LiveEvent | None:
        """See `Generation.next`. A later request may be refused."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        event = await self._running.next(timeout_s)
        while isinstance(event, DoneEvent):
            self._done.append(event)
            if not self._waiting:
                return together(self._done)
            self._running.close()
            self._running = self._waiting.pop(0)()
            event = await self._running.next(until - loop.time())
        if isinstance(event, TextEvent | EchoEvent | FinishEvent):
            return replace(event, choice=event.choice + self._num_choices * len(self._done))
        return event

    def close(self) -> None:
        self._waiting.clear()
        self._running.close()


def together(done: Sequence[DoneEvent]) -> DoneEvent:
    """Returns one event for several requests: the sums of their tokens, and the report of the one that restored
    most."""
    total, completed, cached = (
        sum(getattr(event.usage, f"{kind}_tokens") for event in done) for kind in ("prompt", "completion", "cached")
    )
    most_restored = max(done, key=lambda event: event.cache.restored)
    usage = Usage(prompt_tokens=total, completion_tokens=completed, cached_tokens=cached)
    return DoneEvent(usage, replace(most_restored.cache, restored=cached), most_restored.timings)
