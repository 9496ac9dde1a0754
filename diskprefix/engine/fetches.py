"""The fetches of all requests, on threads: a quick step never waits behind a slow one, and no request waits for ever.

Each kind of step has threads of its own. While a fetch has not begun to load, its request may give it up, and is
computed in the pages that it has. A load that does not move is given up too, but its thread may still write to the
pages: they stay with the fetch until the thread returns, and the request gets others. While a thread hangs, nothing new
is read from the disk, so the number of threads is bounded.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import torch

from diskprefix.cache.fetch import Fetch, Step
from diskprefix.cache.tiers.loading import MOST_LOADS
from diskprefix.engine.running_request import Reply
from diskprefix.engine.served_model import ServedModel
from diskprefix.kv.sequence import KVSequence

_STALL_S = 10.0
"""A step that has done nothing for so many seconds hangs. A disk that slept may take nearly as long."""
_LEAST_WAIT_S = 1.0
"""The least time in which the disk is to say what is stored. Else a request waits as long as computing would take."""
_LOOK_S = 1.0
"""Seconds between two looks at fetches that do not move."""
_END_S = 5.0
"""Seconds that the end waits for steps which run."""


@dataclass(eq=False)
class RunningFetch:
    """A fetch for a reply, and how far it is. Its steps run one after the other."""

    reply: Reply
    fetch: Fetch = field(init=False)
    steps: Iterator[Step] = field(default_factory=lambda: iter(()))
    """The steps that have not begun."""
    patience_s: float = math.inf
    """Seconds that the request waits for the disk, unless it loads."""
    waits_since: float = math.inf
    """When it began to wait for the disk."""
    step: Step | None = None
    """The step that runs."""
    moved_at: float = 0.0
    """When this step did something last."""
    has_begun_to_load: bool = False
    """Its thread may write to the pages of the sequence until it returns."""
    is_given_up: bool = False
    hangs: bool = False
    """It was given up because it did not move."""
    is_late: bool = False
    """It was given up, and its thread has returned."""
    error: Exception | None = None
    future: Future[None] | None = None


class Fetches:
    """Runs fetches. For the engine's thread. `wake` is called, on any thread, when `take` has something to return, or
    another request may begin with a block that was loaded."""

    def __init__(self, served: ServedModel, wake: Callable[[], None]) -> None:
        self.early_logits: deque[tuple[Reply, torch.Tensor]] = deque()
        """The final logits of prompts that are wholly stored, which are loaded before all else. Filled on any
        thread."""
        self._served, self._wake = served, wake
        self._pools: dict[Step, Executor] = {
            "prefetch": ThreadPoolExecutor(served.max_sequences, thread_name_prefix="kv-prefetch"),
            "seen": ThreadPoolExecutor(1, thread_name_prefix="kv-seen"),
            "match": ThreadPoolExecutor(1, thread_name_prefix="kv-match"),
            "load": ThreadPoolExecutor(MOST_LOADS, thread_name_prefix="kv-load"),
        }
        self._open: list[RunningFetch] = []
        """Fetches whose threads have not returned."""
        self._ended: deque[RunningFetch] = deque()
        self._giving_up = threading.Lock()
        """Held while it is decided that a fetch loads, or that its request goes on without it."""
        self._is_ending = False

    def begin(self, reply: Reply, sequence: KVSequence) -> None:
        """Begins to fetch what is stored of a request's prompt, or of a reply that was preempted, into its memory."""
        one, running, pages = RunningFetch(reply), reply.running, self._served.pages

        def on_block(number: int) -> None:
            pages.name_restored(sequence, number)
            # A request that waits may begin with it.
            self._wake()

        # The fetch may take them back.
        have, sequence.num_ready = sequence.num_ready, 0
        is_wanted = partial(self._is_wanted, one)
        if running.is_chosen:
            one.fetch = running.cached.begin_recall(sequence, have, on_block, is_wanted)
        else:
            one.fetch = running.cached.begin_fetch(
                sequence, have, sequence.logits, partial(self._tell_logits, reply), on_block, is_wanted
            )
        if (token_s := self._served.cache.cost_model.prefill_s_per_token) is not None:
            one.patience_s = max(_LEAST_WAIT_S, token_s * (len(one.fetch.token_ids) - have))
        if self._served.cache.tiered.stalled is None:
            one.steps = self._steps(one)
        self._open.append(one)
        self._advance(one)

    def take(self) -> list[RunningFetch]:
        """Returns the fetches that ended, and those that are given up now. A fetch that is given up is returned again
        when it `is_late`."""
        now, found, cache = time.monotonic(), list[RunningFetch](), self._served.cache
        while self._ended:
            one = self._ended.popleft()
            self._open.remove(one)
            one.is_late = one.is_given_up
            found.append(one)
        for one in self._open:
            if not one.is_given_up and self._has_stalled(one, now):
                one.hangs = True
                cache.count("stalled_reads")
        is_stalled = any(one.hangs for one in self._open)
        cache.tiered.note_stall(_STALL_S if is_stalled else None)
        self._served.pages.disk_hangs = is_stalled
        for one in [one for one in self._open if not one.is_given_up]:
            is_in_vain = is_stalled or not self._is_needed(one) or now - one.waits_since > one.patience_s
            with self._giving_up:
                one.is_given_up = one.hangs or (is_in_vain and not one.has_begun_to_load)
            if one.is_given_up:
                found.append(one)
        return found

    @property
    def look_in_s(self) -> float | None:
        """The seconds until the loop must look again: at fetches that do not move, and, while a thread hangs, at
        requests that wait for memory, because nothing may wake them."""
        return _LOOK_S if self._open else None

    def close(self) -> None:
        """Ends all fetches. Does not wait for ever for threads that hang: the process ends without them."""
        self._is_ending = True
        for pool in self._pools.values():
            pool.shutdown(wait=False)
        wait([one.future for one in self._open if one.step is not None and one.future is not None], _END_S)
        for one in self._open:
            if one.step is None:
                one.fetch.close()

    # On any thread.

    def _is_needed(self, one: RunningFetch) -> bool:
        running = one.reply.running
        return not (running.ticket.cancelled or running.error is not None or self._is_ending)

    def _is_wanted(self, one: RunningFetch) -> bool:
        """Returns whether a fetch is to go on. If it asks, it moves."""
        one.moved_at = time.monotonic()
        return self._is_needed(one) and not one.is_given_up

    def _has_stalled(self, one: RunningFetch, now: float) -> bool:
        most_s = _STALL_S + (self._served.cache.settings.remote_deadline if one.step == "prefetch" else 0.0)
        return one.step is not None and now - one.moved_at > most_s

    def _tell_logits(self, reply: Reply, logits: torch.Tensor) -> None:
        self.early_logits.append((reply, logits))
        self._wake()

    def _steps(self, one: RunningFetch) -> Iterator[Step]:
        if self._served.cache.remote is not None and not one.reply.running.is_chosen:
            yield "prefetch"
        one.waits_since = time.monotonic()
        if one.fetch.must_read_seen:
            yield "seen"
        yield "match"
        if one.fetch.needs_load:
            yield "load"

    def _advance(self, one: RunningFetch) -> None:
        """Has the next step run, or ends the fetch."""
        step = next(one.steps, None) if one.error is None and self._is_wanted(one) else None
        if step is not None:
            one.future = self._pools[step].submit(self._run, one, step)
        else:
            self._end(one)

    def _run(self, one: RunningFetch, step: Step) -> None:
        with self._giving_up:
            is_wanted = self._is_wanted(one)
            if is_wanted:
                one.step, one.has_begun_to_load = step, step == "load"
        if is_wanted:
            try:
                with torch.inference_mode():
                    one.fetch.run_step(step)
            except Exception as error:  # noqa: BLE001 (the loop raises it)
                one.error = error
            one.step = None
        self._advance(one)

    def _end(self, one: RunningFetch) -> None:
        self._ended.append(one)
        self._wake()
