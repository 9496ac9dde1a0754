"""The requests that the engine has taken, and how each of them leaves it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from diskprefix.engine.activity import Activity
from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.inbox import Inbox, Ticket, error_event
from diskprefix.engine.job import Choice, Job
from diskprefix.engine.request import Event
from diskprefix.engine.scheduler import Scheduler
from diskprefix.engine.served_model import ServedModel
from diskprefix.errors import DeviceLost
from diskprefix.kv.arena import KVArena
from diskprefix.nouns import CacheReport

log = logging.getLogger("diskprefix")


class Running:
    """The jobs of one engine's thread. `preempted` lost their memory to others, and are computed again."""

    def __init__(self, served: ServedModel, inbox: Inbox, scheduler: Scheduler[Choice]) -> None:
        self.jobs: list[Job] = []
        self.preempted: list[Choice] = []
        self._served, self._inbox, self._scheduler = served, inbox, scheduler
        inbox.running_activities = self.activities

    @property
    def has_place(self) -> bool:
        """Whether one more sequence may run."""
        num_running = sum(not choice.is_finished for job in self.jobs for choice in job.choices)
        return num_running < self._served.max_sequences

    def activities(self) -> list[Activity]:
        """Returns what the jobs are doing; for any thread."""
        return [job.activity() for job in list(self.jobs)]

    def refuse(self, ticket: Ticket, error: Exception) -> None:
        """Fails a request that is no job yet."""
        raise_if_lost(error)
        self._inbox.begin(ticket)
        self._send(ticket, error_event(error, ticket.request))
        self._inbox.end(ticket)

    def release(self, choice: Choice, *, keep: bool) -> None:
        """Gives the memory of a sequence back. `keep`: the next turn may go on from it."""
        self._served.release_draft(choice, keep=keep)
        slot, choice.slot, choice.state = choice.slot, None, None
        self._scheduler.remove(choice)
        if slot is None:
            return
        options, kind = choice.job.request.cache, self._served.cache.layout.state_kind
        slot.token_ids = choice.computed_ids()
        slot.num_computed = len(slot.token_ids)
        if kind == "token":
            slot.num_exact = len(slot.token_ids)
        slot.expires_at = time.monotonic() + self._served.cache.lasts_s(options)
        is_usable = kind in ("token", "sliceable") or choice.num_computed <= choice.prompt_tokens
        keep = keep and is_usable and options.save and options.scope.kind != "off" and slot.num_exact > 0
        self._served.pool.release(slot, keep=keep)

    def end(self, job: Job, last: Callable[[CacheReport], Event | None]) -> None:
        """Ends a request, whatever goes wrong in it. `last` returns its last event."""
        job.is_over = True
        self.jobs.remove(job)
        try:
            if job.request.on_stage is not None:
                for stage in job.stages():
                    job.request.on_stage(stage)
            report = job.cached.close()
            self._served.record(job, report)
            event = last(report)
        except Exception as error:  # noqa: BLE001 (it is told, and the engine thread must outlive any request)
            raise_if_lost(error)
            event = error_event(error, job.request)
        if event is not None:
            self._send(job.ticket, event)
        self._inbox.end(job.ticket)

    def leave(self, job: Job) -> None:
        """The client has gone. What was computed for it is kept: the client may ask again."""
        log.info("[engine] %s cancelled", job.request.id)
        first = job.choices[0]
        if isinstance(first.state, KVArena) and first.num_computed and not job.is_published:
            job.cached.leave(first.state)
        self._drop(job, keep=True)
        self.end(job, lambda _: None)

    @contextmanager
    def failing(self, job: Job) -> Iterator[None]:
        """What goes wrong in it fails the job alone."""
        try:
            yield
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        raise_if_lost(error)
        self._drop(job, keep=False)
        self.end(job, lambda _: error_event(error, job.request))

    def _drop(self, job: Job, *, keep: bool) -> None:
        self.preempted = [choice for choice in self.preempted if choice.job is not job]
        for choice in job.choices:
            self.release(choice, keep=keep and choice.index == 0)

    def _send(self, ticket: Ticket, event: Event) -> None:
        """Sends a request's last event."""
        try:
            ticket.emit(event)
        except Exception:
            log.exception("[engine] %s: its end could not be told", ticket.request.id)
