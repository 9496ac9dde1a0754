"""One request in the engine, as the event loop sees it: events come in from the engine's thread, a disconnect goes out.

A client that leaves cancels its ticket at once, whether the request is queued, in prefill or streaming.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from diskprefix.engine.request import DoneEvent, ErrorEvent, Event, GenerateRequest

if TYPE_CHECKING:
    from diskprefix.engine.scheduler import Scheduler

Receive = Callable[[], Awaitable[Any]]


class Generation:
    """Async iterator of a request's events; ends after its `DoneEvent`.

    Raises `ClientDisconnect` when the client left, and the engine's error where the request failed. `close()` must be
    called in the end; it is safe to call twice, and it cancels what still runs.
    """

    def __init__(self, scheduler: Scheduler, request: GenerateRequest, receive: Receive) -> None:
        """Submits the request. Raises `QueueFull` or `NotReady`."""
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._closed = False
        self._ticket = scheduler.submit(request, self._emit)
        self._watch = asyncio.create_task(self._wait_for_disconnect(receive))

    def _emit(self, event: Event) -> None:
        """Called in the engine's thread."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def _wait_for_disconnect(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._ticket.cancel()
        self._events.put_nowait(None)

    def close(self) -> None:
        """Cancels what still runs and stops listening."""
        self._closed = True
        self._ticket.cancel()
        self._watch.cancel()

    async def next(self) -> Event:
        """The next event that is not an error."""
        event = await self._events.get()
        if event is None:
            raise ClientDisconnect
        if isinstance(event, ErrorEvent):
            raise event.error
        return event

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self.next()
            yield event
            if isinstance(event, DoneEvent):
                return
