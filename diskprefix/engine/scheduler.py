"""The queue in front of the engine: one thread, order of arrival, bounded, cancellable."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from diskprefix.engine.device import is_device_lost
from diskprefix.engine.prefill import Cancelled
from diskprefix.engine.request import ErrorEvent, Event, GenerateRequest
from diskprefix.errors import DeviceLost, DiskPrefixError, NotReady, QueueFull, ShareFull
from diskprefix.model.media import prepared_bytes
from diskprefix.printable import first_line
from diskprefix.tenant import SHARED, Tenant

log = logging.getLogger("diskprefix")

_SMOOTHING = 0.3
"""Weight of the newest request in the moving average that `Retry-After` is estimated from."""

MAX_QUEUED_MEDIA_BYTES = 1 << 30
"""Limit for the prepared media of all requests that run or wait."""


Run: TypeAlias = Callable[[GenerateRequest, Callable[[Event], None], Callable[[], bool], float], None]
"""See `Engine.run`."""


@dataclass(eq=False)
class Ticket:
    """A queued or running request. `cancel` may be called from any thread, any number of times."""

    request: GenerateRequest
    emit: Callable[[Event], None]
    arrived_at: float = field(default_factory=time.perf_counter)
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def forget_media(self) -> None:
        self.request = replace(self.request, prompt=replace(self.request.prompt, media={}))


class Scheduler:
    """Owns the engine thread. `emit` of a request is called from that thread.

    When the accelerator is lost, all requests fail, and the thread calls `on_fatal` with the error and ends.
    """

    def __init__(self, run: Run, max_queue: int, on_fatal: Callable[[DeviceLost], None] = lambda _error: None) -> None:
        self._run_request = run
        self._on_fatal = on_fatal
        self._lost: DeviceLost | None = None
        self._max_queue = max_queue
        self._waiting: deque[Ticket] = deque()
        self._current: Ticket | None = None
        self._changed = threading.Condition()
        self._stopping = False
        self._mean_s = 1.0
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    @property
    def queue_depth(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> bool:
        return self._current is not None

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: GenerateRequest, emit: Callable[[Event], None]) -> Ticket:
        """Queues a request. Raises `QueueFull` or, while stopping, `NotReady`."""
        ticket = Ticket(request, emit)
        with self._changed:
            self._check_room(len(self._still_waiting()), self._max_queue)
            self._check_media(request)
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def require_room(self, arriving: Sequence[Tenant], caller: Tenant) -> None:
        """Raises what `submit` would, if other requests, of the callers `arriving`, are submitted before.

        Raises `ShareFull` where the half of the queue that a caller with an API key may take is taken. Callers without
        keys are not told apart: each of them is `SHARED`.
        """
        with self._changed:
            free = 0 if self._current else 1
            ahead = [*(ticket.request.cache.tenant for ticket in self._still_waiting()), *arriving]
            self._check_room(len(ahead), self._max_queue + free)
            num_own = sum(tenant.ids[:1] == caller.ids for tenant in ahead)
            if caller != SHARED and num_own >= max(1, self._max_queue // 2) + free:
                raise ShareFull(
                    f"{num_own} requests with this API key are waiting already, and the rest of the queue is kept for "
                    "others; try again later or raise --max-queue",
                    retry_after_s=self._retry_after_s(num_own),
                )

    def _still_waiting(self) -> deque[Ticket]:
        self._waiting = deque(t for t in self._waiting if not t.cancelled)
        return self._waiting

    def _check_room(self, num_ahead: int, limit: int) -> None:
        if self._stopping:
            raise self._refusal()
        if num_ahead >= limit:
            raise QueueFull(
                f"{num_ahead} requests are waiting already; try again later or raise --max-queue",
                retry_after_s=self._retry_after_s(num_ahead),
            )

    def _check_media(self, request: GenerateRequest) -> None:
        tickets = [*self._waiting, *([self._current] if self._current else [])]
        held = sum(prepared_bytes(ticket.request.prompt.media) for ticket in tickets)
        num_bytes = prepared_bytes(request.prompt.media)
        if num_bytes and held + num_bytes > MAX_QUEUED_MEDIA_BYTES:
            raise QueueFull(
                f"the images and sounds of waiting requests take {held >> 20} MiB already; try again later",
                retry_after_s=self._retry_after_s(len(tickets)),
            )

    def _retry_after_s(self, num_ahead: int) -> int:
        return max(1, math.ceil(self._mean_s * (num_ahead + 1)))

    def stop(self, timeout_s: float) -> bool:
        """Refuses what waits, lets the running request finish for `timeout_s`, then cancels it. Returns whether it
        finished."""
        with self._changed:
            self._refuse_all()
            finished = self._changed.wait_for(lambda: self._current is None, timeout_s)
            if self._current is not None:
                self._current.cancel()
                self._current.emit(ErrorEvent(self._refusal()))
        if self._thread.is_alive():
            self._thread.join()
        return finished

    def _refuse_all(self) -> None:
        """Fails the waiting requests, and those that come from now on. The caller holds the lock."""
        self._stopping = True
        refused = list(self._waiting)
        self._waiting.clear()
        self._changed.notify_all()
        for ticket in refused:
            ticket.emit(ErrorEvent(self._refusal()))

    def _refusal(self) -> NotReady:
        if self._lost is not None:
            return NotReady("the daemon lost its device and ends; try again when it was started again")
        return NotReady("the daemon is stopping")

    def _loop(self) -> None:
        self._serve()
        if self._lost is not None:
            self._on_fatal(self._lost)

    def _serve(self) -> None:
        """Runs requests until the scheduler is stopped or the device is lost."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                self._current = ticket = self._waiting.popleft()
            started = time.perf_counter()
            self._run(ticket)
            self._mean_s += _SMOOTHING * (time.perf_counter() - started - self._mean_s)
            ticket.forget_media()
            with self._changed:
                self._current = None
                self._changed.notify_all()
                if self._lost is not None:
                    self._refuse_all()
                    return

    def _run(self, ticket: Ticket) -> None:
        try:
            if not ticket.cancelled:
                self._run_request(ticket.request, ticket.emit, lambda: ticket.cancelled, ticket.arrived_at)
        except Cancelled:
            log.info("[engine] %s cancelled", ticket.request.id)
        except DiskPrefixError as error:
            if error.http_status >= 500:
                log.error("[engine] %s failed: %s", ticket.request.id, error.message)
            ticket.emit(ErrorEvent(error))
        except Exception as error:  # the engine thread must outlive any request
            log.exception("[engine] %s failed", ticket.request.id)
            if is_device_lost(error):
                self._lost = DeviceLost(f"the accelerator failed and cannot be used any more: {first_line(error)}")
                ticket.emit(ErrorEvent(self._lost))
                return
            ticket.emit(ErrorEvent(DiskPrefixError("internal error; the daemon's log has the details")))
