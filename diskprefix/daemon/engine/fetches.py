"""Runs the reading jobs of the engine on threads. A quick step never waits for a slow one, and nothing waits forever.

Each kind of step has its own threads. Until a job begins to load, the engine may give it up and compute the state
instead. A job that does not move is also given up, and so are all jobs of a request that has waited for the disk too
long in all. The thread of a load may still write to its pages, so the pages stay with the thread until it returns.
While the disk does not answer (`store.reads`), nothing is read from it, and while the shared tier does not answer,
nothing is fetched from it. So the number of threads is bounded.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field
from typing import Any

from diskprefix.daemon.engine.pools import StepKind
from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.store import reads
from diskprefix.prefixstore.store.reads import Patience

log = logging.getLogger("diskprefix")

_CHECK_S = 1.0
"""Seconds between two checks for jobs that do not move."""
_SLOW_S = 1.0
"""A step that has done nothing for this many seconds waits for the disk, and so does its request."""
_END_S = 5.0
"""Seconds that `Fetches.close` waits for running steps."""


@dataclass(eq=False)
class ReadJob:
    """A job that reads: its steps run one after the other. The steps of a restore are those of `cache.restore.Restore`.
    For the engine's thread, except `is_wanted` and `begin_step`."""

    request_is_wanted: Callable[[], bool]
    """Returns whether the result is still needed. Called on any thread."""
    on_end: Callable[[ReadJob], None] = lambda _: None
    """Called when the job has ended or is given up. After a job was given up, called again when it `is_late`."""
    steps: Iterator[tuple[StepKind, Callable[[], object]]] = field(default_factory=lambda: iter(()))
    """The steps that have not begun yet."""
    close: Callable[[], None] = lambda: None
    """Releases the result. Call it when no step runs."""
    patience: Patience = field(default_factory=Patience)
    """The time that the request of the job may wait for the disk."""
    patience_s: float = math.inf
    """After waiting this many seconds, computing is faster, unless the job has begun to load."""
    waits_since: float = math.inf
    """The time, on the clock of `time.monotonic`, when the job began to wait for the disk."""
    step: StepKind | None = None
    """The step that runs or waits for a thread; after the end, the last step."""
    is_running: bool = False
    moved_at: float = 0.0
    """The time, on the clock of `time.monotonic`, when this step last did something."""
    has_begun_to_load: bool = False
    """The thread of the job may write to the pages of a sequence until the thread returns."""
    hangs: bool = False
    """The job was given up because it did not move."""
    is_given_up: bool = False
    is_over: bool = False
    """No thread runs the job any more."""
    is_late: bool = False
    """The job was given up, and is over now."""
    result: Any = None
    """The result of the last step."""
    error: Exception | None = None
    future: Future[None] | None = None

    def __post_init__(self) -> None:
        self._deciding = threading.Lock()
        """Held while the job begins to load, or while the engine decides to continue without the job."""

    @property
    def may_write(self) -> bool:
        """True if a thread may write to the pages of a sequence now."""
        return self.has_begun_to_load and not self.is_over

    def begin_step(self) -> bool:
        """Returns whether the next step is to run. For any thread."""
        with self._deciding:
            self.is_running = is_wanted = self.is_wanted()
            self.has_begun_to_load = is_wanted and self.step in ("load", "draft")
            return is_wanted

    def give_up(self, *, unless_loading: bool = False) -> None:
        """Gives the job up: no further step begins. With `unless_loading`, does nothing once the job may write."""
        with self._deciding:
            self.is_given_up |= not (unless_loading and self.has_begun_to_load)

    def is_wanted(self) -> bool:
        """Returns whether to go on. A step that calls this also shows that it moves. For any thread."""
        self.moved_at = time.monotonic()
        return self.request_is_wanted() and not self.is_given_up

    def has_stalled(self, now: float) -> bool:
        return self.is_running and now - self.moved_at > reads.STALL_S

    def is_slow(self, now: float) -> bool:
        return self.is_running and now - self.moved_at > _SLOW_S


class Fetches:
    """Runs jobs. For the engine's thread. `wake` is called, on any thread, when `ended_reads` has jobs to return."""

    def __init__(
        self,
        cache: PrefixCache,
        pages: PageCache,
        pools: Mapping[StepKind, Executor],
        wake: Callable[[], None],
    ) -> None:
        self._cache, self._pages, self._pools, self._wake = cache, pages, pools, wake
        self._open: list[ReadJob] = []
        """Jobs that `ended_reads` has not returned as ended."""
        self._ended: deque[ReadJob] = deque()
        self._counted_at = time.monotonic()
        """The time, on the clock of `time.monotonic`, when `ended_reads` last counted the waits of requests."""
        self.prefetch_hangs = False
        """The shared tier does not answer. It is not asked until it does."""

    def begin_read(self, job: ReadJob) -> None:
        """Begins to run the steps of a job, which ends whatever fails. Runs none of them while the disk does not
        answer, or if the request has waited for the disk too long."""
        if self._cache.store.reads.stalled is not None or not job.patience.left_s:
            job.steps = iter(())
        self._open.append(job)
        self._advance(job)

    def ended_reads(self) -> list[ReadJob]:
        """Returns the jobs that ended, and the jobs that are given up now. A job that was given up is returned again
        when it `is_late`."""
        now, returned = time.monotonic(), list[ReadJob]()
        # Bound: each open job ends once.
        while self._ended:
            job = self._ended.popleft()
            self._open.remove(job)
            job.is_late = job.is_given_up
            returned.append(job)
        self._count_waits(now)
        for job in self._open:
            job.hangs = job.hangs or job.has_stalled(now)
        hanging = {job.step for job in self._open if job.hangs}
        is_stalled = self._note_stall(hanging)
        for job in [job for job in self._open if not job.is_given_up]:
            is_slow = job.step in hanging or now - job.waits_since > job.patience_s
            is_in_vain = is_stalled or is_slow or not job.request_is_wanted()
            if job.hangs or not job.patience.left_s:
                job.give_up()
            elif is_in_vain:
                job.give_up(unless_loading=True)
            if job.is_given_up:
                returned.append(job)
        return returned

    def _count_waits(self, now: float) -> None:
        """Counts the time since the last call for the requests that have waited for the disk since then: their step
        does not move, or it waits for the thread of a step that does not move."""
        elapsed, self._counted_at = now - self._counted_at, now
        slow = {job.step for job in self._open if job.is_slow(now)}
        waiting = [job for job in self._open if job.step in slow and (job.is_slow(now) or not job.is_running)]
        waited = {job.patience: min(elapsed, now - job.moved_at) for job in waiting}
        for patience, seconds in waited.items():
            patience.spend(seconds)

    @property
    def check_in_s(self) -> float | None:
        """The seconds until the loop must call `ended_reads` again, because a read or write may have stopped moving;
        None if none is open. Requests that wait for memory are tried again then: nothing may wake them while a thread
        hangs, be it the writer's in a read before it writes what holds their memory."""
        return _CHECK_S if self._open or self._cache.store.write_s or self._pages.pool.holds else None

    def close(self) -> None:
        """Ends all jobs. Waits at most five seconds for threads that hang: the process ends without them."""
        for job in self._open:
            job.give_up()
        wait([job.future for job in self._open if job.future is not None and not job.is_over], _END_S)
        for job in self.ended_reads():
            job.on_end(job)
        for job in self._open:
            if not job.is_running:
                job.close()

    def _note_stall(self, hanging: set[StepKind | None]) -> bool:
        """Returns whether the disk does not answer."""
        is_stalled = self._cache.store.reads.stalled is not None
        # A publication that is being written holds its pages.
        is_write_hung = self._cache.store.write_s > reads.STALL_S
        self._pages.disk_hangs = is_stalled or is_write_hung or bool(hanging - {"prefetch"})
        if "prefetch" in hanging and not self.prefetch_hangs:
            log.error("[disk-cache] the shared tier does not answer: nothing is fetched from it until it does")
        self.prefetch_hangs = "prefetch" in hanging
        return is_stalled

    # On any thread.

    def _advance(self, job: ReadJob) -> None:
        """Submits the next step of a job to its thread, or ends the job."""
        try:
            following = next(job.steps, None) if job.error is None and job.is_wanted() else None
            if following is not None:
                job.step, run = following
                if job.step != "prefetch":
                    job.waits_since = min(job.waits_since, time.monotonic())
                job.future = self._pools[job.step].submit(self._run, job, run)
                return
        except Exception as error:  # noqa: BLE001 (`on_end` gets it)
            job.error = error
        self._end_read(job)

    def _run(self, job: ReadJob, run: Callable[[], object]) -> None:
        try:
            if job.begin_step():
                job.result = run()
        except Exception as error:  # noqa: BLE001 (`on_end` gets it)
            job.error = error
        job.is_running = False
        self._advance(job)

    def _end_read(self, job: ReadJob) -> None:
        job.is_over = True
        self._ended.append(job)
        self._wake()
