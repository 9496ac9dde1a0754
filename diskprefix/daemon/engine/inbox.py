"""The engine's queue of waiting and running requests, and the thread that serves them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct, field
from msgspec.structs import replace

from diskprefix.daemon.engine.gauges import Activity, Heartbeat
from diskprefix.daemon.engine.request import ErrorEvent, Event, GenerateRequest
from diskprefix.errors import DeviceLost, DiskPrefixError, NotReady, QueueFull
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from diskprefix.prefixstore.cache.namespaces import Beginning
    from diskprefix.prefixstore.kv.page_cache import MemoryWait, PrefixWait

log = logging.getLogger("diskprefix")

_IDLE_S = 10.0
"""Seconds without a request."""
MAX_QUEUED_PICTURE_BYTES = 1 << 30
"""The limit for the picture files of all running and waiting requests, in bytes. Above it, each share may have an equal
part."""
_RETRY_AFTER_S = 10


class Ticket(Struct, eq=False):
    """A waiting or running request. `cancel` is for any thread, and may be called several times."""

    request: GenerateRequest
    emit: Callable[[Event], None]
    arrived_at: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
    private: bytes = field(default_factory=partial(os.urandom, 16))
    """The key of the request's state in memory, if the request shares nothing (`kv.sequence.Owner`)."""
    began: Beginning | None = None
    """What the request begins with. Set by the engine when it looks for memory."""
    wait: PrefixWait | MemoryWait | None = None
    """The reason why the request waits: it needs memory, or another request computes the same prefix. Set by the
    engine."""

    _has_ended: bool = False
    _ending: threading.Lock = field(default_factory=threading.Lock)
    """Guards `_has_ended`."""

    def cancel(self) -> None:
        self.cancelled = True

    def send_last(self, event: Event) -> None:
        """Sends the last event, if none was sent: the engine and a stop may end a request at once. For any thread."""
        with self._ending:
            has_ended, self._has_ended = self._has_ended, True
        if not has_ended:
            try:
                self.emit(event)
            except Exception:
                # The client may have gone.
                log.exception("[engine] %s: its end could not be told", self.request.id)

    def waiting_activity(self) -> Activity:
        """Returns the activity of the request while it waits."""
        return Activity(
            id=self.request.id,
            state="waiting",
            scope=self.request.cache.scope,
            prompt_tokens=len(self.request.prompt.token_ids),
            elapsed_s=time.perf_counter() - self.arrived_at,
        )


Serve: TypeAlias = "Callable[[Inbox], None]"


class Inbox:
    """Owns the engine's thread, which runs `serve`. `emit` of a request is called from that thread.

    `serve` calls `begin_request` and `end_request` for each request, and returns when `wait` returns False. If it
    raises `DeviceLost`, or any error that concerns no request, all requests fail, and the thread calls `on_fatal` with
    a `DeviceLost` and ends.
    """

    def __init__(self, serve: Serve, on_fatal: Callable[[DeviceLost], None] = lambda _error: None) -> None:
        self._serve = serve
        self._on_fatal = on_fatal
        self._lost: DeviceLost | None = None
        self._waiting: list[Ticket] = []
        self._running: set[Ticket] = set()
        self._changed = threading.Condition()
        self._has_news = False
        self._stopping = False
        self.heartbeat = Heartbeat()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self.running_activities: Callable[[], list[Activity]] = list
        """Returns the activities of the running requests. Set by the engine. For any thread."""
        self.on_idle: Callable[[], object] = lambda: None
        """Called on the engine's thread after ten seconds without a request. Set by the engine. It does not wait."""

    @property
    def queue_depth(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_over(self) -> bool:
        """True if the inbox is stopped and no request runs any more."""
        return self._stopping and not self._running

    def activities(self) -> list[Activity]:
        """Returns the activity of each request, in order of arrival. For any thread."""
        # Waiting requests first. A request that begins meanwhile is seen twice, never missed.
        by_id = {ticket.request.id: ticket.waiting_activity() for ticket in list(self._waiting) if not ticket.cancelled}
        by_id |= {activity.id: activity for activity in self.running_activities()}
        return sorted(by_id.values(), key=lambda activity: -activity.elapsed_s)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: GenerateRequest, emit: Callable[[Event], None]) -> Ticket:
        """Adds a request. Raises `QueueFull` if the picture files of all requests would exceed their limit, and those
        of the request's share their part of it. Raises `NotReady` while stopping."""
        ticket = Ticket(request, emit)
        with self._changed:
            if self._stopping:
                raise self._refusal()
            self._drop_cancelled()
            self._require_room(request)
            self._waiting.append(ticket)
            self._notify()
        return ticket

    def _require_room(self, request: GenerateRequest) -> None:
        """Raises `QueueFull` if the pictures of a request have no room. The caller holds the lock."""
        if not (num_bytes := _picture_bytes(request)):
            return
        taken, share = Counter[str](), request.cache.share
        for other in (*self._waiting, *self._running):
            if other_bytes := _picture_bytes(other.request):
                taken[other.request.cache.share] += other_bytes
        part = MAX_QUEUED_PICTURE_BYTES // len({*taken, share})
        if taken.total() + num_bytes > MAX_QUEUED_PICTURE_BYTES and taken[share] + num_bytes > part:
            raise QueueFull(
                f"the images of waiting requests take {taken.total() >> 20} MiB already; try again later",
                retry_after_s=_RETRY_AFTER_S,
            )

    def waiting(self) -> list[Ticket]:
        """Returns the waiting requests in order of arrival. Drops cancelled ones."""
        self.heartbeat.beat()
        with self._changed:
            self._has_news = False
            self._drop_cancelled()
            return list(self._waiting)

    def begin_request(self, ticket: Ticket) -> None:
        """Records that the engine accepts a waiting request."""
        with self._changed:
            # `stop` may have refused the request meanwhile.
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            else:
                ticket.cancel()
            self._running.add(ticket)
            self._changed.notify_all()

    def end_request(self, ticket: Ticket) -> None:
        """Records that the engine is done with a request."""
        with self._changed:
            self._running.remove(ticket)
            # Picture files are large, and others may still hold the ticket.
            ticket.request = replace(ticket.request, prompt=replace(ticket.request.prompt, pictures=()))
            self._changed.notify_all()

    def wake(self) -> None:
        """Ends a `wait`, because there is work for the engine. For any thread."""
        with self._changed:
            self._notify()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until something has changed since the last call of `waiting`, for at most `timeout_s`. Returns False
        once the inbox is stopped and no request runs. Calls `on_idle` once if it has waited for ten seconds."""

        def has_changed() -> bool:
            return self._has_news or self.is_over

        with self._changed:
            self.heartbeat.rest()
            first_s = _IDLE_S if timeout_s is None else min(_IDLE_S, timeout_s)
            is_idle = not self._changed.wait_for(has_changed, first_s) and not self._running
        if is_idle and first_s == _IDLE_S:
            self.on_idle()
        with self._changed:
            self._changed.wait_for(has_changed, None if timeout_s is None else timeout_s - first_s)
            return self._has_news or bool(self._running) or not self._stopping

    def stop(self, timeout_s: float) -> bool:
        """Refuses waiting requests, and cancels running ones after `timeout_s`. Returns True if the running ones
        finished in time."""
        with self._changed:
            self._refuse_all()
            finished = self._changed.wait_for(lambda: not self._running, timeout_s)
            for ticket in self._running:
                ticket.cancel()
                ticket.send_last(ErrorEvent(self._refusal()))
            self._notify()
        if self._thread.is_alive():
            self._thread.join()
        return finished

    def _loop(self) -> None:
        try:
            self._serve(self)
        except DeviceLost as error:
            self._end_all(error)
        except Exception as error:
            # Without this thread, all requests would wait forever.
            log.error("[engine] the engine failed", exc_info=error)
            self._end_all(DeviceLost(f"the engine failed unexpectedly: {first_line(error)}"))

    def _end_all(self, error: DeviceLost) -> None:
        self._lost = error
        with self._changed:
            for ticket in self._running:
                ticket.send_last(ErrorEvent(error))
            self._running.clear()
            self._refuse_all()
        self._on_fatal(error)

    def _notify(self) -> None:
        """Wakes waiting threads. The caller holds the lock."""
        self._has_news = True
        self._changed.notify_all()

    def _drop_cancelled(self) -> None:
        self._waiting = [ticket for ticket in self._waiting if not ticket.cancelled]

    def _refuse_all(self) -> None:
        """Fails all waiting requests and all later ones. The caller holds the lock."""
        self._stopping = True
        refused, self._waiting = self._waiting, []
        self._changed.notify_all()
        for ticket in refused:
            ticket.send_last(ErrorEvent(self._refusal()))

    def _refusal(self) -> NotReady:
        if self._lost is not None:
            return NotReady("the daemon lost its device and ends; try again when it was started again")
        return NotReady("the daemon is stopping")


def _picture_bytes(request: GenerateRequest) -> int:
    return sum(picture.num_bytes for picture in request.prompt.pictures)


def error_event(error: Exception, request: GenerateRequest) -> ErrorEvent:
    """Returns the error event for the client of a failed request, and logs the details for the operator."""
    if isinstance(error, DiskPrefixError):
        if error.http_status >= 500:
            log.error("[engine] %s failed: %s", request.id, error.message)
        return ErrorEvent(error)
    log.error("[engine] %s failed", request.id, exc_info=error)
    return ErrorEvent(DiskPrefixError("internal error; the daemon's log has the details"))
