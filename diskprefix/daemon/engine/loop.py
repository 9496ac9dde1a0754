"""The engine's thread: accepts requests, schedules a step, computes it, and passes the logits to the replies."""

from __future__ import annotations

import logging
import math
from collections import deque
from functools import partial

from diskprefix.daemon.engine.active_requests import ActiveRequests
from diskprefix.daemon.engine.fetches import Fetches, ReadJob
from diskprefix.daemon.engine.forward import StateLost, forward
from diskprefix.daemon.engine.idle.ahead import Ahead
from diskprefix.daemon.engine.idle.idle_work import IdleWork
from diskprefix.daemon.engine.idle.kept_weights import KeptWeights
from diskprefix.daemon.engine.idle.recheck import Recheck
from diskprefix.daemon.engine.inbox import Inbox
from diskprefix.daemon.engine.pictures.picture_rows import PictureRowsSource
from diskprefix.daemon.engine.running_request import Reply, ReplyState
from diskprefix.daemon.engine.scheduler import MAX_ROWS, NO_LIMIT, Chunk, Scheduler
from diskprefix.daemon.engine.served_model import ServedModel
from diskprefix.daemon.engine.stay import Stay
from diskprefix.prefixstore.cache.matching import RestoreResult
from diskprefix.prefixstore.kv.page_cache import MemoryWait
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.memory import trim_heap
from diskprefix.tokens import Logits, TokenIds, floor_to_grid

log = logging.getLogger("diskprefix")

_REST_BESIDE = 7
"""Beside requests, idle work rests for this multiple of the time of its last step."""
_MIN_WAIT_S = 1.0
"""The minimum time that a request waits for the disk. It waits longer if computing the missing tokens takes longer."""


class Engine(ServedModel):
    """A loaded model that serves requests."""

    def serve(self, inbox: Inbox) -> None:
        """Computes the requests of `inbox` until it is stopped. Raises `DeviceLost`."""
        Loop(self, inbox).run()


class Loop:
    """Serves the requests of one inbox, on the thread that calls `run`."""

    def __init__(self, served: ServedModel, inbox: Inbox) -> None:
        self._served = served
        self._inbox = inbox
        self._scheduler: Scheduler[Reply] = Scheduler(served.max_rows)
        self._active = ActiveRequests(served, inbox, self._scheduler)
        self._fetches = Fetches(served.cache, served.pages, served.pools.steps, inbox.wake)
        self._early_logits: deque[tuple[Reply, Logits]] = deque()
        """The final logits of fully stored prompts. They are loaded before the state. Filled on any thread."""
        self._idle = IdleWork(served, self._fetches.begin_read, inbox.wake)
        recheck = Recheck(self._idle)
        self._idle.tasks = [recheck, Ahead(self._idle, served.ahead), KeptWeights(self._idle, served.keep_weights())]

        def compare_soon() -> None:
            recheck.note_due()
            inbox.wake()

        served.cache.bits.on_beside = compare_soon
        self._idle_at = -math.inf
        """The time on the engine's clock before which nothing is done beside requests."""
        served.ahead.on_job = inbox.wake
        if served.draft is not None:
            served.draft.begin_read = self._fetches.begin_read
        self._rows: PictureRowsSource | None = None
        """Gets the rows of pictures; None before the first picture comes."""
        served.cache.on_forget.append(inbox.wake)
        inbox.on_idle = partial(served.pools.idle.submit, trim_heap)
        served.constraints.on_ready = served.pages.pool.on_free = inbox.wake
        if not served.in_memory.done():
            served.in_memory.add_done_callback(lambda _: inbox.wake())

    def run(self) -> None:
        """Serves requests until the inbox is stopped. Raises `DeviceLost`."""
        try:
            # Bound: `Inbox.stop` ends the thread.
            while True:
                self._take_in()
                has_encoded = self._rows is not None and self._rows.run_slice()
                step = self._next_step()
                is_idle = not (step and self._compute_step(step)) and not has_encoded
                # The encoder goes on for clients that have gone, but not once the inbox is stopped.
                is_idle |= self._inbox.is_over
                works = not self._inbox.is_over and self._works_ahead(is_idle=is_idle)
                if is_idle and works:
                    continue
                ahead_s = self._idle.wait_s if self._is_free else None
                times = [s for s in (self._served.expires_in_s(), self._fetches.check_in_s, ahead_s) if s is not None]
                if is_idle and not self._inbox.wait(min(times, default=None)):
                    return
        finally:
            self._idle.close()
            self._fetches.close()
            if self._rows is not None:
                self._rows.close()
            for running in self._active.requests:
                running.cached.close()

    @property
    def _is_free(self) -> bool:
        """True if there is no request and the model can compute."""
        return not self._active.requests and not self._inbox.queue_depth and self._served.in_memory.done()

    def _works_ahead(self, *, is_idle: bool) -> bool:
        """Does a piece of idle work while there is no request, or one that goes on beside requests: an eighth of the
        time, unless the requests wait for something else. Returns False if there is nothing to do."""
        is_beside, clock = not self._is_free, self._served.clock
        if is_beside and not (self._idle.goes_beside and self._served.in_memory.done()):
            return False
        if not is_idle and clock() < self._idle_at:
            return False
        self._inbox.heartbeat.beat(MAX_ROWS)
        began = clock()
        works = self._idle.work(is_beside=is_beside)
        self._idle_at = clock() + _REST_BESIDE * (clock() - began)
        return works

    # Between two steps.

    def _take_in(self) -> None:
        """Handles all events since the last step."""
        # First, so that later events end the next wait.
        waiting = self._inbox.waiting()
        if waiting:
            self._idle.stop()
        active = self._active
        self._served.drop_gone()
        for running in [request for request in active.requests if request.ticket.cancelled]:
            active.cancel(running)
        # Bound: each fetched prompt adds at most one.
        while self._early_logits:
            reply, logits = self._early_logits.popleft()
            with active.failing(reply.running):
                reply.sample_early(logits)
        for job in self._fetches.ended_reads():
            job.on_end(job)
        self._take_rows()
        for reply in [reply for reply in active.replies if reply.held is not None]:
            if not reply.running.is_over:
                with active.failing(reply.running):
                    self._apply(reply, reply.resume())
        for reply in active.admit(waiting):
            with active.failing(reply.running):
                self._start(reply)
        waits = (*(ticket.wait for ticket in waiting), *(reply.wait for reply in active.waiting))
        if any(isinstance(wait, MemoryWait) for wait in waits):
            self._idle.give_way()

    def _start(self, reply: Reply) -> None:
        """Begins to restore the stored state of a reply that has just got memory. If there is nothing to restore,
        begins to compute the reply."""
        running, sequence = reply.running, reply.state
        if not isinstance(sequence, KVSequence):
            self._begin_reply(reply, RestoreResult())
            return
        token_ids, in_memory_tokens = reply.restorable_ids(), sequence.num_tokens
        logits = self._served.pages.running[sequence].logits
        is_whole = in_memory_tokens + (logits is None) >= len(token_ids)
        # A request is matched once even if memory has its whole prompt: the match decides how much must be saved.
        if running.request.cache.scope.kind == "off" or (running.cached.is_chosen and is_whole):
            self._begin_reply(reply, RestoreResult(num_tokens=in_memory_tokens, logits=logits))
            return
        self._read(reply, sequence, token_ids, logits)
        if logits is not None:
            reply.sample_early(logits)

    def _read(self, reply: Reply, sequence: KVSequence, token_ids: TokenIds, logits: Logits | None) -> None:
        """Begins to read the stored state of `token_ids`."""
        running, cache, pages, stay = reply.running, self._served.cache, self._served.pages, reply.stay
        assert stay is not None
        job = ReadJob(lambda: not running.ticket.cancelled, patience=running.request.patience)

        def on_block(number: int) -> None:
            pages.name_restored(sequence, number)
            # A waiting request may share the block.
            self._inbox.wake()

        def on_logits(logits: Logits) -> None:
            self._early_logits.append((reply, logits))
            self._inbox.wake()

        in_memory_tokens = sequence.num_tokens
        restore = running.cached.begin_restore(
            sequence, token_ids, in_memory_tokens, logits, on_logits, on_block, job.is_wanted
        )
        if (token_s := cache.cost_model.prefill_s_per_token) is not None:
            job.patience_s = max(_MIN_WAIT_S, token_s * (len(token_ids) - in_memory_tokens))
        is_shared = cache.remote is not None and not running.cached.is_chosen
        job.steps = restore.steps(prefetches=is_shared and not self._fetches.prefetch_hangs)
        on_end = partial(self._end_read, reply, stay, job)
        stay.read(self._fetches.begin_read, job, running.cached, restore, on_end)

    def _end_read(self, reply: Reply, stay: Stay, job: ReadJob) -> None:
        """Begins a reply with the restored state, or, if the read was given up, with the state in memory. If a thread
        may still write to the reply's pages, the reply waits for other pages."""
        with self._active.failing(reply.running):
            if job.is_given_up and job.has_begun_to_load:
                log.info("[engine] %s is computed: the disk does not answer", reply.running.request.id)
                self._active.leave_memory(reply)
            elif job.is_given_up and job.step == "prefetch":
                # Only the shared tier failed. The disk may have the state.
                self._start(reply)
            else:
                self._begin_reply(reply, stay.take_restored())

    def _begin_reply(self, reply: Reply, restored: RestoreResult) -> None:
        """Begins to compute the tokens of a reply that were not restored."""
        running, state = reply.running, reply.state
        with self._active.failing(running):
            if not running.cached.is_chosen:
                running.cached.choose(state if isinstance(state, KVSequence) else None)
                reply.stops = running.cached.selection.checkpoints
                running.report_progress(restored.num_tokens)
            reply.num_computed = restored.num_tokens
            reply.count_ready()
            is_at_end = restored.num_tokens == reply.prompt_tokens and not reply.token_ids
            if is_at_end and restored.logits is not None:
                self._apply(reply, reply.end_prompt(restored.logits))
            else:
                self._served.speculation.begin_reply(reply)
                self._schedule(reply)

    def _schedule(self, reply: Reply) -> None:
        """Adds a reply to the next steps, up to the first picture without rows. Begins to get those rows."""
        pictures, reply.limit = reply.running.pictures, NO_LIMIT
        if pictures is not None and reply.num_computed < reply.prompt_tokens:
            self._rows = self._rows or self._new_rows()
            options = reply.running.request.cache
            # Bound: each round gives a picture its rows, or leaves the loop.
            while (number := pictures.missing(reply.num_computed)) is not None:
                if not self._rows.want(pictures, number, options):
                    break
            reply.limit = pictures.limit(reply.num_computed)
            if not reply.packs:
                reply.limit = floor_to_grid(reply.limit, reply.grid)
            if reply.limit <= reply.num_computed:
                self._scheduler.remove_sequence(reply)
                return
        self._scheduler.add_sequence(reply)

    def _new_rows(self) -> PictureRowsSource:
        served, inbox = self._served, self._inbox
        return PictureRowsSource(
            served.encoder, served.encoded, self._fetches.begin_read, inbox.wake, inbox.heartbeat.beat, served.pools
        )

    def _take_rows(self) -> None:
        """Schedules the prompts that got rows of pictures since the last step. Fails the prompts that got an error."""
        for pictures, error in () if self._rows is None else self._rows.ready_prompts():
            for running in [request for request in self._active.requests if request.pictures is pictures]:
                with self._active.failing(running):
                    if error is not None:
                        raise error
                    for reply in running.replies:
                        if reply.stage == "computing" and reply.num_computed < reply.num_known:
                            self._schedule(reply)

    # One step.

    def _next_step(self) -> list[Chunk[Reply]]:
        if not self._served.in_memory.done():
            # Fully stored prompts get their first tokens meanwhile. If the load fails, a step raises the error.
            return []
        self._served.speculation.plan(self._scheduler.next_replies())
        return self._scheduler.schedule(self._served.pace.max_prompt_rows(self._scheduler.shares))

    def _compute_step(self, step: list[Chunk[Reply]]) -> bool:
        """Computes a step. Returns False if it must wait for a fetch to free memory."""
        num_preempted = len(self._active.waiting)
        step = self._active.with_memory(step)
        if not step:
            # Compute the rest of the step now. In the next round, preempted replies would take their memory back first.
            # Bound: each call has preempted a reply.
            others = self._next_step() if len(self._active.waiting) > num_preempted else []
            return bool(others) and self._compute_step(others)
        num_rows = sum(chunk.num_rows for chunk in step)
        self._inbox.heartbeat.beat(num_rows)
        started = self._served.clock()
        results = forward(self._served.runtime, step)
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
                    self._active.preempt(reply, "is computed again, its step failed", is_sound=False)
                    continue
                if isinstance(result, Exception):
                    raise result
                self._apply(reply, reply.take_step(chunk, result, elapsed * chunk.num_rows / num_rows))
        return True

    def _apply(self, reply: Reply, state: ReplyState) -> None:
        """Handles the state of a reply after it took logits. A request ends with its last reply."""
        running = reply.running
        if state == "computing":
            self._schedule(reply)
        elif state == "waiting":
            self._scheduler.remove_sequence(reply)
        else:
            self._active.end_reply(reply, keep=reply.index == 0)
            if all(each.is_finished for each in running.replies):
                self._active.end_request(running, running.done_event)
