"""The requests that the engine has accepted: how each gets its memory, may lose it to others, and ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from diskprefix.engine.constrained_reply import ConstrainedReply
from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.gauges import Activity
from diskprefix.engine.guesser import Guesser
from diskprefix.engine.inbox import Inbox, Ticket, error_event
from diskprefix.engine.request import Event, GenerateRequest
from diskprefix.engine.running_request import Reply, RunningRequest
from diskprefix.engine.sampler import Sampler
from diskprefix.engine.scheduler import Chunk, Scheduler
from diskprefix.engine.served_model import ServedModel
from diskprefix.engine.thought_limit import ThoughtLimit
from diskprefix.errors import DeviceLost
from diskprefix.kv.page_cache import Later, NoRoom, held_up
from diskprefix.kv.sequence import KVSequence
from diskprefix.kv.uncached import TransformersState
from diskprefix.model.exact.runner import State
from diskprefix.nouns import CacheReport
from diskprefix.tokens import TokenIds

log = logging.getLogger("diskprefix")

_CALLERS_PER_SEQUENCE = 4
"""The most callers, for each of `max_sequences`, that may have one reply above that limit. A client without an API key
can make any number of callers with salts."""

_WRITE_S = 0.25
"""The longest wait for one publication to be written when all pages are in use."""


class ActiveRequests:
    """The requests of one engine's thread. `preempted` replies lost their memory to others."""

    def __init__(self, served: ServedModel, inbox: Inbox, scheduler: Scheduler[Reply]) -> None:
        self.requests: list[RunningRequest] = []
        self.preempted: list[Reply] = []
        self._served, self._inbox, self._scheduler = served, inbox, scheduler
        self._cache, self._pages = served.cache, served.pages
        self._num_arrived = 0
        inbox.running_activities = self.activities

    @property
    def has_place(self) -> bool:
        """True if one more sequence may run."""
        num_running = sum(not reply.is_finished for running in self.requests for reply in running.replies)
        return num_running < self._served.max_sequences

    def activities(self) -> list[Activity]:
        """Returns what the requests are doing. For any thread."""
        return [running.activity() for running in list(self.requests)]

    # A request gets its memory.

    def readmit(self) -> Iterator[Reply]:
        """Yields the preempted replies that there is memory for, the oldest first, each with what memory has of it."""
        while self.preempted:
            reply = min(self.preempted, key=lambda reply: reply.arrived)
            replies = [one for running in self.requests for one in running.replies]
            if reply.index and sum(one.state is not None for one in replies) >= self._served.max_sequences:
                return
            with self.failing(reply.running):
                sequence = self._begun(reply, reply.running.request, reply.restorable_ids, leaves_last=True)
                if isinstance(sequence, NoRoom) and self._drop_youngest_source():
                    continue
                if not isinstance(sequence, KVSequence):
                    return
                self.preempted.remove(reply)
                if reply.index:
                    sequence.owner = None
                reply.state = sequence
                yield reply

    def admit(self, waiting: list[Ticket]) -> Iterator[RunningRequest]:
        """Yields the waiting requests that there is memory for, each with its memory. Callers take turns, and nobody
        passes a request that waits for memory.

        A caller of whom nothing runs needs no place: the replies of another may take minutes to end, and a row more in
        a step costs the others little.
        """
        callers = [running.request.caller for running in self.requests]
        numbered = list(enumerate(waiting))
        while numbered:
            item = min(numbered, key=lambda item: (callers.count(item[1].request.caller), item[0]))
            numbered.remove(item)
            ticket = item[1]
            if isinstance(ticket.later, Later) and self._pages.is_later(ticket.later):
                continue
            is_first = ticket.request.caller not in callers
            has_place = is_first and len(set(callers)) < _CALLERS_PER_SEQUENCE * self._served.max_sequences
            if not has_place and not self.has_place:
                return
            try:
                memory = self._memory_for(ticket)
            except Exception as error:  # noqa: BLE001 (the client gets it, and the thread must outlive any request)
                self._refuse(ticket, error)
                continue
            if isinstance(memory, NoRoom):
                return
            if isinstance(memory, Later) or memory == "later":
                continue
            callers.append(ticket.request.caller)
            if (running := self._accept(ticket, memory)) is not None:
                yield running

    def _memory_for(self, ticket: Ticket) -> State | Later | NoRoom | Literal["later"]:
        """Returns the memory of a request; a `NoRoom` if others must end first, "later" or a `Later` if only this one
        must wait.

        Raises `InvalidRequest` for an empty prompt, and `ContextTooLong` for one that exceeds the positions or the
        memory.
        """
        request = ticket.request
        self._served.check_length(request)
        if self._cache.layout.unsupported:
            replies = [reply for running in self.requests for reply in running.replies]
            if any(isinstance(reply.state, TransformersState) for reply in replies):
                return "later"
            return TransformersState(self._served.model)
        return self._begun(ticket, request, lambda: request.prompt.token_ids, leaves_last=request.cache.leaves_last)

    def _begun(
        self, of: Ticket | Reply, request: GenerateRequest, token_ids: Callable[[], TokenIds], *, leaves_last: bool
    ) -> KVSequence | Later | NoRoom:
        """Returns memory with what is there of these tokens. For the other results see `_memory_for`: `of.later` keeps
        them, and the tokens are not matched again before something has changed."""
        if of.later is None or not self._pages.is_later(of.later):
            sequence = self._begin(request, token_ids(), leaves_last=leaves_last)
            if isinstance(sequence, KVSequence):
                of.later = None
                return sequence
            of.later = sequence or self._pages.no_room()
        if isinstance(of.later, NoRoom):
            self._cache.writer.resume_writing()
        return of.later

    def _begin(self, request: GenerateRequest, token_ids: TokenIds, *, leaves_last: bool) -> KVSequence | Later | None:
        options = request.cache
        is_off = options.scope.kind == "off"
        owner = None if is_off else self._cache.owner(options.tenant)
        expires_at = time.monotonic() + self._cache.lasts_s(options.ttl_s)
        begin = partial(self._pages.begin, owner, token_ids, leaves_last=leaves_last, expires_at=expires_at)
        sequence = begin()
        while sequence is None and not self._pages.running and self._has_pages_from_the_writer():
            sequence = begin()
        if isinstance(sequence, KVSequence) and not options.save:
            sequence.owner = None
        return sequence

    def _accept(self, ticket: Ticket, memory: State) -> RunningRequest | None:
        try:
            running = self._make_running(ticket)
        except Exception as error:  # noqa: BLE001 (as above)
            if isinstance(memory, KVSequence):
                self._pages.end(memory, keep=False)
            self._refuse(ticket, error)
            return None
        self._num_arrived += len(running.all_replies)
        self._inbox.begin_request(ticket)
        self.requests.append(running)
        running.replies[0].state = memory
        return running

    def _make_running(self, ticket: Ticket) -> RunningRequest:
        request, served = ticket.request, self._served
        pictures = served.pictures_of(request.prompt)
        running = RunningRequest(
            ticket,
            self._cache.begin(request.prompt, request.cache),
            self._pages,
            served.figures,
            served.reply_limit(request),
            torch.from_numpy(request.prompt.token_ids).long().unsqueeze(0) if pictures is None else pictures.token_ids,
            pictures,
        )
        first = None if request.constraint is None else served.constraints.begin_reply(request.constraint)
        constraints = [first] + [first and first.another() for _ in range(1, request.sampling.n)]
        replies = [self._make_reply(running, index, constraint) for index, constraint in enumerate(constraints)]
        running.replies, running.unforked = replies[:1], replies[1:]
        return running

    def _make_reply(self, running: RunningRequest, index: int, constraint: ConstrainedReply | None) -> Reply:
        request, served, layout = running.request, self._served, self._cache.layout
        prompt_tokens = len(request.prompt.token_ids)
        return Reply(
            running=running,
            index=index,
            tenant=request.caller,
            arrived=self._num_arrived + index + 1,
            prompt_tokens=prompt_tokens,
            packs=served.packs,
            grid=prompt_tokens if layout.unsupported else self._cache.settings.block_size,
            spans=() if running.pictures is None else running.pictures.spans,
            sampler=Sampler(request.sampling, running.known_ids, served.model.device, index, constraint),
            text=served.text_stream(request),
            guesser=served.guesser(request),
            thought_limit=None if request.thought_budget is None else ThoughtLimit(request.thought_budget),
        )

    # A step gets its memory.

    def with_memory(self, step: list[Chunk[Reply]]) -> list[Chunk[Reply]]:
        """Returns the chunks of a step that have room. Where there is none, the youngest sequence gives its pages back,
        even if it is alone. One that is being fetched cannot yet: until then the chunk waits. Guesses for which states
        cannot be kept are left out."""
        having = [chunk for chunk in step if self._has_room(chunk.sequence, chunk.end)]
        return [_with_spares(chunk) for chunk in having if chunk.sequence.state is not None]

    def _has_room(self, reply: Reply, end: int) -> bool:
        while isinstance(reply.state, KVSequence) and not reply.state.has_room(end):
            if self._has_pages_from_the_writer() or self._drop_youngest_source():
                continue
            replies = [one for running in self.requests for one in running.replies]
            younger = [one for one in replies if isinstance(one.state, KVSequence) and one.arrived > reply.arrived]
            ready = [one for one in younger if not one.is_fetching]
            if younger and not ready:
                return False
            youngest = max(ready, key=lambda one: one.arrived, default=reply)
            with self.failing(youngest.running):
                if self._pages.disk_hangs and len(self._pages.running) == 1:
                    # It would lack the same memory when it begins again.
                    raise held_up()
                self.preempt(youngest)
            if youngest.state is not None:
                # It failed, and another reply of its request is being fetched.
                return False
        return reply.state is not None

    def _has_pages_from_the_writer(self) -> bool:
        """Has what waits in pages written, or if that takes long, dropped. Returns False if nothing waits there."""
        writer = self._cache.writer
        is_worth_it = any(hold.frees() for hold in list(self._pages.pool.holds))
        return is_worth_it and (writer.write_pages(_WRITE_S) or writer.drop_pages())

    def _drop_youngest_source(self) -> bool:
        sources = [running for running in self.requests if isinstance(running.source, KVSequence)]
        if sources:
            self.drop_source(max(sources, key=lambda running: running.replies[0].arrived))
        return bool(sources)

    def drop_source(self, running: RunningRequest) -> None:
        """Gives back the state at a prompt's end. The replies that were to begin from it begin with the prompt."""
        if isinstance(running.source, KVSequence):
            self._pages.end(running.source, keep=False)
        self.preempted.extend(running.unforked)
        running.replies, running.unforked, running.source = running.all_replies, [], None

    def preempt(self, reply: Reply, why: str = "waits: others need its memory", *, is_sound: bool = True) -> None:
        """Takes the pages of a reply. When there is room, it begins with those that are still in memory or on the disk.
        `is_sound`: what they hold is right."""
        running, sequence = reply.running, reply.state
        log.info("[engine] %s %s", running.request.id, why)
        assert isinstance(sequence, KVSequence)
        self._served.figures.preemptions += 1
        self._scheduler.remove(reply)
        # Logits that were held are computed again.
        reply.drop_held()
        if is_sound and reply.index == 0 and reply.num_computed:
            running.cached.leave(sequence, reply.computed_ids())
        self._end_sequence(reply, keep=is_sound, is_sound=is_sound)
        reply.num_computed = 0
        self.preempted.append(reply)

    def abandon_memory(self, reply: Reply) -> None:
        """Leaves the pages of a reply to a thread that may still write to them. It begins again with others."""
        running, sequence = reply.running, reply.state
        assert isinstance(sequence, KVSequence)
        log.info("[engine] %s is computed: the disk does not answer", running.request.id)
        self._pages.abandon(sequence)
        reply.state = None
        self.preempted.append(reply)
        with self.failing(running):
            if running.error is not None:
                raise running.error

    # A request ends.

    def release(self, reply: Reply, *, keep: bool) -> None:
        """Gives the memory of a reply back. `keep`: the next turn may begin there."""
        self._served.speculation.drop(reply, keep=keep)
        self._scheduler.remove(reply)
        if keep:
            reply.drop_held()
        self._end_sequence(reply, keep=keep, is_sound=keep or reply.is_finished)

    def _end_sequence(self, reply: Reply, *, keep: bool, is_sound: bool) -> None:
        sequence, reply.state = reply.state, None
        if not isinstance(sequence, KVSequence):
            return
        layout, prompt_tokens = self._cache.layout, reply.prompt_tokens
        sequence.token_ids = reply.computed_ids()
        sequence.num_ready = sequence.num_exact = len(sequence.token_ids)
        sequence.expires_at = time.monotonic() + self._cache.lasts_s(reply.running.request.cache.ttl_s)
        if layout.exact_at != "token":
            sequence.num_exact = min(prompt_tokens, len(sequence.token_ids))
        if not is_sound:
            self._pages.forget(sequence)
        self._pages.end(sequence, keep=keep, options=reply.running.request.cache)

    def end_request(self, running: RunningRequest, last: Callable[[CacheReport], Event | None]) -> None:
        """Ends a request, whatever goes wrong in it. `last` returns its last event."""
        running.is_over = True
        if running.pictures is not None:
            running.pictures.is_over = True
        self.requests.remove(running)
        try:
            report = running.cached.close()
            self._served.record(running, report)
            event = last(report)
        except Exception as error:  # noqa: BLE001 (as above)
            raise_if_lost(error)
            event = error_event(error, running.request)
        if event is not None:
            _send_last(running.ticket, event)
        self._inbox.end_request(running.ticket)

    def cancel(self, running: RunningRequest) -> None:
        """Ends a request whose client has gone. What was computed for it is kept, as the client may ask again."""
        log.info("[engine] %s cancelled", running.request.id)
        first = running.replies[0]
        if isinstance(first.state, KVSequence) and first.num_computed and not running.is_published:
            running.cached.leave(first.state, first.computed_ids())
        self._release_all(running, keep=True)
        self.end_request(running, lambda _: None)

    @contextmanager
    def failing(self, running: RunningRequest) -> Iterator[None]:
        """Ends a request with any error that is raised inside. Other requests go on. Raises `DeviceLost`."""
        try:
            yield
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(running, error)

    def _fail(self, running: RunningRequest, error: Exception) -> None:
        raise_if_lost(error)
        if running.is_fetching:
            running.error = error
            self.preempted = [reply for reply in self.preempted if reply.running is not running]
            for reply in running.replies:
                self._scheduler.remove(reply)
            return
        self._release_all(running, keep=False)
        self.end_request(running, lambda _: error_event(error, running.request))

    def _release_all(self, running: RunningRequest, *, keep: bool) -> None:
        if isinstance(running.source, KVSequence):
            self._pages.end(running.source, keep=False)
        running.source = None
        self.preempted = [reply for reply in self.preempted if reply.running is not running]
        for reply in running.replies:
            self.release(reply, keep=keep and reply.index == 0)

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        """Fails a request that was not accepted."""
        raise_if_lost(error)
        self._inbox.begin_request(ticket)
        _send_last(ticket, error_event(error, ticket.request))
        self._inbox.end_request(ticket)


def _with_spares(chunk: Chunk[Reply]) -> Chunk[Reply]:
    """Returns a chunk without its guesses if states cannot be kept for them. Its reply is then guessed no more."""
    reply, num_drafted = chunk.sequence, chunk.num_drafted
    if num_drafted and isinstance(reply.state, KVSequence) and not reply.state.has_spares():
        reply.guesser = Guesser()
        return replace(chunk, end=chunk.end - num_drafted, num_drafted=0)
    return chunk


def _send_last(ticket: Ticket, event: Event) -> None:
    """Sends a request's last event, to a client that may have gone."""
    try:
        ticket.emit(event)
    except Exception:
        log.exception("[engine] %s: its end could not be told", ticket.request.id)
