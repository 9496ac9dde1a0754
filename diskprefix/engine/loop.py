"""The engine's thread: accepts requests, schedules a step, computes it, and has each reply take its logits."""

from __future__ import annotations

from collections import deque
from functools import partial

from diskprefix.cache.matching import RestoreResult
from diskprefix.engine.active_requests import ActiveRequests
from diskprefix.engine.ahead import Ahead
from diskprefix.engine.fetches import Fetches, RunningFetch
from diskprefix.engine.forward import StateLost, forward
from diskprefix.engine.idle_work import IdleWork
from diskprefix.engine.inbox import Inbox
from diskprefix.engine.picture_rows import PictureRowsSource
from diskprefix.engine.recheck import Recheck
from diskprefix.engine.running_request import Reply, ReplyState
from diskprefix.engine.scheduler import MAX_ROWS, NO_LIMIT, Chunk, Scheduler
from diskprefix.engine.served_model import ServedModel
from diskprefix.kv.sequence import KVSequence
from diskprefix.tokens import Logits, TokenIds, floor_to_grid

_MIN_WAIT_S = 1.0
"""The least time that a request waits for the disk. It waits longer if computing what is missing takes longer."""


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
        self._fetches = Fetches(served.cache, served.pages, inbox.wake)
        self._early_logits: deque[tuple[Reply, Logits]] = deque()
        """The final logits of wholly stored prompts, which are loaded before anything else. Filled on any thread."""
        self._idle = IdleWork(served, self._fetches.begin, inbox.wake)
        self._idle.tasks = [Recheck(self._idle), Ahead(self._idle, served.ahead)]
        served.ahead.on_job = inbox.wake
        if served.draft is not None:
            served.draft.begin_read = self._fetches.begin
        self._rows: PictureRowsSource | None = None
        """Gets the rows of pictures; None before the first one comes."""
        served.cache.on_forget.append(inbox.wake)
        served.constraints.on_ready = served.pages.pool.on_free = inbox.wake
        if not served.in_memory.done():
            served.in_memory.add_done_callback(lambda _: inbox.wake())

    def run(self) -> None:
        """Returns when the inbox is stopped. Raises `DeviceLost`."""
        try:
            # Bound: `Inbox.stop` ends the thread.
            while True:
                self._take_in()
                has_encoded = self._rows is not None and self._rows.run_slice()
                step = self._next_step()
                is_idle = not (step and self._compute(step)) and not has_encoded
                # The encoder goes on for clients that have gone, but not when all is over.
                is_idle |= self._inbox.is_over
                if is_idle and not self._inbox.is_over and self._works_ahead():
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
        """There is no request, and the model can compute."""
        return not self._active.requests and not self._inbox.queue_depth and self._served.in_memory.done()

    def _works_ahead(self) -> bool:
        """Computes something while there is no request. Returns False if there is nothing to do."""
        if not self._is_free:
            return False
        self._inbox.heartbeat.beat(MAX_ROWS)
        return self._idle.work()

    # Between two steps.

    def _take_in(self) -> None:
        """Handles all that has happened since the last step."""
        # First, so that what comes later ends the next wait.
        waiting = self._inbox.waiting()
        if waiting:
            self._idle.stop()
        active = self._active
        self._served.drop_gone()
        for running in [one for one in active.requests if one.ticket.cancelled and not one.is_fetching]:
            with active.failing(running):
                active.cancel(running)
        # Bound: each prompt that is fetched adds one at the most.
        while self._early_logits:
            reply, logits = self._early_logits.popleft()
            reply.sample_early(logits)
        for read in self._fetches.take():
            read.on_end(read)
        self._take_rows()
        for reply in [reply for reply in active.replies if reply.held is not None]:
            if not reply.running.is_over:
                with active.failing(reply.running):
                    self._apply(reply, reply.resume())
        for reply in active.admit(waiting):
            with active.failing(reply.running):
                self._start(reply)

    def _start(self, reply: Reply) -> None:
        """Fetches the stored state of a reply that has just got memory. If there is nothing to fetch, begins to compute
        the reply."""
        running, sequence = reply.running, reply.state
        if not isinstance(sequence, KVSequence):
            self._begin(reply, RestoreResult())
            return
        token_ids, have = reply.restorable_ids(), sequence.num_tokens
        logits = self._served.pages.running[sequence].logits
        is_whole = have + (logits is None) >= len(token_ids)
        # A request is fetched once even if memory has all of its prompt: the match decides what is to be saved.
        if running.request.cache.scope.kind == "off" or (running.is_chosen and is_whole):
            self._begin(reply, RestoreResult(num_tokens=have, logits=logits))
            return
        self._fetches.begin(self._fetch_of(reply, sequence, token_ids, logits))
        reply.is_fetching = True
        if logits is not None:
            reply.sample_early(logits)

    def _fetch_of(self, reply: Reply, sequence: KVSequence, token_ids: TokenIds, logits: Logits | None) -> RunningFetch:
        running, cache, pages = reply.running, self._served.cache, self._served.pages

        def is_needed() -> bool:
            return not running.ticket.cancelled and running.error is None

        read = RunningFetch(is_needed, partial(self._end_fetch, reply))

        def on_block(number: int) -> None:
            pages.name_restored(sequence, number)
            # A waiting request may begin with the block.
            self._inbox.wake()

        def on_logits(logits: Logits) -> None:
            self._early_logits.append((reply, logits))
            self._inbox.wake()

        read.patience, have = running.request.patience, sequence.num_tokens
        # The fetch may take tokens back, so others must not begin with them.
        pages.set_ready(sequence, 0)
        read.fetch = running.cached.begin_fetch(sequence, token_ids, have, logits, on_logits, on_block, read.is_wanted)
        if (token_s := cache.cost_model.prefill_s_per_token) is not None:
            read.patience_s = max(_MIN_WAIT_S, token_s * (len(token_ids) - have))
        is_shared = cache.remote is not None and not running.is_chosen
        read.steps = read.run_steps(prefetches=is_shared and not self._fetches.prefetch_hangs)
        return read

    def _end_fetch(self, reply: Reply, read: RunningFetch) -> None:
        """Begins a reply with the state that was fetched, or after a fetch that is given up, with what memory has. If a
        thread may still write to its pages, the reply gets others, and the first ones end when that thread returns."""
        running, fetch = reply.running, read.fetch
        if read.is_late:
            fetch.close()
            if read.has_begun_to_load:
                self._served.pages.end(fetch.sequence, keep=False)
            return
        reply.is_fetching = False
        running.error = running.error or read.error
        if read.is_given_up and read.has_begun_to_load:
            self._active.abandon_memory(reply)
            return
        if read.is_given_up and read.step == "prefetch" and read.is_needed():
            # Only the shared tier failed. The disk may have the state.
            self._start(reply)
            return
        with self._active.failing(running):
            self._begin(reply, running.cached.take(fetch, gave_up=read.is_given_up))

    def _begin(self, reply: Reply, restored: RestoreResult) -> None:
        """Begins to compute what was not restored."""
        running, state = reply.running, reply.state
        with self._active.failing(running):
            if running.error is not None:
                raise running.error
            if not running.is_chosen:
                running.is_chosen = True
                running.cached.choose(state if isinstance(state, KVSequence) else None)
                reply.stops = running.cached.selection.checkpoints
                running.report_progress(restored.num_tokens)
            reply.num_computed = restored.num_tokens
            reply.count_ready()
            is_at_end = restored.num_tokens == reply.prompt_tokens and not reply.token_ids
            if running.ticket.cancelled:
                if not running.is_fetching:
                    self._active.cancel(running)
            elif is_at_end and restored.logits is not None:
                self._apply(reply, reply.end_prompt(restored.logits))
            else:
                self._served.speculation.begin(reply)
                self._schedule(reply)

    def _schedule(self, reply: Reply) -> None:
        """Has the next steps compute a reply, as far as it has the rows of its pictures. Has the next rows fetched."""
        pictures, reply.limit = reply.running.pictures, NO_LIMIT
        if pictures is not None and reply.num_computed < reply.prompt_tokens:
            self._rows = self._rows or self._new_rows()
            options = reply.running.request.cache
            # Bound: each round gives a picture its rows, or leaves.
            while (number := pictures.missing(reply.num_computed)) is not None:
                if not self._rows.want(pictures, number, options):
                    break
            reply.limit = pictures.limit(reply.num_computed)
            if not reply.packs:
                reply.limit = floor_to_grid(reply.limit, reply.grid)
            if reply.limit <= reply.num_computed:
                self._scheduler.remove(reply)
                return
        self._scheduler.add(reply)

    def _new_rows(self) -> PictureRowsSource:
        served, inbox = self._served, self._inbox
        return PictureRowsSource(served.encoder, served.encoded, self._fetches.begin, inbox.wake, inbox.heartbeat.beat)

    def _take_rows(self) -> None:
        """Schedules the prompts that got rows of pictures since the last step."""
        for pictures, error in () if self._rows is None else self._rows.take():
            for running in [one for one in self._active.requests if one.pictures is pictures]:
                with self._active.failing(running):
                    if error is not None:
                        raise error
                    for reply in running.replies:
                        if reply.state is not None and not reply.is_fetching and reply.num_computed < reply.num_known:
                            self._schedule(reply)

    # One step.

    def _next_step(self) -> list[Chunk[Reply]]:
        if not self._served.in_memory.done():
            # Wholly stored prompts get their first tokens meanwhile. If the load fails, a step raises its error.
            return []
        self._served.speculation.plan(self._scheduler.next_replies())
        return self._scheduler.schedule(self._served.pace.max_prompt_rows(self._scheduler.crowd))

    def _compute(self, step: list[Chunk[Reply]]) -> bool:
        """Computes a step. Returns False if it must wait for a fetch to free memory."""
        num_preempted = len(self._active.waiting)
        step = self._active.with_memory(step)
        if not step:
            # The rest of the step, now: the replies that lost their memory would get it back first.
            # Bound: each call has taken the memory of a reply.
            others = self._next_step() if len(self._active.waiting) > num_preempted else []
            return bool(others) and self._compute(others)
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
        """Acts on the state of a reply after it took logits. A request ends with its last reply."""
        running = reply.running
        if state == "computing":
            self._schedule(reply)
        elif state == "waiting":
            self._scheduler.remove(reply)
        else:
            self._active.release(reply, keep=reply.index == 0)
            if all(one.is_finished for one in running.replies) and not running.is_over:
                self._active.end_request(running, running.done_event)
