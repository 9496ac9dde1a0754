"""The threads of the server, one pool for each kind of work."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any, Literal, TypeAlias, TypeVar

from diskprefix.server.limits import Turns

T = TypeVar("T")

Kind: TypeAlias = Literal["parsing", "rendering", "large", "images", "compiling", "stopping"]

_NUM_THREADS: dict[Kind, int] = {"parsing": 2, "rendering": 2, "large": 1, "images": 1, "compiling": 16, "stopping": 2}
"""The first image of each size takes up to a second. A thread that compiles waits for a process."""
_BEHIND: tuple[Kind, ...] = ("large", "images")
"""These threads let the engine go first: its own wait for each other many times in a step, and where another has the
processor of one of them, all wait for that."""
_NICE = 10
_DEADLINE_S: dict[Kind, float] = {"rendering": 60.0, "large": 600.0}
"""A chat template is code, which may never end. Nothing else takes these threads as long."""


def _let_others_first() -> None:
    """Lowers the priority of this thread, which only Linux can."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))


class Threads:
    """Pools of threads, for the event loop. Threads start with the first work that needs them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._of = {
            kind: ThreadPoolExecutor(number, kind, initializer=_let_others_first if kind in _BEHIND else None)
            for kind, number in _NUM_THREADS.items()
        }
        self._compiling = Turns(_NUM_THREADS["compiling"])
        self._begun: set[Future[Any]] = set()
        self._clock = clock
        self._due: dict[int, tuple[float, float]] = {}
        """By thread, when its work began and when it should have ended."""

    @property
    def are_busy(self) -> bool:
        """Returns whether some work has not ended. It cannot be ended from outside."""
        return any(not work.done() for work in tuple(self._begun))

    @property
    def overdue_s(self) -> float:
        """The seconds since the start of the oldest work that should have ended by now; 0 if all is in time."""
        now = self._clock()
        return max((now - began for began, due in tuple(self._due.values()) if now > due), default=0.0)

    async def run(self, kind: Kind, work: Callable[..., T], *values: Any) -> T:
        """Runs `work` in a thread and returns its result. If the caller is cancelled, it does not begin any more."""
        return await asyncio.wrap_future(self._submit(kind, work, *values))

    async def compile(
        self, caller: Hashable, is_gone: Callable[[], Awaitable[bool]], work: Callable[[], T]
    ) -> T | None:
        """Runs `work` in a thread when it is the caller's turn.

        Returns None, and does nothing, if `is_gone` then returns True.
        """
        loop, turns = asyncio.get_running_loop(), self._compiling

        def give_back(_: Future[T]) -> None:
            # The event loop may have ended with the process.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(turns.give_back, caller)

        with ExitStack() as held:
            await turns.take(caller)
            held.callback(turns.give_back, caller)
            if await is_gone():
                return None
            running = self._submit("compiling", work)
            # The turn lasts as long as the work, also if the caller has left.
            held.pop_all()
        running.add_done_callback(give_back)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Lets nothing begin any more."""
        for executor in self._of.values():
            executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, kind: Kind, work: Callable[..., T], *values: Any) -> Future[T]:
        running = self._of[kind].submit(self._timed, kind, work, *values)
        self._begun.add(running)
        running.add_done_callback(self._begun.discard)
        return running

    def _timed(self, kind: Kind, work: Callable[..., T], *values: Any) -> T:
        thread, began = threading.get_ident(), self._clock()
        if kind in _DEADLINE_S:
            self._due[thread] = began, began + _DEADLINE_S[kind]
        try:
            return work(*values)
        finally:
            self._due.pop(thread, None)
