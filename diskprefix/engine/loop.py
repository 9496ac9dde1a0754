"""The engine's thread: accept requests, schedule a step, compute it, and have each reply take its logits."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch

from diskprefix.engine.active_requests import ActiveRequests
from diskprefix.engine.forward import StateLost, forward
from diskprefix.engine.inbox import Inbox
from diskprefix.engine.running_request import Reply, ReplyState, RunningRequest
from diskprefix.engine.scheduler import Chunk, Scheduler
from diskprefix.engine.served_model import ServedModel
from diskprefix.kv.arena import KVArena


class Engine(ServedModel):
    """A loaded model that serves requests."""

    def serve(self, inbox: Inbox) -> None:
        """Computes the requests of `inbox` until it is stopped. Raises `DeviceLost`."""
        Loop(self, inbox).run()


class Loop:
    """Serves the requests of one inbox, on the thread that calls `run`. Other threads restore state."""

    def __init__(self, served: ServedModel, inbox: Inbox) -> None:
        self._served = served
        self._inbox = inbox
        self._scheduler: Scheduler[Reply] = Scheduler(served.max_rows)
        self._active = ActiveRequests(served, inbox, self._scheduler)
        self._fetched: deque[RunningRequest] = deque()
        """Requests whose fetch is over. Filled by the fetch thread."""
        self._early_logits: deque[tuple[RunningRequest, torch.Tensor]] = deque()
        """Fully cached requests with their final logits, to sample before the restore ends. Filled as `_fetched`."""
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="kv-fetch")
        self._prefetchers = ThreadPoolExecutor(served.max_sequences, thread_name_prefix="kv-prefetch")
        """Each thread waits for the shared tier for one request."""
        self._is_ending = False
        served.cache.on_forget.append(inbox.wake)
        served.constraints.on_ready = inbox.wake

    def run(self) -> None:
        """Returns when the inbox is stopped. Raises `DeviceLost`."""
        try:
            with torch.inference_mode():
                self._served.warm_up_thread()
                while True:
                    self._take_in()
                    if step := self._next_step():
                        self._compute(step)
                    elif not self._inbox.wait(self._served.expires_in_s()):
                        return
        finally:
            self._is_ending = True
            self._prefetchers.shutdown()
            self._fetcher.shutdown()
            for running in self._active.requests:
                running.cached.close()

    # Between two steps.

    def _take_in(self) -> None:
        """Handles all that has happened since the last step."""
        # First, so that what comes later ends the next wait.
        waiting = self._inbox.waiting()
        active = self._active
        self._served.drop_gone()
        for running in [one for one in active.requests if one.ticket.cancelled and not one.is_fetching]:
            with active.failing(running):
                active.cancel(running)
        while self._early_logits:
            running, logits = self._early_logits.popleft()
            running.replies[0].sample_early(logits)
        while self._fetched:
            self._begin(self._fetched.popleft())
        for reply in [reply for running in active.requests for reply in running.replies if reply.held is not None]:
            if not reply.running.is_over:
                with active.failing(reply.running):
                    self._apply(reply, reply.resume())
        for running in [one for one in active.requests if one.unforked]:
            self._fork(running)
        if active.readmit():
            for running in active.admit(waiting):
                with active.failing(running):
                    self._start(running)

    def _start(self, running: RunningRequest) -> None:
        """Fetches the stored state of a new request's prompt, or begins to compute it."""
        allocation = running.replies[0].allocation
        if allocation is None or running.request.cache.scope.kind == "off":
            self._begin(running)
            return
        running.is_fetching = True
        # A fetch may move them.
        allocation.num_computed = 0
        if self._served.cache.remote is None:
            self._fetcher.submit(self._fetch, running)
        else:
            self._prefetchers.submit(self._prefetch, running)

    def _prefetch(self, running: RunningRequest) -> None:
        """Runs on a thread that waits for this request alone."""
        try:
            running.cached.prefetch(lambda: running.ticket.cancelled or self._is_ending, have=running.num_adopted)
        except Exception as error:  # noqa: BLE001 (`_begin` raises it)
            self._end_fetch(running, error)
            return
        self._fetcher.submit(self._fetch, running)

    def _fetch(self, running: RunningRequest) -> None:
        """Runs on the fetch thread."""
        allocation = running.replies[0].allocation
        assert allocation is not None
        is_whole = running.num_adopted == len(running.request.prompt.token_ids)

        def on_logits(logits: torch.Tensor) -> None:
            self._early_logits.append((running, logits))
            self._inbox.wake()

        error = None
        try:
            with torch.inference_mode():
                running.cached.fetch(
                    allocation.arena, running.num_adopted, allocation.logits if is_whole else None, on_logits
                )
        except Exception as raised:  # noqa: BLE001 (`_begin` raises it)
            error = raised
        self._end_fetch(running, error)

    def _end_fetch(self, running: RunningRequest, error: Exception | None) -> None:
        if error is not None:
            # Not otherwise: the engine's thread may set one at the same time (`sample_early`).
            running.error = error
        self._fetched.append(running)
        self._inbox.wake()

    def _begin(self, running: RunningRequest) -> None:
        """Begins to compute what was not restored."""
        running.is_fetching = False
        with self._active.failing(running):
            if running.error is not None:
                raise running.error
            restored, reply = running.cached.restored, running.replies[0]
            running.cached.choose(reply.state if isinstance(reply.state, KVArena) else None)
            reply.num_computed, reply.stops = restored.num_tokens, running.cached.selection.checkpoints
            if reply.allocation is not None:
                reply.allocation.num_computed = restored.num_tokens
            running.report_progress(restored.num_tokens)
            if running.ticket.cancelled:
                self._active.cancel(running)
            elif restored.logits is not None and restored.num_tokens == reply.prompt_tokens:
                self._apply(reply, reply.end_prompt(restored.logits))
            else:
                self._scheduler.add(reply)

    def _fork(self, running: RunningRequest) -> None:
        """Begins the other replies of a request, as many as there is memory for, with copies of the prompt's state."""
        source = running.source
        while source is not None and source.allocation is not None and running.unforked and self._active.has_place:
            with self._active.failing(running):
                allocation = self._served.pool.fork(source.allocation, source.prompt_tokens)
                if allocation is None:
                    return
                reply = running.unforked.pop(0)
                reply.use_memory(allocation)
                self._apply(reply, reply.begin())
        if not running.unforked:
            running.source = None

    # One step.

    def _next_step(self) -> list[Chunk[Reply]]:
        if self._served.speculation is not None:
            self._served.speculation.plan(self._scheduler.next_replies())
        return self._scheduler.schedule(self._served.pace.most_rows())

    def _compute(self, step: list[Chunk[Reply]]) -> None:
        step = self._active.with_memory(step)
        if not step:
            return
        num_rows = sum(chunk.num_rows for chunk in step)
        self._inbox.heartbeat.beat(num_rows)
        started = self._served.clock()
        results = forward(self._served.model, step)
        elapsed = self._served.clock() - started
        self._inbox.heartbeat.beat()
        self._served.record_step(step, elapsed)
        self._scheduler.advance(step)
        for chunk, result in zip(step, results, strict=True):
            reply = chunk.sequence
            if reply.running.is_over:
                continue
            with self._active.failing(reply.running):
                if isinstance(result, StateLost):
                    reply.packs = False
                    self._active.preempt(reply, "is computed again, its step failed")
                    continue
                if isinstance(result, Exception):
                    raise result
                self._apply(reply, reply.take_step(chunk, result, elapsed * chunk.num_rows / num_rows))

    def _apply(self, reply: Reply, state: ReplyState) -> None:
        """Does what follows from the state of a reply after its logits. A reply that has finished leaves its memory to
        one that has not begun, or gives it back. With its last reply, a request ends."""
        running = reply.running
        while state == "finished":
            self._scheduler.remove(reply)
            if running.source is not reply or not running.unforked:
                self._active.release(reply, keep=reply.index == 0)
                if all(one.is_finished for one in running.all_replies) and not running.is_over:
                    self._active.end_request(running, running.done_event)
                return
            following = running.unforked.pop(0)
            self._served.release_draft(reply, keep=True)
            reply.hand_memory_to(following)
            reply, state = following, following.begin()
        if state == "computing":
            self._scheduler.add(reply)
        else:
            self._scheduler.remove(reply)
