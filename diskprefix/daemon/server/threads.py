"""The threads of the server, one pool for each kind of work."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from starlette.requests import ClientDisconnect, Request

from diskprefix.daemon.server.limits import Turns
from diskprefix.daemon.server.log_context import log_context
from diskprefix.thread_pool import ThreadPool
from diskprefix.thread_work import ThreadWork, doing

T = TypeVar("T")

WorkKind: TypeAlias = Literal[
    "parsing",
    "reading",
    "rendering",
    "large",
    "images",
    "compiling",
    "counting",
    "writing",
    "ahead",
    "inspecting",
    "stopping",
]

_NUM_THREADS: dict[WorkKind, int] = {
    "parsing": 2,
    "reading": 16,
    "rendering": 2,
    "large": 1,
    "images": 1,
    "compiling": 16,
    "counting": 2,
    "writing": 2,
    "ahead": 1,
    "inspecting": 3,
    "stopping": 2,
}
"""The first image of each size takes up to a second. A thread that compiles only waits for a process, and one
that reads only for the disk, as long as its request may wait. What reads for no request has the thread `ahead`. Three
callers inspect the daemon, each once at a time, and all may wait for a disk."""
_LOW_PRIORITY: tuple[WorkKind, ...] = ("large", "images", "counting")
"""Threads with a lower priority than the engine's, which wait for each other: one without a processor delays all."""
_NICE = 10
_REST_BESIDE, _MAX_REST_S = 7, 15.0
"""The pause before a share's next work of these kinds while the engine computes: as a multiple of the last work's
time, and at most, in seconds. Threads of one process cannot run Python at once, whatever their priorities."""
_PATIENCE_S: dict[WorkKind, float] = {"parsing": 5.0, "rendering": 5.0, "counting": 10.0, "images": 60.0}
"""The time after which work of a request leaves its place to others, and goes on beside them. Without pictures, the
largest body that these kinds accept takes less, also on a busy machine."""
NUM_BESIDE: dict[WorkKind, int] = {"parsing": 6, "rendering": 6, "counting": 6, "images": 3, "large": 2}
"""The most threads for work that takes longer. Large bodies take turns before: see `body.py`."""
_DEADLINE_S: dict[WorkKind, float] = {"rendering": 60.0, "counting": 60.0, "images": 600.0, "large": 600.0}
"""The time after which work counts as hanging. A chat template, which is code, is ended long before."""


def _lower_priority() -> None:
    """Lowers the priority of this thread, on Linux."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))


def _keep_priority() -> None:
    """Leaves this thread as it is."""


class Overdue(NamedTuple):
    """Work that should have ended: how long it has run, and the step that it is in."""

    seconds: float
    step: str


class Threads:
    """Pools of threads, for the event loop. Threads start with the first work that needs them."""

    def __init__(
        self, is_computing: Callable[[], bool] = lambda: False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._of = {
            kind: ThreadPool(
                number + NUM_BESIDE.get(kind, 0), kind, _lower_priority if kind in _LOW_PRIORITY else _keep_priority
            )
            for kind, number in _NUM_THREADS.items()
        }
        self._turns = {
            kind: Turns(number, _PATIENCE_S[kind], NUM_BESIDE[kind]) if kind in _PATIENCE_S else Turns(number)
            for kind, number in _NUM_THREADS.items()
        }
        self._begun_calls: set[Future[Any]] = set()
        self._is_computing = is_computing
        self._clock = clock
        self._due: dict[int, tuple[float, float, ThreadWork]] = {}
        """By thread, when its work began, when it should have ended, and the work."""

    @property
    def are_busy(self) -> bool:
        """Returns whether some work, which cannot be stopped, has not ended."""
        return any(not work.done() for work in tuple(self._begun_calls))

    @property
    def overdue(self) -> Overdue | None:
        """The oldest work that should have ended by now; None if all is in time."""
        now = self._clock()
        overdue = [Overdue(now - began, work.step) for began, due, work in tuple(self._due.values()) if now > due]
        return max(overdue, default=None)

    async def run(self, kind: WorkKind, work: Callable[..., T], *values: Any) -> T:
        """Runs `work` in a thread and returns its result. On cancellation, work that has not begun is dropped, and
        other work ends at its next step."""
        return await self._result(*self._submit(kind, work, *values))

    async def run_for(self, request: Request, kind: WorkKind, work: Callable[..., T], *values: Any) -> T:
        """Runs `work` in a thread when it is the turn of the request's share, and returns its result.

        A turn lasts until the work ends, even if the client leaves. The work of a request with a large body runs in the
        thread `large`, without a turn. Raises `ClientDisconnect` if the client has left when its turn comes.
        """
        if getattr(request.state, "is_large", False):
            return await self.run("large", work, *values)
        loop, turns, record = asyncio.get_running_loop(), self._turns[kind], log_context(request)
        began = 0.0

        def give_back(_: Future[list[T]]) -> None:
            rests = kind in _LOW_PRIORITY and self._is_computing()
            rest_s = min(_MAX_REST_S, _REST_BESIDE * (self._clock() - began)) if rests else 0.0
            # The event loop may have ended with the process.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(turns.give_back, turn, rest_s)

        with ExitStack() as held:
            turn = await turns.take(record.share, record.conversation)
            held.callback(turns.give_back, turn)
            if await _has_left(request):
                raise ClientDisconnect
            began, (running, state) = self._clock(), self._submit(kind, work, *values)
            held.pop_all()
        running.add_done_callback(give_back)
        return await self._result(running, state)

    def close(self) -> None:
        """Drops the work that has not begun, and takes no more."""
        for executor in self._of.values():
            executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, kind: WorkKind, work: Callable[..., T], *values: Any) -> tuple[Future[list[T]], ThreadWork]:
        """Queues work for a thread. The future gets the result in a list, which `_result` empties: the thread refers
        to what it has returned until it gets a processor again."""
        state = ThreadWork()
        running = self._of[kind].submit(self._timed, kind, state, work, *values)
        self._begun_calls.add(running)
        running.add_done_callback(self._begun_calls.discard)
        return running, state

    @staticmethod
    async def _result(running: Future[list[T]], state: ThreadWork) -> T:
        try:
            return (await asyncio.wrap_future(running)).pop()
        except asyncio.CancelledError:
            state.is_wanted = False
            raise

    def _timed(self, kind: WorkKind, state: ThreadWork, work: Callable[..., T], *values: Any) -> list[T]:
        thread, began = threading.get_ident(), self._clock()
        if kind in _DEADLINE_S:
            self._due[thread] = began, began + _DEADLINE_S[kind], state
        try:
            with doing(state):
                return [work(*values)]
        finally:
            self._due.pop(thread, None)


async def _has_left(request: Request) -> bool:
    """Returns whether the client of a request, whose body was read, has left. `Request.is_disconnected` of starlette
    imports anyio's event loop, which takes as long as all other work of the server on a request."""
    receiving = asyncio.ensure_future(request.receive())
    await asyncio.sleep(0)
    if receiving.done():
        return bool(receiving.result()["type"] == "http.disconnect")
    receiving.cancel()
    return False
