"""The threads of the server, apart by what is done in them, so that no kind of work fills those of another."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

Kind: TypeAlias = Literal["parsing", "rendering", "media", "compiling", "stopping"]

_NUM_THREADS: dict[Kind, int] = {"parsing": 2, "rendering": 2, "media": 1, "compiling": 16, "stopping": 2}
"""Images and sounds take seconds and hundreds of megabytes, so they are prepared one request after the other. A thread
that compiles waits for a process."""


class Threads:
    """For the event loop. Threads start with the first work that needs them."""

    def __init__(self) -> None:
        self._of: dict[Kind, ThreadPoolExecutor] = {
            kind: ThreadPoolExecutor(number, thread_name_prefix=kind) for kind, number in _NUM_THREADS.items()
        }
        self._turns: WeakValueDictionary[Hashable, asyncio.Lock] = WeakValueDictionary()
        self._num_running = 0

    @property
    def are_busy(self) -> bool:
        """Whether some work has not ended. It cannot be ended from outside."""
        return self._num_running > 0

    async def run(self, kind: Kind, work: Callable[..., T], *values: Any) -> T:
        """Runs `work` in a thread and returns its result."""
        self._num_running += 1
        running = asyncio.get_running_loop().run_in_executor(self._of[kind], work, *values)
        running.add_done_callback(self._ended)
        # Who waits may be cancelled, and the work goes on.
        return await asyncio.shield(running)

    async def compile(
        self, caller: Hashable, is_gone: Callable[[], Awaitable[bool]], work: Callable[[], T]
    ) -> T | None:
        """Runs `work` in a thread when the one that came before it for the same caller has ended.

        Returns None, and does nothing, if `is_gone` says then that nobody waits for it.
        """
        turn = self._turns.setdefault(caller, asyncio.Lock())
        async with turn:
            return None if await is_gone() else await self.run("compiling", work)

    def close(self) -> None:
        """Lets nothing begin any more."""
        for executor in self._of.values():
            executor.shutdown(wait=False, cancel_futures=True)

    def _ended(self, running: asyncio.Future[Any]) -> None:
        self._num_running -= 1
        if not running.cancelled():
            # Nobody may be there any more to see it.
            running.exception()
