"""The requests that the engine has accepted: how each request gets memory, may be preempted, and ends."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any

import numpy as np
from msgspec.structs import replace

from diskprefix.daemon.engine.device import raise_if_lost
from diskprefix.daemon.engine.gauges import Activity
from diskprefix.daemon.engine.inbox import Inbox, Ticket, error_event
from diskprefix.daemon.engine.request import Event
from diskprefix.daemon.engine.running_request import Reply, RunningRequest
from diskprefix.daemon.engine.sampler import Sampler
from diskprefix.daemon.engine.scheduler import NO_LIMIT, Chunk, Scheduler
from diskprefix.daemon.engine.served_model import ServedModel
from diskprefix.daemon.engine.speculation.guesser import Guesser
from diskprefix.daemon.engine.thought_limit import ThoughtLimit
from diskprefix.errors import DeviceLost
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.kv.page_cache import MemoryWait, PrefixWait, memory_held
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import State
from diskprefix.values import CacheReport

log = logging.getLogger("diskprefix")

_SCORED_ROWS = 64
"""The most rows of a step in which each row has logits: these take 4 bytes per row and token of the vocabulary."""

_SHARES_PER_SEQUENCE = 4
"""For each of `max_sequences`, this many shares may have one reply above the limit. There must be a limit for shares
too, because a client may have any number of addresses."""

_WRITE_S = 0.25
"""The longest wait of a step, in seconds, for publications to be written when all pages are in use."""


class ActiveRequests:
    """The requests that the engine's thread has accepted. Every reply begins in the same way: with the state of its
    tokens that is in memory or on the disk. Every request ends in the same way: with `end_request`."""

    def __init__(self, served: ServedModel, inbox: Inbox, scheduler: Scheduler[Reply]) -> None:
        self.requests: list[RunningRequest] = []
        self._served, self._inbox, self._scheduler = served, inbox, scheduler
        self._cache, self._pages = served.cache, served.pages
        self._num_arrived = 0
        inbox.running_activities = self.activities

    @property
    def has_place(self) -> bool:
        """True if another sequence may run."""
        running = sum(reply.has_begun and not reply.is_finished for reply in self.replies)
        return running < self._served.max_sequences

    @property
    def replies(self) -> list[Reply]:
        """The replies of all requests."""
        return [reply for running in self.requests for reply in running.replies]

    @property
    def waiting(self) -> list[Reply]:
        """The replies without memory, by age: the other replies of a request before its prompt is computed, and
        preempted replies."""
        return sorted((reply for reply in self.replies if reply.stage == "waiting"), key=lambda reply: reply.arrived)

    def activities(self) -> list[Activity]:
        """Returns the activities of the requests. For any thread."""
        return [running.activity() for running in list(self.requests)]

    # A request gets its memory.

    def admit(self, tickets: list[Ticket]) -> Iterator[Reply]:
        """Yields the replies that get memory: first accepted replies, by age, then the first replies of waiting
        requests, whose shares take turns. Nothing overtakes a reply or request that waits for memory, unless it gives
        way."""
        waiters: Iterator[Ticket | Reply] = chain(self.waiting, self._turns(tickets))
        for waiter in waiters:
            if isinstance(waiter, Reply):
                if waiter.stage != "waiting" or not (waiter.has_begun or waiter.running.cached.is_published):
                    continue
                # A preempted reply keeps its place. The other replies of a request need a place.
                if not waiter.has_begun and not self.has_place:
                    self._bring_forward(waiter)
                    continue
            try:
                memory = self._memory_for(waiter)
                if isinstance(memory, MemoryWait | PrefixWait):
                    self._bring_forward(waiter, memory)
                if isinstance(memory, MemoryWait) and not _is_background(waiter):
                    return
                if memory is None or isinstance(memory, MemoryWait | PrefixWait):
                    continue
                reply = waiter if isinstance(waiter, Reply) else self._accept_request(waiter, memory)
            except Exception as error:  # noqa: BLE001 (the client gets it, and the thread must outlive any request)
                self._refuse(waiter, error) if isinstance(waiter, Ticket) else self._fail(waiter.running, error)
                continue
            reply.begin(memory)
            yield reply

    def _bring_forward(self, waiter: Ticket | Reply, wait: PrefixWait | MemoryWait | None = None) -> None:
        """Gives replies their normal priority because a `waiter` waits for them: the reply whose prefix it waits for,
        or all replies if it waits for memory or, without a `wait`, for a place. Otherwise the waiter would wait until
        all replies of others have ended."""
        for reply in () if _is_background(waiter) else self.replies:
            if not isinstance(wait, PrefixWait) or reply.state is wait.sequence:
                reply.is_background = False

    def _turns(self, tickets: list[Ticket]) -> Iterator[Ticket]:
        """Yields the waiting requests that may begin. Shares take turns, and within a share its conversations.

        A share or conversation with nothing running may start one request even when all places are taken: the replies
        of others may take minutes, and one more row per step costs them little.
        """
        waiting, seen = defaultdict[tuple[str, str], deque[tuple[int, Ticket]]](deque), None
        for number, ticket in enumerate(tickets):
            waiting[ticket.request.turn].append((number, ticket))
        # Bound: each round takes a request.
        while waiting:
            if seen != self.requests:
                seen = list(self.requests)
                shares = Counter(running.request.share for running in seen)
                conversations = Counter(running.request.turn for running in seen)
                turns = [(shares[turn[0]], conversations[turn], queue[0][0], turn) for turn, queue in waiting.items()]
                heapify(turns)
            _, _, _, turn = heappop(turns)
            if not self.has_place and not self._may_exceed(turn, shares, conversations):
                for _, ticket in chain.from_iterable(waiting.values()):
                    self._bring_forward(ticket)
                return
            _, ticket = waiting[turn].popleft()
            if waiting[turn]:
                heappush(turns, (shares[turn[0]], conversations[turn], waiting[turn][0][0], turn))
            else:
                del waiting[turn]
            yield ticket

    def _may_exceed(self, turn: tuple[str, str], shares: Counter[str], conversations: Counter[tuple[str, str]]) -> bool:
        """Returns whether a request may begin above the limit: the first of its share or of its conversation."""
        most, own = self._served.max_sequences, turn[0]
        if own not in shares:
            return len(shares) < _SHARES_PER_SEQUENCE * most
        return turn not in conversations and sum(share == own for share, _ in conversations) <= most

    def _memory_for(self, waiter: Ticket | Reply) -> State | PrefixWait | MemoryWait | None:
        """Returns memory that begins with the longest prefix in memory. Returns a `MemoryWait` if others must end
        first, and a `PrefixWait` or None if only this waiter must wait. While the waiter must still wait, its prompt is
        not matched again.

        Raises `InvalidRequest` for an empty prompt, and `ContextTooLong` for a prompt that exceeds the positions or the
        memory. For `NotReady` see `PageCache.begin_sequence`.
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
            # The logits after the last token are needed.
            token_ids, computes_last = waiter.restorable_ids(), True
        began = ticket.began = waiter.running.cached.began if isinstance(waiter, Reply) else self._cache.begin(options)
        owner = None
        reading = ticket.request.reading
        if (reading is None or reading.pooling != "mean") and not ticket.request.scores_prompt:
            # A mean needs the hidden states of all tokens, and a scored prompt needs their logits: they must be
            # computed.
            owner = self._cache.owner_of(options, ticket.private, began)
            if isinstance(waiter, Reply) and self._cache.epochs.is_over(began.epoch):
                # Its tenant was purged while it waited: later prompts must not find its state.
                owner = None
        expires_at = self._cache.expires_at(options.ttl_s)
        begin = partial(
            self._pages.begin_sequence, owner, token_ids, computes_last=computes_last, expires_at=expires_at
        )
        memory, write_until = begin(), time.monotonic() + _WRITE_S
        # Bound: each round frees the pages of a publication that waits to be written, and this thread adds none.
        while isinstance(memory, MemoryWait) and not self._pages.running and self._free_written_pages(write_until):
            memory = begin()
        return memory

    def _accept_request(self, ticket: Ticket, memory: State) -> Reply:
        """Accepts a request, and returns its first reply."""
        try:
            running = self._make_running(ticket)
        except Exception:
            if isinstance(memory, KVSequence):
                self._pages.end_sequence(memory, keep=False)
            raise
        self._num_arrived += len(running.replies)
        # What is entered first is left last.
        exits = running.exits
        self._inbox.begin_request(ticket)
        exits.callback(self._inbox.end_request, ticket)
        exits.callback(self._tell_end, running)
        exits.callback(self._pages.forget_private, ticket.private)
        self.requests.append(running)
        exits.callback(self.requests.remove, running)
        for reply in reversed(running.replies):
            exits.callback(self._leave, reply)
        return running.replies[0]

    def _make_running(self, ticket: Ticket) -> RunningRequest:
        request, served, layout = ticket.request, self._served, self._cache.layout
        pictures, prompt = served.pictures_of(request), request.prompt.token_ids
        running = RunningRequest(
            ticket,
            CachedRequest(self._cache, request.prompt, request.cache, began=ticket.began),
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
                most_rows=_SCORED_ROWS if request.scores_prompt else NO_LIMIT,
                running=running,
                index=index,
                share=request.share,
                conversation=request.conversation,
                arrived=self._num_arrived + index + 1,
                prompt_tokens=len(prompt),
                packs=served.packs,
                is_background=_is_background(ticket),
                grid=len(prompt) if layout.unsupported else self._cache.settings.block_size,
                spans=() if pictures is None else pictures.spans,
                sampler=Sampler(request.sampling, running.known_ids, index, constraint, served.suppressed),
                text=served.text_stream(request),
                guesser=served.guesser(request),
                thought_limit=None if request.thought_budget is None else ThoughtLimit(request.thought_budget),
            )
            for index, constraint in enumerate(constraints)
        ]
        return running

    # A step gets its memory.

    def with_memory(self, step: list[Chunk[Reply]]) -> list[Chunk[Reply]]:
        """Returns the chunks of a step that have room. If there is no room for a chunk, the youngest sequence gives its
        pages back, even if it is the only one. A sequence that is being fetched cannot give pages back, so the chunk
        waits. Leaves out guesses if there is no memory to keep the states before them."""
        write_until = time.monotonic() + _WRITE_S
        with_room = [chunk for chunk in step if self._preempt_for(chunk.sequence, chunk.end, write_until)]
        # A later chunk may have taken the memory of an earlier one.
        return [_with_spares(chunk) for chunk in with_room if chunk.sequence.state is not None]

    def _preempt_for(self, reply: Reply, end: int, write_until: float) -> bool:
        # Bound: each round frees the pages of a publication that waits to be written, or of a reply.
        while isinstance(reply.state, KVSequence) and not reply.state.take_pages_to(end):
            if self._free_written_pages(write_until):
                continue
            younger = [it for it in self.replies if isinstance(it.state, KVSequence) and it.arrived > reply.arrived]
            ready = [it for it in younger if it.stage == "computing"]
            if younger and not ready:
                return False
            youngest = max(ready, key=lambda it: it.arrived, default=reply)
            with self.failing(youngest.running):
                if self._pages.disk_hangs and len(self._pages.running) == 1:
                    # The reply would lack the same memory when it begins again.
                    raise memory_held()
                self.preempt(youngest)
        return reply.state is not None

    def _free_written_pages(self, write_until: float) -> bool:
        """Frees pages that wait to be written: the writer writes a publication before the time `write_until`, or drops
        one. Returns False if no such pages can be freed."""
        writer = self._cache.writer
        has_any = any(hold.frees() for hold in list(self._pages.pool.holds))
        return has_any and (writer.write_pages(max(0.0, write_until - time.monotonic())) or writer.drop_pages())

    def preempt(self, reply: Reply, why: str = "waits: others need its memory", *, is_sound: bool = True) -> None:
        """Preempts a reply: takes its pages, so that it waits for memory. The reply begins again with the part of its
        state that is still in memory or on the disk. `is_sound`: its state is right."""
        running, sequence = reply.running, reply.state
        log.info("[engine] %s %s", running.request.id, why)
        assert isinstance(sequence, KVSequence)
        self._served.figures.preemptions += 1
        self._scheduler.remove_sequence(reply)
        # The held logits will be computed again.
        reply.drop_held()
        if is_sound and reply.index == 0 and reply.num_computed:
            running.cached.save_partial(sequence, reply.computed_ids())
        self.leave_memory(reply, keep=is_sound, is_sound=is_sound)
        reply.num_computed = 0

    # A reply or a request ends.

    def end_reply(self, reply: Reply, *, keep: bool) -> None:
        """Ends a reply, and gives its memory back. `keep`: the next turn may begin with its state. A second call does
        nothing."""
        if reply.is_over:
            return
        reply.is_over = True
        self._scheduler.remove_sequence(reply)
        with ExitStack() as leaving:
            leaving.callback(self.leave_memory, reply, keep=keep, is_sound=keep or reply.is_finished)
            self._served.speculation.drop_reply(reply, keep=keep)
            if keep:
                reply.drop_held()

    def leave_memory(self, reply: Reply, *, keep: bool = False, is_sound: bool = True) -> None:
        """Takes the memory of a reply, which waits for other memory unless it has ended."""
        stay, reply.stay, reply.state = reply.stay, None, None
        # A request that waits for memory or a place may begin now. If no request runs, nothing else wakes the loop.
        self._inbox.wake()
        if stay is None:
            return
        # It ends whatever fails here.
        with stay:
            kept: dict[str, Any] = {}
            if keep:
                options = reply.running.request.cache
                kept["token_ids"], kept["expires_at"] = reply.computed_ids(), self._cache.expires_at(options.ttl_s)
                kept["options"] = options if reply.index == 0 else None
            stay.end_stay(is_sound=is_sound, keep=keep, **kept)

    def end_request(
        self, running: RunningRequest, last: Callable[[CacheReport], Event | None], *, keep: bool = False
    ) -> None:
        """Ends a request in any state: it leaves all lists, and its client gets the event that `last` makes. This is
        the only way out. A second call does nothing. With `keep`, the next turn may begin with the state of the first
        reply. Raises `DeviceLost`."""
        if running.is_over:
            return
        running.is_over, running.last_event, running.is_kept = True, last, keep
        if running.pictures is not None:
            running.pictures.is_over = True
        try:
            running.exits.close()
        except DeviceLost:
            raise
        except Exception as error:
            raise_if_lost(error)
            log.exception("[engine] %s: its end failed in part", running.request.id)

    def _leave(self, reply: Reply) -> None:
        self.end_reply(reply, keep=reply.running.is_kept and reply.index == 0)

    def _tell_end(self, running: RunningRequest) -> None:
        """Reports a request that has ended."""
        try:
            report = running.cached.close()
            self._served.record_request(running, report)
            event = running.last_event(report)
        except Exception as error:  # noqa: BLE001 (as above)
            raise_if_lost(error)
            event = error_event(error, running.request)
        if event is not None:
            running.ticket.send_last(event)

    def cancel(self, running: RunningRequest) -> None:
        """Ends a request whose client has gone. The computed state is kept, because the client may ask again."""
        log.info("[engine] %s cancelled", running.request.id)
        first = running.replies[0]
        with self.failing(running):
            if isinstance(first.state, KVSequence) and first.num_computed and not running.cached.is_published:
                running.cached.save_partial(first.state, first.computed_ids())
        self.end_request(running, lambda _: None, keep=True)

    @contextmanager
    def failing(self, running: RunningRequest) -> Iterator[None]:
        """Fails the request with any error that is raised inside the block. Other requests go on. Raises
        `DeviceLost`."""
        try:
            yield
        except DeviceLost:
            raise
        except Exception as error:  # noqa: BLE001 (as above)
            self._fail(running, error)

    def _fail(self, running: RunningRequest, error: Exception) -> None:
        raise_if_lost(error)
        self.end_request(running, lambda _: error_event(error, running.request))

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        """Fails a request that was not accepted."""
        raise_if_lost(error)
        self._inbox.begin_request(ticket)
        ticket.send_last(error_event(error, ticket.request))
        self._inbox.end_request(ticket)


def _is_background(waiter: Ticket | Reply) -> bool:
    """Returns whether a waiter is in the background: no client waits for its reply, because the reply has no tokens."""
    if isinstance(waiter, Reply):
        return waiter.is_background
    return waiter.request.sampling.max_tokens == 0 and waiter.request.reading is None


def _with_spares(chunk: Chunk[Reply]) -> Chunk[Reply]:
    """Returns the chunk. If there is no memory to keep the states before its guesses, leaves the guesses out, and its
    reply gets no more guesses."""
    reply, num_drafted = chunk.sequence, chunk.num_drafted
    if num_drafted and isinstance(reply.state, KVSequence) and not reply.state.take_spares():
        reply.guesser = Guesser()
        return replace(chunk, end=chunk.end - num_drafted, num_drafted=0)
    return chunk
