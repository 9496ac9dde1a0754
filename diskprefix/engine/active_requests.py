"""The requests that the engine has accepted: how each gets its memory, may lose it to others, and ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.engine.constrained_reply import ConstrainedReply
from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.gauges import Activity
from diskprefix.engine.guesser import Guesser
from diskprefix.engine.inbox import Inbox, Ticket, error_event
from diskprefix.engine.request import Event
from diskprefix.engine.running_request import Reply, RunningRequest
from diskprefix.engine.sampler import Sampler
from diskprefix.engine.scheduler import Chunk, Scheduler
from diskprefix.engine.served_model import ServedModel
from diskprefix.engine.thought_limit import ThoughtLimit
from diskprefix.errors import DeviceLost
from diskprefix.kv.page_cache import MemoryWait, PrefixWait, memory_held
from diskprefix.kv.sequence import KVSequence
from diskprefix.kv.uncached import TransformersState
from diskprefix.model.exact.runner import State
from diskprefix.values import CacheReport

log = logging.getLogger("diskprefix")

_CALLERS_PER_SEQUENCE = 4
"""The most callers, for each of `max_sequences`, that may have one reply above that limit. A client without an API key
can make any number of callers with salts."""

_WRITE_S = 0.25
"""The longest wait for one publication to be written when all pages are in use."""


class ActiveRequests:
    """The requests of one engine's thread. `waiting` replies were accepted and have no memory: those behind the first
    one of a request, and those that lost it to others. Whoever waits begins in the same way: with what memory and disk
    have of its tokens."""

    def __init__(self, served: ServedModel, inbox: Inbox, scheduler: Scheduler[Reply]) -> None:
        self.requests: list[RunningRequest] = []
        self.waiting: list[Reply] = []
        self._served, self._inbox, self._scheduler = served, inbox, scheduler
        self._cache, self._pages = served.cache, served.pages
        self._num_arrived = 0
        inbox.running_activities = self.activities

    @property
    def has_place(self) -> bool:
        """True if one more sequence may run."""
        replies = [reply for running in self.requests for reply in running.replies]
        return sum(reply.has_begun and not reply.is_finished for reply in replies) < self._served.max_sequences

    def activities(self) -> list[Activity]:
        """Returns what the requests are doing. For any thread."""
        return [running.activity() for running in list(self.requests)]

    # A request gets its memory.

    def admit(self, tickets: list[Ticket]) -> Iterator[Reply]:
        """Yields the replies that get memory, each with what memory has of its tokens: accepted ones first, the oldest
        first, then those of waiting requests, whose callers take turns. Nobody passes one that waits for memory."""
        again: list[Ticket | Reply] = [*sorted(self.waiting, key=lambda reply: reply.arrived)]
        for one in chain(again, self._turns(tickets)):
            if isinstance(one, Reply) and (one not in self.waiting or not self._may_begin(one)):
                continue
            try:
                memory = self._memory_for(one)
            except Exception as error:  # noqa: BLE001 (the client gets it, and the thread must outlive any request)
                self._refuse(one, error) if isinstance(one, Ticket) else self._fail(one.running, error)
                continue
            if isinstance(memory, MemoryWait):
                return
            if memory is None or isinstance(memory, PrefixWait):
                continue
            if isinstance(one, Reply):
                self.waiting.remove(one)
            elif (running := self._accept(one, memory)) is not None:
                one = running.replies[0]
            else:
                continue
            one.state, one.has_begun = memory, True
            yield one

    def _may_begin(self, reply: Reply) -> bool:
        """Returns whether a reply may begin: one behind the first when the prompt is computed, in a place of its own.
        One that lost its memory has its place."""
        return reply.has_begun or (reply.running.is_published and self.has_place)

    def _turns(self, tickets: list[Ticket]) -> Iterator[Ticket]:
        """Yields the waiting requests for which there is a place: callers take turns.

        A caller of whom nothing runs needs no place: the replies of another may take minutes to end, and a row more in
        a step costs the others little.
        """
        numbered = list(enumerate(tickets))
        while numbered:
            callers = [running.request.caller for running in self.requests]
            item = min(numbered, key=lambda item: (callers.count(item[1].request.caller), item[0]))
            numbered.remove(item)
            is_first = item[1].request.caller not in callers
            has_place = is_first and len(set(callers)) < _CALLERS_PER_SEQUENCE * self._served.max_sequences
            if not has_place and not self.has_place:
                return
            yield item[1]

    def _memory_for(self, one: Ticket | Reply) -> State | PrefixWait | MemoryWait | None:
        """Returns memory that begins with the longest prefix there; a `MemoryWait` if others must end first; a
        `PrefixWait` or None if only this one must wait. Until its `wait` may be over, nothing is matched again.

        Raises `InvalidRequest` for an empty prompt, and `ContextTooLong` for one that exceeds the positions or the
        memory.
        """
        if isinstance(one, Ticket):
            self._served.check_length(one.request)
        if self._cache.layout.unsupported:
            is_taken = any(reply.state is not None for running in self.requests for reply in running.replies)
            return None if is_taken else TransformersState(self._served.model)
        if one.wait is None or not self._pages.must_wait(one.wait):
            memory = self._start_sequence(one)
            if isinstance(memory, KVSequence):
                one.wait = None
                return memory
            one.wait = memory
        if isinstance(one.wait, MemoryWait):
            self._cache.writer.resume_writing()
        return one.wait

    def _start_sequence(self, one: Ticket | Reply) -> KVSequence | PrefixWait | MemoryWait:
        ticket = one if isinstance(one, Ticket) else one.running.ticket
        options, token_ids = ticket.request.cache, ticket.request.prompt.token_ids
        computes_last = options.computes_last
        if isinstance(one, Reply) and one.token_ids:
            # The logits behind its last token are needed.
            token_ids, computes_last = one.restorable_ids(), True
        owner = None
        if ticket.request.reading is None or ticket.request.reading.pooling != "mean":
            # A mean is over all tokens, which are computed in one go.
            owner = self._cache.owner_of(options, ticket.private)
        expires_at = time.monotonic() + self._cache.lasts_s(options.ttl_s)
        begin = partial(self._pages.begin, owner, token_ids, computes_last=computes_last, expires_at=expires_at)
        memory = begin()
        while isinstance(memory, MemoryWait) and not self._pages.running and self._free_written_pages():
            memory = begin()
        return memory

    def _accept(self, ticket: Ticket, memory: State) -> RunningRequest | None:
        try:
            running = self._make_running(ticket)
        except Exception as error:  # noqa: BLE001 (as above)
            if isinstance(memory, KVSequence):
                self._pages.end(memory, keep=False)
            self._refuse(ticket, error)
            return None
        self._num_arrived += len(running.replies)
        self._inbox.begin_request(ticket)
        self.requests.append(running)
        self.waiting += running.replies[1:]
        return running

    def _make_running(self, ticket: Ticket) -> RunningRequest:
        request, served = ticket.request, self._served
        pictures = served.pictures_of(request.prompt)
        running = RunningRequest(
            ticket,
            CachedRequest(self._cache, request.prompt, request.cache),
            self._pages,
            served.figures,
            served.reply_limit(request),
            torch.from_numpy(request.prompt.token_ids).long().unsqueeze(0) if pictures is None else pictures.token_ids,
            pictures,
        )
        first = None if request.constraint is None else served.constraints.begin_reply(request.constraint)
        constraints = [first] + [first and first.another() for _ in range(1, request.sampling.n)]
        running.replies = [self._make_reply(running, index, one) for index, one in enumerate(constraints)]
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
        having = [chunk for chunk in step if self._make_room(chunk.sequence, chunk.end)]
        return [_with_spares(chunk) for chunk in having if chunk.sequence.state is not None]

    def _make_room(self, reply: Reply, end: int) -> bool:
        while isinstance(reply.state, KVSequence) and not reply.state.make_room(end):
            if self._free_written_pages():
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
                    raise memory_held()
                self.preempt(youngest)
            if youngest.state is not None:
                # It failed, and another reply of its request is being fetched.
                return False
        return reply.state is not None

    def _free_written_pages(self) -> bool:
        """Has what waits in pages written, or if that takes long, dropped. Returns False if nothing waits there."""
        writer = self._cache.writer
        is_worth_it = any(hold.frees() for hold in list(self._pages.pool.holds))
        return is_worth_it and (writer.write_pages(_WRITE_S) or writer.drop_pages())

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
            running.cached.save_partial(sequence, reply.computed_ids())
        self._end_sequence(reply, keep=is_sound, is_sound=is_sound)
        reply.num_computed = 0
        self.waiting.append(reply)

    def abandon_memory(self, reply: Reply) -> None:
        """Leaves the pages of a reply to a thread that may still write to them. It begins again with others."""
        running, sequence = reply.running, reply.state
        assert isinstance(sequence, KVSequence)
        log.info("[engine] %s is computed: the disk does not answer", running.request.id)
        self._pages.abandon(sequence)
        reply.state = None
        self.waiting.append(reply)
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
        # Who waits for memory or a place may begin, and if nothing runs, nothing else tells.
        self._inbox.wake()
        if not isinstance(sequence, KVSequence):
            return
        if not is_sound:
            self._pages.forget(sequence)
        options = reply.running.request.cache
        expires_at = time.monotonic() + self._cache.lasts_s(options.ttl_s)
        saved = options if reply.index == 0 else None
        self._pages.end(sequence, keep=keep, token_ids=reply.computed_ids(), expires_at=expires_at, options=saved)

    def end_request(self, running: RunningRequest, last: Callable[[CacheReport], Event | None]) -> None:
        """Ends a request, whatever goes wrong in it. `last` returns its last event."""
        running.is_over = True
        if running.pictures is not None:
            running.pictures.is_over = True
        self.requests.remove(running)
        self._pages.forget_private(running.ticket.private)
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
            running.cached.save_partial(first.state, first.computed_ids())
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
            self.waiting = [reply for reply in self.waiting if reply.running is not running]
            for reply in running.replies:
                self._scheduler.remove(reply)
            return
        self._release_all(running, keep=False)
        self.end_request(running, lambda _: error_event(error, running.request))

    def _release_all(self, running: RunningRequest, *, keep: bool) -> None:
        self.waiting = [reply for reply in self.waiting if reply.running is not running]
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
    if num_drafted and isinstance(reply.state, KVSequence) and not reply.state.take_spares():
        reply.guesser = Guesser()
        return replace(chunk, end=chunk.end - num_drafted, num_drafted=0)
    return chunk


def _send_last(ticket: Ticket, event: Event) -> None:
    """Sends a request's last event, to a client that may have gone."""
    try:
        ticket.emit(event)
    except Exception:
        log.exception("[engine] %s: its end could not be told", ticket.request.id)
