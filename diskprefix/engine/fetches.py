"""All reads of the engine, on threads: a quick step never waits behind a slow one, and nothing waits for ever.

Each kind of step has threads of its own. While a read has not begun to load, the engine may give it up, and computes
what was to be read. A read that does not move is given up too, but the thread of a load may still write to its pages:
they stay with it until the thread returns. While a thread hangs, nothing new is read from the disk, or if it is one
that asks the shared tier, from that. So the number of threads is bounded.
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

import torch

from diskprefix.cache.cache import PrefixCache
from diskprefix.cache.fetch import Fetch, Step
from diskprefix.cache.tiers.loading import MAX_LOADS
from diskprefix.kv.page_cache import PageCache

log = logging.getLogger("diskprefix")

Kind: TypeAlias = Step | Literal["draft", "picture"]
"""The kind of a step: of a restore, all of one for the draft model, or the rows of a picture."""
_STALL_S = 10.0
"""A step that has done nothing for so many seconds hangs. A disk that slept may take nearly as long."""
_LOOK_S = 1.0
"""Seconds between two looks at reads that do not move."""
_END_S = 5.0
"""Seconds that the end waits for steps which run."""


@dataclass(eq=False)
class Read:
    """Steps that read for something, one after the other, and how far they are. For the engine's thread, but for
    `is_wanted`."""

    is_needed: Callable[[], bool]
    """Whether it is of use to somebody. Asked on any thread."""
    on_end: Callable[[Any], None]
    """Called with the read when it has ended, or is given up. If it is given up, called again when it `is_late`."""
    steps: Iterator[tuple[Kind, Callable[[], object]]] = field(default_factory=lambda: iter(()))
    """The steps that have not begun."""
    patience_s: float = math.inf
    """Seconds that it may wait for the disk, unless it loads."""
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
        """Returns whether to go on. If a step asks, it moves. For any thread."""
        self.moved_at = time.monotonic()
        return self.is_needed() and not self.is_given_up

    def has_stalled(self, now: float) -> bool:
        return self.is_running and now - self.moved_at > _STALL_S

    def close(self) -> None:
        """Releases what was found. For a read that is not running."""


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
        """Held while it is decided that a read loads, or that the engine goes on without it."""
        self.prefetch_hangs = False
        """The shared tier does not answer. Until it does, it is not asked."""

    def begin(self, one: Read) -> None:
        """Begins to run the steps of a read; none of them while the disk does not answer."""
        if self._cache.tiered.stalled is not None:
            one.steps = iter(())
        self._open.append(one)
        self._advance(one)

    def take(self) -> list[Read]:
        """Returns the reads that ended, and those that are given up now. A read that is given up is returned again when
        it `is_late`."""
        now, found = time.monotonic(), list[Read]()
        while self._ended:
            one = self._ended.popleft()
            self._open.remove(one)
            one.is_late = one.is_given_up
            found.append(one)
        for one in self._open:
            if not one.hangs and one.has_stalled(now):
                one.hangs = True
                self._cache.count("stalled_reads")
        hanging = {one.step for one in self._open if one.hangs}
        is_stalled = self._note_stall(hanging)
        for one in [one for one in self._open if not one.is_given_up]:
            is_slow = one.step in hanging or now - one.waits_since > one.patience_s
            is_in_vain = is_stalled or is_slow or not one.is_needed()
            with self._giving_up:
                one.is_given_up = one.hangs or (is_in_vain and not one.has_begun_to_load)
            if one.is_given_up:
                found.append(one)
        return found

    @property
    def look_in_s(self) -> float | None:
        """The seconds until the loop must look again: at reads that do not move, and, while a thread hangs, at requests
        that wait for memory, because nothing may wake them."""
        return _LOOK_S if self._open else None

    def close(self) -> None:
        """Ends all reads. Does not wait for ever for threads that hang: the process ends without them."""
        for one in self._open:
            one.is_given_up = True
        for pool in self._pools.values():
            pool.shutdown(wait=False)
        wait([one.future for one in self._open if one.future is not None and not one.is_over], _END_S)
        for one in self.take():
            one.on_end(one)
        for one in self._open:
            if not one.is_running:
                one.close()

    def _note_stall(self, hanging: set[Kind | None]) -> bool:
        """Returns whether the disk does not answer."""
        is_stalled = bool(hanging - {"prefetch"})
        self._cache.tiered.note_stall(_STALL_S if is_stalled else None)
        self._pages.disk_hangs = is_stalled
        if "prefetch" in hanging and not self.prefetch_hangs:
            log.error("[disk-cache] the shared tier does not answer: nothing is fetched from it until it does")
        self.prefetch_hangs = "prefetch" in hanging
        return is_stalled

    # On any thread.

    def _advance(self, one: Read) -> None:
        """Has the next step run, or ends the read."""
        following = next(one.steps, None) if one.error is None and one.is_wanted() else None
        if following is not None:
            one.step, run = following
            one.future = self._pools[one.step].submit(self._run, one, run)
        else:
            self._end(one)

    def _run(self, one: Read, run: Callable[[], object]) -> None:
        with self._giving_up:
            one.is_running = is_wanted = one.is_wanted()
            one.has_begun_to_load = is_wanted and one.step in ("load", "draft")
        if is_wanted:
            try:
                with torch.inference_mode():
                    one.result = run()
            except Exception as error:  # noqa: BLE001 (who needs it gets it)
                one.error = error
            one.is_running = False
        self._advance(one)

    def _end(self, one: Read) -> None:
        one.is_over = True
        self._ended.append(one)
        self._wake()
