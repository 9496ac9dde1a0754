"""The requests that the engine has accepted: how each gets its memory, may lose it to others, and ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

import numpy as np
from msgspec.structs import replace

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.gauges import Activity
from diskprefix.engine.guesser import Guesser
from diskprefix.engine.inbox import Inbox, Ticket, error_event
from diskprefix.engine.request import Event
from diskprefix.engine.running_request import Reply, RunningRequest
from diskprefix.engine.sampler import Sampler
from diskprefix.engine.scheduler import NO_LIMIT, Chunk, Scheduler
from diskprefix.engine.served_model import ServedModel
from diskprefix.engine.thought_limit import ThoughtLimit
from diskprefix.errors import DeviceLost
from diskprefix.kv.page_cache import MemoryWait, PrefixWait, memory_held
from diskprefix.kv.sequence import KVSequence
from diskprefix.model.runtime import State
from diskprefix.values import CacheReport

log = logging.getLogger("diskprefix")

_SCORED_ROWS = 64
"""The most rows of a step with logits behind each: these take 4 bytes for each token of the vocabulary."""

_CALLERS_PER_SEQUENCE = 4
"""The most callers, for each of `max_sequences`, that may have one reply above that limit. A client without an API key
can make any number of callers with salts."""

_WRITE_S = 0.25
"""The longest wait for one publication to be written when all pages are in use."""


class ActiveRequests:
    """The requests that the engine's thread has accepted. The replies in `waiting` have no memory: the further replies
    of a request, and replies that lost their memory to others. Every reply begins in the same way: with what memory and
    disk have of its tokens."""

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
        running = sum(reply.has_begun and not reply.is_finished for reply in self.replies)
        return running < self._served.max_sequences

    @property
    def replies(self) -> list[Reply]:
        """The replies of all requests."""
        return [reply for running in self.requests for reply in running.replies]

    def activities(self) -> list[Activity]:
        """Returns what the requests are doing. For any thread."""
        return [running.activity() for running in list(self.requests)]

    # A request gets its memory.

    def admit(self, tickets: list[Ticket]) -> Iterator[Reply]:
        """Yields the replies that get memory: accepted ones first, by age, then those of waiting requests, whose
        callers take turns. Nobody passes a reply or request that waits for memory, unless it gives way."""
        waiting: list[Ticket | Reply] = [*sorted(self.waiting, key=lambda reply: reply.arrived)]
        for waiter in chain(waiting, self._turns(tickets)):
            if isinstance(waiter, Reply):
                if waiter not in self.waiting or not (waiter.has_begun or waiter.running.is_published):
                    continue
                # A reply that lost its memory keeps its place. The further replies of a request need one.
                if not waiter.has_begun and not self.has_place:
                    self._end_giving_way(waiter)
                    continue
            try:
                memory = self._memory_for(waiter)
                if isinstance(memory, MemoryWait | PrefixWait):
                    self._end_giving_way(waiter, memory)
                if isinstance(memory, MemoryWait) and not _gives_way(waiter):
                    return
                if memory is None or isinstance(memory, MemoryWait | PrefixWait):
                    continue
                reply = waiter if isinstance(waiter, Reply) else self._accept(waiter, memory)
            except Exception as error:  # noqa: BLE001 (the client gets it, and the thread must outlive any request)
                self._refuse(waiter, error) if isinstance(waiter, Ticket) else self._fail(waiter.running, error)
                continue
            self.waiting.remove(reply)
            reply.state, reply.has_begun = memory, True
            yield reply

    def _end_giving_way(self, waiter: Ticket | Reply, wait: PrefixWait | MemoryWait | None = None) -> None:
        """Ends the giving way of the reply whose prefix a `waiter` waits for; of all replies if it waits for memory, or
        without a `wait` for a place. Otherwise the waiter would wait for all replies of others to end."""
        for reply in () if _gives_way(waiter) else self.replies:
            if not isinstance(wait, PrefixWait) or reply.state is wait.sequence:
                reply.gives_way = False

    def _turns(self, tickets: list[Ticket]) -> Iterator[Ticket]:
        """Yields the waiting requests for which there is a place. Callers take turns.

        A caller with nothing running needs no place: the replies of others may take minutes, and one more row in a step
        costs them little.
        """
        numbered = list(enumerate(tickets))
        while numbered:
            callers = [running.request.caller for running in self.requests]
            item = min(numbered, key=lambda item: (callers.count(item[1].request.caller), item[0]))
            numbered.remove(item)
            is_first = item[1].request.caller not in callers
            has_place = is_first and len(set(callers)) < _CALLERS_PER_SEQUENCE * self._served.max_sequences
            if not has_place and not self.has_place:
                for _, ticket in (item, *numbered):
                    self._end_giving_way(ticket)
                return
            yield item[1]

    def _memory_for(self, waiter: Ticket | Reply) -> State | PrefixWait | MemoryWait | None:
        """Returns memory that begins with the longest prefix there; a `MemoryWait` if others must end first; a
        `PrefixWait` or None if only this waiter must wait. Until its `wait` may be over, nothing is matched again.

        Raises `InvalidRequest` for an empty prompt, and `ContextTooLong` for one that exceeds the positions or the
        memory.
        """
        if isinstance(waiter, Ticket):
            self._served.check_length(waiter.request)
        if self._cache.layout.unsupported:
            is_taken = any(reply.state is not None for reply in self.replies)
            return None if is_taken else self._served.runtime.new_state()
        if waiter.wait is None or not self._pages.must_wait(waiter.wait):
            memory = self._start_sequence(waiter)
            if isinstance(memory, KVSequence):
                waiter.wait = None
                return memory
            waiter.wait = memory
        if isinstance(waiter.wait, MemoryWait):
            self._cache.writer.resume_writing()
        return waiter.wait

    def _start_sequence(self, waiter: Ticket | Reply) -> KVSequence | PrefixWait | MemoryWait:
        ticket = waiter if isinstance(waiter, Ticket) else waiter.running.ticket
        options, token_ids = ticket.request.cache, ticket.request.prompt.token_ids
        computes_last = options.computes_last
        if isinstance(waiter, Reply) and waiter.token_ids:
            # The logits behind its last token are needed.
            token_ids, computes_last = waiter.restorable_ids(), True
        owner = None
        reading, echo = ticket.request.reading, ticket.request.echo
        if (reading is None or reading.pooling != "mean") and (echo is None or echo.logprobs is None):
            # A mean needs the hidden states of all tokens, and a scored prompt their logits: only computing gives them.
            owner = self._cache.owner_of(options, ticket.private)
        expires_at = self._cache.expires_at(options.ttl_s)
        begin = partial(self._pages.begin, owner, token_ids, computes_last=computes_last, expires_at=expires_at)
        memory = begin()
        # Bound: each round frees the pages of something that waits to be written, and this thread adds nothing.
        while isinstance(memory, MemoryWait) and not self._pages.running and self._free_written_pages():
            memory = begin()
        return memory

    def _accept(self, ticket: Ticket, memory: State) -> Reply:
        """Returns the first reply to a request. All of its replies are `waiting`."""
        try:
            running = self._make_running(ticket)
        except Exception:
            if isinstance(memory, KVSequence):
                self._pages.end(memory, keep=False)
            raise
        self._num_arrived += len(running.replies)
        self._inbox.begin_request(ticket)
        self.requests.append(running)
        self.waiting += running.replies
        return running.replies[0]

    def _make_running(self, ticket: Ticket) -> RunningRequest:
        request, served, layout = ticket.request, self._served, self._cache.layout
        pictures, prompt = served.pictures_of(request), request.prompt.token_ids
        running = RunningRequest(
            ticket,
            CachedRequest(self._cache, request.prompt, request.cache),
            self._pages,
            served.figures,
            served.reply_limit(request),
            prompt.astype(np.int64) if pictures is None else pictures.token_ids,
            pictures,
        )
        first = None if request.constraint is None else served.constraints.begin_reply(request.constraint)
        constraints = [first] + [first and first.another() for _ in range(1, request.sampling.n)]
        running.replies = [
            Reply(
                most_rows=NO_LIMIT if request.echo is None or request.echo.logprobs is None else _SCORED_ROWS,
                running=running,
                index=index,
                tenant=request.caller,
                arrived=self._num_arrived + index + 1,
                prompt_tokens=len(prompt),
                packs=served.packs,
                gives_way=_gives_way(ticket),
                grid=len(prompt) if layout.unsupported else self._cache.settings.block_size,
                spans=() if pictures is None else pictures.spans,
                sampler=Sampler(request.sampling, running.known_ids, index, constraint),
                text=served.text_stream(request),
                guesser=served.guesser(request),
                thought_limit=None if request.thought_budget is None else ThoughtLimit(request.thought_budget),
            )
            for index, constraint in enumerate(constraints)
        ]
        return running

    # A step gets its memory.

    def with_memory(self, step: list[Chunk[Reply]]) -> list[Chunk[Reply]]:
        """Returns the chunks of a step that have room. Where there is none, the youngest sequence gives its pages back,
        even if it is alone. A sequence that is being fetched cannot give them back, so the chunk waits. Guesses for
        which states cannot be kept are left out."""
        with_room = [chunk for chunk in step if self._make_room(chunk.sequence, chunk.end)]
        # A later chunk may have taken the memory of an earlier one.
        return [_with_spares(chunk) for chunk in with_room if chunk.sequence.state is not None]

    def _make_room(self, reply: Reply, end: int) -> bool:
        # Bound: each round frees the pages of something that waits to be written, or takes those of a reply.
        while isinstance(reply.state, KVSequence) and not reply.state.make_room(end):
            if self._free_written_pages():
                continue
            younger = [it for it in self.replies if isinstance(it.state, KVSequence) and it.arrived > reply.arrived]
            ready = [it for it in younger if not it.is_fetching]
            if younger and not ready:
                return False
            youngest = max(ready, key=lambda it: it.arrived, default=reply)
            with self.failing(youngest.running):
                if self._pages.disk_hangs and len(self._pages.running) == 1:
                    # It would lack the same memory when it begins again.
                    raise memory_held()
                self.preempt(youngest)
            if youngest.state is not None:
                # The reply failed, and another one of its request is being fetched.
                return False
        return reply.state is not None

    def _free_written_pages(self) -> bool:
        """Frees pages that wait to be written: the writer writes them now, or if that takes long, drops them. Returns
        False if there are none."""
        writer = self._cache.writer
        has_any = any(hold.frees() for hold in list(self._pages.pool.holds))
        return has_any and (writer.write_pages(_WRITE_S) or writer.drop_pages())

    def preempt(self, reply: Reply, why: str = "waits: others need its memory", *, is_sound: bool = True) -> None:
        """Takes the pages of a reply, which then waits for memory. It begins again with what memory or disk still have
        of it. `is_sound`: its state is right."""
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
        """Leaves the pages of a reply to a thread that may still write to them. The reply begins again with others."""
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
        """Gives the memory of a reply back. `keep`: the next turn may begin with its state."""
        self._served.speculation.drop(reply, keep=keep)
        self._scheduler.remove(reply)
        if keep:
            reply.drop_held()
        self._end_sequence(reply, keep=keep, is_sound=keep or reply.is_finished)

    def _end_sequence(self, reply: Reply, *, keep: bool, is_sound: bool) -> None:
        sequence, reply.state = reply.state, None
        # A request that waits for memory or a place may begin now. If nothing runs, nothing else wakes the loop.
        self._inbox.wake()
        if not isinstance(sequence, KVSequence):
            return
        if not is_sound:
            self._pages.forget(sequence)
        options = reply.running.request.cache
        expires_at, saved = self._cache.expires_at(options.ttl_s), options if reply.index == 0 else None
        self._pages.end(sequence, keep=keep, token_ids=reply.computed_ids(), expires_at=expires_at, options=saved)

    def end_request(self, running: RunningRequest, last: Callable[[CacheReport], Event | None]) -> None:
        """Ends a request, even if its end fails. `last` makes its last event."""
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
            self._stop_waiting(running)
            for reply in running.replies:
                self._scheduler.remove(reply)
            return
        self._release_all(running, keep=False)
        self.end_request(running, lambda _: error_event(error, running.request))

    def _stop_waiting(self, running: RunningRequest) -> None:
        self.waiting = [reply for reply in self.waiting if reply.running is not running]

    def _release_all(self, running: RunningRequest, *, keep: bool) -> None:
        self._stop_waiting(running)
        for reply in running.replies:
            self.release(reply, keep=keep and reply.index == 0)

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        """Fails a request that was not accepted."""
        raise_if_lost(error)
        self._inbox.begin_request(ticket)
        _send_last(ticket, error_event(error, ticket.request))
        self._inbox.end_request(ticket)


def _gives_way(waiter: Ticket | Reply) -> bool:
    """Returns whether nobody waits for the reply of a waiter: it has no token."""
    if isinstance(waiter, Reply):
        return waiter.gives_way
    return waiter.request.sampling.max_tokens == 0 and waiter.request.reading is None


def _with_spares(chunk: Chunk[Reply]) -> Chunk[Reply]:
    """Returns a chunk, without its guesses if no states can be kept for them. Then its reply gets no more guesses."""
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
