"""The threads of the server, one pool for each kind of work, and the place of a request before it is queued."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from diskprefix.nouns import Tenant

T = TypeVar("T")

Kind: TypeAlias = Literal["parsing", "rendering", "large", "media", "compiling", "stopping"]

_NUM_THREADS: dict[Kind, int] = {"parsing": 2, "rendering": 2, "large": 2, "media": 1, "compiling": 16, "stopping": 2}
"""Images and sounds take seconds and hundreds of megabytes each. A thread that compiles waits for a process."""
_BEHIND: tuple[Kind, ...] = ("large", "media")
"""These threads let the engine go first: its own wait for each other many times in a step, and where another has the
processor of one of them, all wait for that."""
_NICE = 10


def _let_others_first() -> None:
    """Lowers the priority of this thread, which only Linux can."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _NICE))


class CallerTurns:
    """A lock for each caller. For the event loop."""

    def __init__(self) -> None:
        self._of: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()

    def of(self, caller: Hashable) -> asyncio.Lock:
        """Returns the lock of one caller. It exists while somebody holds it."""
        return self._of.setdefault(caller, asyncio.Lock())


class Threads:
    """Pools of threads, for the event loop. Threads start with the first work that needs them."""

    def __init__(self) -> None:
        self._of: dict[Kind, ThreadPoolExecutor] = {
            kind: ThreadPoolExecutor(number, kind, initializer=_let_others_first if kind in _BEHIND else None)
            for kind, number in _NUM_THREADS.items()
        }
        self._turns = CallerTurns()
        self._begun: set[Future[Any]] = set()

    @property
    def are_busy(self) -> bool:
        """Returns whether some work has not ended. It cannot be ended from outside."""
        return any(not work.done() for work in tuple(self._begun))

    async def run(self, kind: Kind, work: Callable[..., T], *values: Any) -> T:
        """Runs `work` in a thread and returns its result. If the caller is cancelled, it does not begin any more."""
        return await asyncio.wrap_future(self._submit(kind, work, *values))

    async def compile(
        self, caller: Hashable, is_gone: Callable[[], Awaitable[bool]], work: Callable[[], T]
    ) -> T | None:
        """Runs `work` in a thread when the one that came before it for the same caller has ended.

        Returns None, and does nothing, if `is_gone` then returns True.
        """
        loop, turn = asyncio.get_running_loop(), self._turns.of(caller)

        def pass_on(_: Future[T]) -> None:
            # The event loop may have ended with the process.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(turn.release)

        with ExitStack() as held:
            await turn.acquire()
            held.callback(turn.release)
            if await is_gone():
                return None
            running = self._submit("compiling", work)
            # The turn lasts as long as the work, also if the caller has left.
            held.pop_all()
        running.add_done_callback(pass_on)
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Lets nothing begin any more."""
        for executor in self._of.values():
            executor.shutdown(wait=False, cancel_futures=True)

    def _submit(self, kind: Kind, work: Callable[..., T], *values: Any) -> Future[T]:
        running = self._of[kind].submit(work, *values)
        self._begun.add(running)
        running.add_done_callback(self._begun.discard)
        return running


@dataclass
class QueuePlace:
    """A context, at whose end all is given back. `memory` may be closed before: when the prompt is rendered."""

    caller: Tenant
    """The user of the API key, whatever salt the request has."""
    is_large: bool = False
    """True for a body much larger than those of agents. Its threads let others go first."""
    taken: ExitStack = field(default_factory=ExitStack)
    memory: ExitStack = field(default_factory=ExitStack)

    @property
    def rendering(self) -> Kind:
        """The threads in which the prompt is rendered."""
        return "large" if self.is_large else "rendering"

    def __enter__(self) -> QueuePlace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives back what was not given back yet."""
        with self.taken:
            self.memory.close()

    def pop_all(self) -> QueuePlace:
        """Returns a place to which everything belongs that belonged to this one."""
        return replace(self, taken=self.taken.pop_all(), memory=self.memory.pop_all())
