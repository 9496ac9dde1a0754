"""The engine's thread: take requests in, schedule a step, run it, sample, send. README.md has the picture."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from diskprefix.cache_report import CacheReport
from diskprefix.engine.admission import memory_for, new_job
from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.forward import forward
from diskprefix.engine.inbox import Inbox, Ticket, error_event
from diskprefix.engine.job import Choice, Job
from diskprefix.engine.request import DoneEvent, Event, FinishEvent, FinishReason
from diskprefix.engine.scheduler import Chunk, Scheduler
from diskprefix.engine.served_model import ServedModel
from diskprefix.errors import DeviceLost
from diskprefix.kv.arena import KVArena
from diskprefix.kv.pool import Slot
from diskprefix.kv.uncached import TransformersState

log = logging.getLogger("diskprefix")


class Loop:
    """Serves the requests of one inbox, on the thread that calls `run`. Restores run on a second thread."""

    def __init__(self, served: ServedModel, inbox: Inbox) -> None:
        self._served = served
        self._inbox = inbox
        self._cache, self._pool, self._model = served.cache, served.pool, served.model
        self._scheduler: Scheduler[Choice] = Scheduler(served.max_rows)
        self._jobs: list[Job] = []
        self._preempted: list[Choice] = []
        """Those whose memory others needed. They are computed again, the oldest first."""
        self._num_arrived = 0
        self._fetched: deque[Job] = deque()
        """Jobs whose fetch is over; appended by the fetching thread."""
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="kv-fetch")

    def run(self) -> None:
        """Returns when the inbox is stopped. Raises `DeviceLost`."""
        try:
            with torch.inference_mode():
                while True:
                    self._take_in()
                    if step := self._scheduler.schedule():
                        self._compute(step)
                    elif not self._inbox.wait():
                        return
        finally:
            self._fetcher.shutdown()
            for job in self._jobs:
                job.cached.close()

    def _take_in(self) -> None:
        """Everything that happens between two steps."""
        # First, so that what comes later ends the next wait.
        waiting = self._inbox.waiting()
        for job in [job for job in self._jobs if job.ticket.cancelled and not job.is_fetching]:
            with self._failing(job):
                self._leave(job)
        while self._fetched:
            self._begin(self._fetched.popleft())
        for job in [job for job in self._jobs if job.unforked]:
            self._fork(job)
        if self._readmit():
            self._admit_all(waiting)

    # Admission: a request gets its memory, and what is stored of its prompt.

    def _readmit(self) -> bool:
        """Gives memory to those who lost theirs. Returns whether all have it."""
        while self._preempted:
            choice = min(self._preempted, key=lambda choice: choice.arrived)
            with self._failing(choice.job):
                slot = self._pool.take(choice.num_known)
                if slot is None:
                    return False
                self._preempted.remove(choice)
                if choice.index == 0 and choice.job.request.cache.scope.kind != "off":
                    slot.owner = self._cache.owner(choice.job.request.cache.tenant)
                self._place(choice, slot)
                self._scheduler.add(choice)
        return True

    def _admit_all(self, waiting: list[Ticket]) -> None:
        """Takes the requests that there is memory for. Callers take turns, and nobody passes one that waits for it."""
        running = [job.turn for job in self._jobs]
        numbered = list(enumerate(waiting))
        while numbered and self._has_place:
            item = min(numbered, key=lambda item: (running.count(item[1].request.cache.tenant.ids[:1]), item[0]))
            numbered.remove(item)
            ticket = item[1]
            try:
                state = memory_for(self._served, ticket.request, self._jobs)
            except Exception as error:  # noqa: BLE001 (it is told, and the engine thread must outlive any request)
                self._refuse(ticket, error)
                continue
            if state is None:
                return
            if not isinstance(state, str):
                self._admit(ticket, state)
                running.append(ticket.request.cache.tenant.ids[:1])

    @property
    def _has_place(self) -> bool:
        """Whether one more sequence may run."""
        num_running = sum(not choice.is_finished for job in self._jobs for choice in job.choices)
        return num_running < self._served.max_sequences

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        """Fails a request that is no job yet."""
        raise_if_lost(error)
        self._inbox.begin(ticket)
        self._send(ticket, error_event(error, ticket.request))
        self._inbox.end(ticket)

    def _admit(self, ticket: Ticket, state: Slot | TransformersState) -> None:
        request, prompt = ticket.request, ticket.request.prompt
        try:
            job = new_job(self._served, ticket, self._num_arrived)
            self._num_arrived += len(job.all_choices)
        except Exception as error:  # noqa: BLE001 (as above)
            if isinstance(state, Slot):
                self._pool.release(state, keep=True)
            self._refuse(ticket, error)
            return
        self._inbox.begin(ticket)
        self._jobs.append(job)
        with self._failing(job):
            choices = job.choices
            if isinstance(state, TransformersState):
                choices[0].state = state
                if prompt.media:
                    log.info(
                        "[disk-cache] %s: bypassed, the prompt holds media (%s)", request.id, ", ".join(prompt.media)
                    )
            else:
                job.num_adopted = state.num_computed
                state.token_ids, state.num_exact = prompt.token_ids, len(prompt.token_ids)
                self._place(choices[0], state)
                if request.cache.scope.kind != "off":
                    job.is_fetching = True
                    # A fetch may move them.
                    state.num_computed = 0
                    self._fetcher.submit(self._fetch, job)
                    return
            self._begin(job)

    def _fetch(self, job: Job) -> None:
        """Runs on the fetching thread."""
        slot = job.choices[0].slot
        assert slot is not None
        is_whole = job.num_adopted == len(job.request.prompt.token_ids)
        try:
            with torch.inference_mode():
                job.cached.fetch(slot.arena, have=job.num_adopted, logits=slot.logits if is_whole else None)
        except Exception as error:  # noqa: BLE001 (`_begin` raises it)
            job.error = error
        self._fetched.append(job)
        self._inbox.wake()

    def _begin(self, job: Job) -> None:
        """What is restored is restored; now the rest is computed."""
        job.is_fetching = False
        with self._failing(job):
            if job.error is not None:
                raise job.error
            restored, choice = job.cached.restored, job.choices[0]
            job.cached.choose(choice.state if isinstance(choice.state, KVArena) else None)
            choice.num_computed = restored.num_tokens
            if choice.slot is not None:
                choice.slot.num_computed = restored.num_tokens
                choice.slot.num_exact = choice.prompt_tokens if restored.exact else 0
            job.report_progress(restored.num_tokens)
            if job.ticket.cancelled:
                self._leave(job)
            elif restored.logits is not None and restored.num_tokens == choice.prompt_tokens:
                self._end_prompt(choice, restored.logits)
            else:
                self._scheduler.add(choice)

    def _place(self, choice: Choice, slot: Slot) -> None:
        choice.slot, choice.state = slot, slot.arena

    # One step.

    def _compute(self, step: list[Chunk[Choice]]) -> None:
        step = self._with_memory(step)
        if not step:
            return
        started = time.perf_counter()
        results = forward(self._model, step)
        elapsed, num_rows = time.perf_counter() - started, sum(chunk.num_rows for chunk in step)
        self._scheduler.advance(step)
        for chunk, result in zip(step, results, strict=True):
            choice = chunk.sequence
            if choice.job.is_over:
                continue
            with self._failing(choice.job):
                if isinstance(result, Exception):
                    raise result
                self._computed(chunk, result, elapsed * chunk.num_rows / num_rows)

    def _with_memory(self, step: list[Chunk[Choice]]) -> list[Chunk[Choice]]:
        """Makes room for a step. Where there is none, the youngest sequence gives up its memory, even if it is alone:
        to grow, it would need room for what it has beside what it gets."""
        for chunk in step:
            while chunk.sequence.slot is not None and not self._pool.grow(chunk.sequence.slot, chunk.end):
                jobs = [job for job in self._jobs if not job.is_fetching]
                holders = [choice for job in jobs for choice in job.choices if choice.slot is not None]
                self._preempt(max(holders, key=lambda choice: choice.arrived))
        return [chunk for chunk in step if chunk.sequence.state is not None]

    def _preempt(self, choice: Choice) -> None:
        log.info("[engine] %s waits: others need its memory", choice.job.request.id)
        assert choice.slot is not None
        self._scheduler.remove(choice)
        self._pool.release(choice.slot, keep=False)
        choice.slot = choice.state = None
        choice.num_computed = 0
        self._preempted.append(choice)
        job = choice.job
        if job.source is choice:
            # The others have nothing to begin from any more.
            self._preempted.extend(job.unforked)
            job.choices, job.unforked, job.source = job.all_choices, [], None

    def _computed(self, chunk: Chunk[Choice], logits: torch.Tensor, seconds: float) -> None:
        choice, job = chunk.sequence, chunk.sequence.job
        arena = choice.state
        if choice.slot is not None:
            choice.slot.num_computed = chunk.end
        if chunk.start < choice.prompt_tokens:
            job.prefill_s += seconds
            job.report_progress(chunk.end)
            if choice.index == 0 and isinstance(arena, KVArena) and not job.is_published:
                job.cached.after_step(arena)
        elif choice.index == 0 and isinstance(arena, KVArena):
            job.cached.after_decode(arena)
        if chunk.end < choice.num_known:
            return
        if chunk.end == choice.prompt_tokens:
            self._end_prompt(choice, logits)
        else:
            self._sample(choice, logits)

    def _end_prompt(self, choice: Choice, logits: torch.Tensor) -> None:
        """Begins a reply with its first token. That of the first choice goes out before the prompt is published."""
        job, state = choice.job, choice.state
        assert state is not None
        # A view would keep the logits of all sequences of the step.
        logits = logits.clone()
        if choice.slot is not None:
            choice.slot.logits_at, choice.slot.logits = choice.prompt_tokens, logits
        if job.unforked or (choice.slot is not None and self._cache.layout.is_sliceable):
            # Now: the next step changes states in place. The next turn may go on here too.
            state.mark()
        if job.unforked:
            job.source, job.logits = choice, logits
        self._sample(choice, logits)

    # Replies.

    def _sample(self, choice: Choice, logits: torch.Tensor) -> None:
        """Samples and sends the next token of a reply."""
        job = choice.job
        token = choice.sampler.sample(logits)
        job.count_token()
        logprobs = choice.sampler.logprobs(logits, token)
        is_last = len(choice.reply) + 1 == self._served.reply_limit(job.request)
        end: FinishReason | None = "stop" if choice.sampler.is_complete else "length" if is_last else None
        event, reason = self._served.token_event(choice.index, token, logprobs, choice.text, end)
        job.ticket.emit(event)
        if choice.index == 0 and not job.is_published and isinstance(choice.state, KVArena):
            job.is_published = True
            job.cached.publish(choice.state, logits, job.prefill_s)
        if reason is not None:
            self._finish(choice, reason)
            return
        choice.reply.append(token)
        choice.num_known += 1
        self._scheduler.add(choice)

    def _fork(self, job: Job) -> None:
        """Begins the other choices, as many as there is memory for, with a copy of the prompt's state."""
        source = job.source
        while source is not None and source.slot is not None and job.unforked and self._has_place:
            with self._failing(job):
                slot = self._pool.fork(source.slot, source.prompt_tokens)
                if slot is None:
                    return
                choice = job.unforked.pop(0)
                self._place(choice, slot)
                self._begin_reply(choice)
        if not job.unforked:
            job.source = None

    def _begin_reply(self, choice: Choice) -> None:
        """Begins a choice whose memory holds the prompt's state."""
        job = choice.job
        assert job.logits is not None
        job.choices.append(choice)
        choice.num_computed = choice.prompt_tokens
        self._sample(choice, job.logits)

    def _finish(self, choice: Choice, reason: FinishReason) -> None:
        job = choice.job
        if choice.index == 0 and isinstance(choice.state, KVArena):
            job.cached.publish_reply(choice.state, choice.computed_ids())
        choice.is_finished = True
        job.ticket.emit(FinishEvent(choice.index, reason, choice.text.stopped_by))
        self._scheduler.remove(choice)
        if job.source is choice and job.unforked:
            self._hand_over(choice, job.unforked.pop(0))
        else:
            self._release(choice, keep=choice.index == 0)
        are_done = all(other.is_finished for other in job.all_choices)
        if are_done and not job.is_over:
            self._end(job, lambda report: DoneEvent(job.usage(report.restored), report, job.timings()))

    def _hand_over(self, choice: Choice, following: Choice) -> None:
        """Begins the next choice in the memory of one that has ended."""
        assert choice.state is not None
        if isinstance(choice.state, KVArena):
            # What is captured of the reply is overwritten now.
            choice.state.settle(drop=True)
        choice.state.rewind()
        following.state, following.slot = choice.state, choice.slot
        choice.state = choice.slot = None
        choice.job.source = following if choice.job.unforked else None
        self._begin_reply(following)

    def _release(self, choice: Choice, *, keep: bool) -> None:
        """Gives the memory of a sequence back. `keep`: the next turn may go on from it."""
        slot, choice.slot, choice.state = choice.slot, None, None
        self._scheduler.remove(choice)
        if slot is None:
            return
        options, kind = choice.job.request.cache, self._cache.layout.state_kind
        slot.token_ids = choice.computed_ids()
        slot.num_computed = len(slot.token_ids)
        if kind == "token":
            slot.num_exact = len(slot.token_ids)
        slot.expires_at = float("inf") if options.ttl_s is None else time.monotonic() + options.ttl_s
        is_usable = kind in ("token", "sliceable") or choice.num_computed <= choice.prompt_tokens
        keep = keep and is_usable and options.save and options.scope.kind != "off" and slot.num_exact > 0
        self._pool.release(slot, keep=keep)

    # The end of a request.

    def _end(self, job: Job, last: Callable[[CacheReport], Event | None]) -> None:
        """Ends a request, whatever goes wrong in it. `last` returns its last event."""
        job.is_over = True
        self._jobs.remove(job)
        try:
            report = job.cached.close()
            self._served.record(job, report)
            event = last(report)
        except Exception as error:  # noqa: BLE001 (as above)
            raise_if_lost(error)
            event = error_event(error, job.request)
        if event is not None:
            self._send(job.ticket, event)
        self._inbox.end(job.ticket)

    def _send(self, ticket: Ticket, event: Event) -> None:
        """Sends a request's last event."""
        try:
            ticket.emit(event)
        except Exception:
            log.exception("[engine] %s: its end could not be told", ticket.request.id)

    def _leave(self, job: Job) -> None:
        """The client has gone. What was computed for it is kept: the client may ask again."""
        log.info("[engine] %s cancelled", job.request.id)
        first = job.choices[0]
        if isinstance(first.state, KVArena) and first.num_computed and not job.is_published:
            job.cached.leave(first.state)
        self._drop(job, keep=True)
        self._end(job, lambda _: None)

    def _fail(self, job: Job, error: Exception) -> None:
        raise_if_lost(error)
        self._drop(job, keep=False)
        self._end(job, lambda _: error_event(error, job.request))

    def _drop(self, job: Job, *, keep: bool) -> None:
        self._preempted = [choice for choice in self._preempted if choice.job is not job]
        for choice in job.choices:
            self._release(choice, keep=keep and choice.index == 0)

    @contextmanager
    def _failing(self, job: Job) -> Iterator[None]:
        """What goes wrong in it fails the job alone."""
        try:
            yield
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 (it is told, and the engine thread must outlive any request)
            self._fail(job, error)
