"""Runs all reads of the engine on threads. A quick step never waits behind a slow one, and nothing waits for ever.

Each kind of step has its own threads. Until a read begins to load, the engine may give it up, and computes the state
that was to be read. A read that does not move is given up too, and so are those of a request that has waited for the
disk too long in all. The thread of a load may still write to its pages, so they stay with it until the thread returns.
While the disk does not answer (`store.reads`), nothing is read from it; while the shared tier does not, nothing from
that. So the number of threads is bounded.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

from diskprefix.cache.cache import PrefixCache
from diskprefix.cache.fetch import Fetch, Step
from diskprefix.cache.tiers.loading import MAX_LOADS
from diskprefix.kv.page_cache import PageCache
from diskprefix.store import reads
from diskprefix.store.reads import Patience

log = logging.getLogger("diskprefix")

Kind: TypeAlias = Step | Literal["draft", "picture"]
"""The kind of a step: of a restore, all of one for the draft model, or the rows of a picture."""
_CHECK_S = 1.0
"""Seconds between two checks for reads that do not move."""
_SLOW_S = 1.0
"""A step that has done nothing for so many seconds waits for the disk, and its request with it."""
_END_S = 5.0
"""Seconds that `Fetches.close` waits for running steps."""


@dataclass(eq=False)
class Read:
    """The steps of one read, which run one after the other. For the engine's thread, except `is_wanted`."""

    is_needed: Callable[[], bool]
    """Returns whether somebody still needs the result. Called on any thread."""
    on_end: Callable[[Any], None]
    """Called with the read when it has ended or is given up. After a read is given up, called again when it
    `is_late`."""
    steps: Iterator[tuple[Kind, Callable[[], object]]] = field(default_factory=lambda: iter(()))
    """The steps that have not begun."""
    patience: Patience = field(default_factory=Patience)
    """The time that its request may wait for the disk."""
    patience_s: float = math.inf
    """Seconds after which computing is faster, unless it loads."""
    waits_since: float = math.inf
    """When it began to wait for the disk."""
    step: Kind | None = None
    """The step that runs, or waits for a thread; then the last one."""
    is_running: bool = False
    moved_at: float = 0.0
    """When this step did something last."""
    has_begun_to_load: bool = False
    """Its thread may write to the pages of a sequence until it returns."""
    hangs: bool = False
    """It was given up because it did not move."""
    is_given_up: bool = False
    is_over: bool = False
    """No thread runs it any more."""
    is_late: bool = False
    """It was given up, and is over."""
    result: Any = None
    """What the last step returned."""
    error: Exception | None = None
    future: Future[None] | None = None

    def is_wanted(self) -> bool:
        """Returns whether to go on. A step that asks shows that it moves. For any thread."""
        self.moved_at = time.monotonic()
        return self.is_needed() and not self.is_given_up

    def has_stalled(self, now: float) -> bool:
        return self.is_running and now - self.moved_at > reads.STALL_S

    def is_slow(self, now: float) -> bool:
        return self.is_running and now - self.moved_at > _SLOW_S

    def close(self) -> None:
        """Releases the result. For a read that is not running."""


@dataclass(eq=False)
class RunningFetch(Read):
    """A fetch that runs."""

    fetch: Fetch = field(init=False)

    def run_steps(self, *, prefetches: bool) -> Iterator[tuple[Kind, Callable[[], object]]]:
        """Yields the steps of the fetch. `prefetches`: the shared tier is asked first."""
        run = self.fetch.run_step
        if prefetches:
            yield "prefetch", partial(run, "prefetch")
        self.waits_since = time.monotonic()
        if self.fetch.must_read_seen:
            yield "seen", partial(run, "seen")
        yield "match", partial(run, "match")
        if self.fetch.needs_load:
            yield "load", partial(run, "load")

    def close(self) -> None:
        self.fetch.close()


class Fetches:
    """Runs reads. For the engine's thread. `wake` is called, on any thread, when `take` has something to return."""

    def __init__(self, cache: PrefixCache, pages: PageCache, wake: Callable[[], None]) -> None:
        self._cache, self._pages, self._wake = cache, pages, wake
        self._pools: dict[Kind, Executor] = {
            "prefetch": ThreadPoolExecutor(cache.settings.max_sequences, thread_name_prefix="kv-prefetch"),
            "seen": ThreadPoolExecutor(1, thread_name_prefix="kv-seen"),
            "match": ThreadPoolExecutor(1, thread_name_prefix="kv-match"),
            "load": ThreadPoolExecutor(MAX_LOADS, thread_name_prefix="kv-load"),
            "draft": ThreadPoolExecutor(1, thread_name_prefix="draft-fetch"),
            "picture": ThreadPoolExecutor(1, thread_name_prefix="picture-load"),
        }
        self._open: list[Read] = []
        """Reads that `take` has not returned as ended."""
        self._ended: deque[Read] = deque()
        self._giving_up = threading.Lock()
        """Held to decide that a read loads, or that the engine continues without it."""
        self._counted_at = time.monotonic()
        """When `take` last counted what requests wait for the disk."""
        self.prefetch_hangs = False
        """The shared tier does not answer. Until it does, it is not asked."""

    def begin(self, read: Read) -> None:
        """Begins to run the steps of a read; none of them while the disk does not answer, or if its request has waited
        for it too long."""
        if self._cache.store.reads.stalled is not None or not read.patience.left_s:
            read.steps = iter(())
        self._open.append(read)
        self._advance(read)

    def take(self) -> list[Read]:
        """Returns the reads that ended, and those that are given up now. A read that is given up is returned again when
        it `is_late`."""
        now, returned = time.monotonic(), list[Read]()
        # Bound: each open read ends once.
        while self._ended:
            read = self._ended.popleft()
            self._open.remove(read)
            read.is_late = read.is_given_up
            returned.append(read)
        self._count_waits(now)
        for read in self._open:
            read.hangs = read.hangs or read.has_stalled(now)
        hanging = {read.step for read in self._open if read.hangs}
        is_stalled = self._note_stall(hanging)
        for read in [read for read in self._open if not read.is_given_up]:
            is_slow = read.step in hanging or now - read.waits_since > read.patience_s
            is_in_vain = is_stalled or is_slow or not read.is_needed()
            with self._giving_up:
                hangs = read.hangs or not read.patience.left_s
                read.is_given_up = hangs or (is_in_vain and not read.has_begun_to_load)
            if read.is_given_up:
                returned.append(read)
        return returned

    def _count_waits(self, now: float) -> None:
        """Counts the time since the last call for the requests that have waited for the disk since: those whose step
        does not move, and those that wait for the thread of such a step."""
        elapsed, self._counted_at = now - self._counted_at, now
        slow = {read.step for read in self._open if read.is_slow(now)}
        waiting = [read for read in self._open if read.step in slow and (read.is_slow(now) or not read.is_running)]
        waited = {read.patience: min(elapsed, now - read.moved_at) for read in waiting}
        for patience, seconds in waited.items():
            patience.spend(seconds)

    @property
    def check_in_s(self) -> float | None:
        """The seconds until the loop must call `take` again, because some read or write may have stopped moving.
        Requests that wait for memory are tried again then: nothing may wake them while a thread hangs."""
        return _CHECK_S if self._open or self._cache.store.write_s else None

    def close(self) -> None:
        """Ends all reads. Does not wait for ever for threads that hang: the process ends without them."""
        for read in self._open:
            read.is_given_up = True
        for pool in self._pools.values():
            pool.shutdown(wait=False)
        wait([read.future for read in self._open if read.future is not None and not read.is_over], _END_S)
        for read in self.take():
            read.on_end(read)
        for read in self._open:
            if not read.is_running:
                read.close()

    def _note_stall(self, hanging: set[Kind | None]) -> bool:
        """Returns whether the disk does not answer."""
        is_stalled = self._cache.store.reads.stalled is not None
        # What is being written holds its pages.
        is_write_hung = self._cache.store.write_s > reads.STALL_S
        self._pages.disk_hangs = is_stalled or is_write_hung or bool(hanging - {"prefetch"})
        if "prefetch" in hanging and not self.prefetch_hangs:
            log.error("[disk-cache] the shared tier does not answer: nothing is fetched from it until it does")
        self.prefetch_hangs = "prefetch" in hanging
        return is_stalled

    # On any thread.

    def _advance(self, read: Read) -> None:
        """Has the next step run, or ends the read."""
        following = next(read.steps, None) if read.error is None and read.is_wanted() else None
        if following is not None:
            read.step, run = following
            read.future = self._pools[read.step].submit(self._run, read, run)
        else:
            self._end(read)

    def _run(self, read: Read, run: Callable[[], object]) -> None:
        with self._giving_up:
            read.is_running = is_wanted = read.is_wanted()
            read.has_begun_to_load = is_wanted and read.step in ("load", "draft")
        if is_wanted:
            try:
                read.result = run()
            except Exception as error:  # noqa: BLE001 (`on_end` gets it)
                read.error = error
            read.is_running = False
        self._advance(read)

    def _end(self, read: Read) -> None:
        read.is_over = True
        self._ended.append(read)
        self._wake()
