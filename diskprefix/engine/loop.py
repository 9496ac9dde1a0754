"""The engine's thread: take requests in, schedule a step, run it, have tokens sampled. README.md has the picture."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch

from diskprefix.engine.admission import memory_for, new_job
from diskprefix.engine.forward import forward
from diskprefix.engine.inbox import Inbox, Ticket
from diskprefix.engine.job import Choice, Job
from diskprefix.engine.replies import Replies
from diskprefix.engine.running import Running
from diskprefix.engine.scheduler import Chunk, Scheduler
from diskprefix.engine.served_model import ServedModel
from diskprefix.kv.arena import KVArena
from diskprefix.kv.pool import Slot
from diskprefix.kv.uncached import TransformersState

log = logging.getLogger("diskprefix")

_CALLERS_BESIDE = 4
"""For each place: so many callers may have one reply without a place. Without keys, any number of salts are callers."""


class Loop:
    """Serves the requests of one inbox, on the thread that calls `run`. Restores run on a second thread; what waits
    for the shared tier, on more of them."""

    def __init__(self, served: ServedModel, inbox: Inbox) -> None:
        self._served = served
        self._inbox = inbox
        self._cache, self._pool, self._model = served.cache, served.pool, served.model
        self._scheduler: Scheduler[Choice] = Scheduler(served.max_rows)
        self._running = Running(served, inbox, self._scheduler)
        self._replies = Replies(served, self._running, self._scheduler)
        served.cache.writer.on_forget.append(inbox.wake)
        self._num_arrived = 0
        self._fetched: deque[Job] = deque()
        """Jobs whose fetch is over; appended by the fetching thread."""
        self._foretold: deque[tuple[Job, torch.Tensor]] = deque()
        """Jobs whose fetch is about to load all of the prompt, and the logits at its end; appended as above."""
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="kv-fetch")
        self._prefetchers = ThreadPoolExecutor(served.max_sequences, thread_name_prefix="kv-prefetch")
        """Each waits for the shared tier for one request, and no other request waits for that."""
        self._is_ending = False
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
                    elif not self._inbox.wait():
                        return
        finally:
            self._is_ending = True
            self._prefetchers.shutdown()
            self._fetcher.shutdown()
            for job in self._running.jobs:
                job.cached.close()

    def _take_in(self) -> None:
        """Everything that happens between two steps."""
        # First, so that what comes later ends the next wait.
        waiting = self._inbox.waiting()
        self._served.drop_gone()
        for job in [job for job in self._running.jobs if job.ticket.cancelled and not job.is_fetching]:
            with self._running.failing(job):
                self._running.leave(job)
        while self._foretold:
            self._replies.foretell(*self._foretold.popleft())
        while self._fetched:
            self._begin(self._fetched.popleft())
        for job in list(self._running.jobs):
            for choice in [choice for choice in job.choices if choice.held is not None and not job.is_over]:
                with self._running.failing(job):
                    self._replies.resume(choice)
        for job in [job for job in self._running.jobs if job.unforked]:
            self._replies.fork(job)
        if self._readmit():
            self._admit_all(waiting)

    # Admission: a request gets its memory, and what is stored of its prompt.

    def _readmit(self) -> bool:
        """Gives memory to those who lost theirs. Returns whether all have it."""
        while self._running.preempted:
            choice = min(self._running.preempted, key=lambda choice: choice.arrived)
            with self._running.failing(choice.job):
                slot = self._pool.take(choice.num_known)
                if slot is None:
                    return False
                self._running.preempted.remove(choice)
                if choice.index == 0 and choice.job.request.cache.scope.kind != "off":
                    slot.owner = self._cache.owner(choice.job.request.cache.tenant)
                choice.place(slot)
                self._scheduler.add(choice)
        return True

    def _admit_all(self, waiting: list[Ticket]) -> None:
        """Takes the requests that there is memory for. Callers take turns, and nobody passes one that waits for it.

        A caller of whom nothing runs needs no place: the replies of another may take minutes to end, and a row more in
        a step costs the others little.
        """
        running = [job.turn for job in self._running.jobs]
        numbered = list(enumerate(waiting))
        while numbered:
            item = min(numbered, key=lambda item: (running.count(item[1].request.cache.tenant.ids[:1]), item[0]))
            numbered.remove(item)
            ticket = item[1]
            is_first = ticket.request.cache.tenant.ids[:1] not in running
            has_place = is_first and len(set(running)) < _CALLERS_BESIDE * self._served.max_sequences
            if not has_place and not self._running.has_place:
                return
            try:
                state = memory_for(self._served, ticket.request, self._running.jobs)
            except Exception as error:  # noqa: BLE001 (it is told, and the engine thread must outlive any request)
                self._running.refuse(ticket, error)
                continue
            if state is None:
                return
            if not isinstance(state, str):
                self._admit(ticket, state)
                running.append(ticket.request.cache.tenant.ids[:1])

    def _admit(self, ticket: Ticket, state: Slot | TransformersState) -> None:
        request, prompt = ticket.request, ticket.request.prompt
        try:
            job = new_job(self._served, ticket, self._num_arrived)
            self._num_arrived += len(job.all_choices)
        except Exception as error:  # noqa: BLE001 (as above)
            if isinstance(state, Slot):
                self._pool.release(state, keep=True)
            self._running.refuse(ticket, error)
            return
        self._inbox.begin(ticket)
        self._running.jobs.append(job)
        with self._running.failing(job):
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
                choices[0].place(state)
                if request.cache.scope.kind != "off":
                    job.is_fetching = True
                    # A fetch may move them.
                    state.num_computed = 0
                    if self._cache.remote is None:
                        self._fetcher.submit(self._fetch, job)
                    else:
                        self._prefetchers.submit(self._prefetch, job)
                    return
            self._begin(job)

    def _prefetch(self, job: Job) -> None:
        """Runs on a thread that waits for this request alone."""
        job.fetched_from = time.perf_counter()
        try:
            job.cached.prefetch(lambda: job.ticket.cancelled or self._is_ending, have=job.num_adopted)
        except Exception as error:  # noqa: BLE001 (`_begin` raises it)
            job.error = error
            self._fetched.append(job)
            self._inbox.wake()
            return
        self._fetcher.submit(self._fetch, job)

    def _fetch(self, job: Job) -> None:
        """Runs on the fetching thread."""
        slot = job.choices[0].slot
        assert slot is not None
        if job.fetched_from is None:
            job.fetched_from = time.perf_counter()
        is_whole = job.num_adopted == len(job.request.prompt.token_ids)

        def on_logits(logits: torch.Tensor) -> None:
            self._foretold.append((job, logits))
            self._inbox.wake()

        try:
            with torch.inference_mode():
                job.cached.fetch(slot.arena, job.num_adopted, slot.logits if is_whole else None, on_logits)
        except Exception as error:  # noqa: BLE001 (`_begin` raises it)
            job.error = error
        self._fetched.append(job)
        self._inbox.wake()

    def _begin(self, job: Job) -> None:
        """What is restored is restored; now the rest is computed."""
        job.is_fetching = False
        job.computed_from = time.perf_counter()
        with self._running.failing(job):
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
                self._running.leave(job)
            elif restored.logits is not None and restored.num_tokens == choice.prompt_tokens:
                self._replies.end_prompt(choice, restored.logits)
            else:
                self._scheduler.add(choice)

    # One step.

    def _next_step(self) -> list[Chunk[Choice]]:
        if self._served.speculation is not None:
            self._served.speculation.plan([one for one in self._scheduler.sequences if one.packs and one.is_decoding])
        return self._scheduler.schedule(self._served.pace.most_rows())

    def _compute(self, step: list[Chunk[Choice]]) -> None:
        step = self._with_memory(step)
        if not step:
            return
        self._inbox.pulse.beat(sum(chunk.num_rows for chunk in step))
        started = self._served.clock()
        results = forward(self._model, step)
        elapsed, num_rows = self._served.clock() - started, sum(chunk.num_rows for chunk in step)
        self._inbox.pulse.beat()
        self._served.figures.add_step(num_rows, elapsed)
        decoding = [chunk.sequence for chunk in step if chunk.sequence.packs and chunk.sequence.is_decoding]
        if step[0].sequence.packs:
            prompt_rows = sum(chunk.num_rows for chunk in step if not chunk.sequence.is_decoding)
            self._served.pace.note(len(decoding), prompt_rows, elapsed)
        if self._served.speculation is not None and len(decoding) == len(step):
            num_drafted = sum(chunk.num_drafted for chunk in step)
            self._served.speculation.note(decoding, num_rows, num_drafted, elapsed)
        self._scheduler.advance(step)
        for chunk, result in zip(step, results, strict=True):
            choice = chunk.sequence
            if choice.job.is_over:
                continue
            with self._running.failing(choice.job):
                if isinstance(result, Exception):
                    raise result
                self._computed(chunk, result, elapsed * chunk.num_rows / num_rows)

    def _with_memory(self, step: list[Chunk[Choice]]) -> list[Chunk[Choice]]:
        """Makes room for a step. Where there is none, the youngest sequence gives up its memory, even if it is alone:
        to grow, it would need room for what it has beside what it gets."""
        for chunk in step:
            while chunk.sequence.slot is not None and not self._pool.grow(chunk.sequence.slot, chunk.end):
                jobs = [job for job in self._running.jobs if not job.is_fetching]
                holders = [choice for job in jobs for choice in job.choices if choice.slot is not None]
                self._preempt(max(holders, key=lambda choice: choice.arrived))
        return [chunk for chunk in step if chunk.sequence.state is not None]

    def _preempt(self, choice: Choice) -> None:
        log.info("[engine] %s waits: others need its memory", choice.job.request.id)
        assert choice.slot is not None
        self._served.figures.preemptions += 1
        self._scheduler.remove(choice)
        self._pool.release(choice.slot, keep=False)
        # What was held is computed again, too.
        choice.slot = choice.state = choice.held = None
        choice.num_computed = 0
        self._running.preempted.append(choice)
        job = choice.job
        if job.source is choice:
            # The others have nothing to begin from any more.
            self._running.preempted.extend(job.unforked)
            job.choices, job.unforked, job.source = job.all_choices, [], None

    def _computed(self, chunk: Chunk[Choice], logits: torch.Tensor, seconds: float) -> None:
        """`logits`: see `forward`."""
        choice, job = chunk.sequence, chunk.sequence.job
        arena = choice.state
        if choice.slot is not None:
            choice.slot.num_computed = choice.num_computed
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
            self._replies.end_prompt(choice, logits[-1])
        else:
            self._replies.go_on(choice, logits)
