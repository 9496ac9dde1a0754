"""The requests that the engine has accepted: how each gets its memory, may lose it to others, and ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from diskprefix.engine.constrained_reply import ConstrainedReply
from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.gauges import Activity
from diskprefix.engine.inbox import Inbox, Ticket, error_event
from diskprefix.engine.request import Event, GenerateRequest
from diskprefix.engine.running_request import Reply, RunningRequest
from diskprefix.engine.sampler import Sampler
from diskprefix.engine.scheduler import Chunk, Scheduler
from diskprefix.engine.served_model import ServedModel
from diskprefix.engine.thought_limit import ThoughtLimit
from diskprefix.errors import DeviceLost
from diskprefix.kv.arena import KVArena
from diskprefix.kv.pool import KVAllocation
from diskprefix.kv.uncached import TransformersState
from diskprefix.nouns import CacheReport

log = logging.getLogger("diskprefix")

_CALLERS_PER_SEQUENCE = 4
"""The most callers, for each of `max_sequences`, that may have one reply above that limit. A client without an API key
can make any number of callers with salts."""


class ActiveRequests:
    """The requests of one engine's thread. `preempted` replies lost their memory to others, and are computed again."""

    def __init__(self, served: ServedModel, inbox: Inbox, scheduler: Scheduler[Reply]) -> None:
        self.requests: list[RunningRequest] = []
        self.preempted: list[Reply] = []
        self._served, self._inbox, self._scheduler = served, inbox, scheduler
        self._cache, self._pool = served.cache, served.pool
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

    def readmit(self) -> bool:
        """Gives memory to preempted replies, the oldest first. Returns True if all have it."""
        while self.preempted:
            reply = min(self.preempted, key=lambda reply: reply.arrived)
            with self.failing(reply.running):
                allocation = self._pool.allocate(reply.num_known, self._most_tokens(reply.running.request))
                if allocation is None:
                    return False
                self.preempted.remove(reply)
                options = reply.running.request.cache
                if reply.index == 0 and options.scope.kind != "off":
                    allocation.owner = self._cache.owner(options.tenant)
                reply.use_memory(allocation)
                self._scheduler.add(reply)
        return True

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
            is_first = ticket.request.caller not in callers
            has_place = is_first and len(set(callers)) < _CALLERS_PER_SEQUENCE * self._served.max_sequences
            if not has_place and not self.has_place:
                return
            try:
                memory = self._memory_for(ticket.request)
            except Exception as error:  # noqa: BLE001 (the client gets it, and the thread must outlive any request)
                self._refuse(ticket, error)
                continue
            if memory is None:
                return
            if memory == "later":
                continue
            callers.append(ticket.request.caller)
            if (running := self._accept(ticket, memory)) is not None:
                yield running

    def _memory_for(self, request: GenerateRequest) -> KVAllocation | TransformersState | Literal["later"] | None:
        """Returns the memory of a request; None if others must end first, "later" if only this one must wait.

        Raises `InvalidRequest` for an empty prompt, and `ContextTooLong` for one that exceeds the positions or the
        memory.
        """
        self._served.check_length(request)
        token_ids = request.prompt.token_ids
        if request.prompt.media or self._cache.layout.unsupported:
            replies = [reply for running in self.requests for reply in running.replies]
            if any(isinstance(reply.state, TransformersState) for reply in replies):
                return "later"
            return TransformersState(self._served.model, request.prompt.media)
        sizes = len(token_ids), self._most_tokens(request)
        if request.cache.scope.kind == "off":
            return self._pool.allocate(*sizes)
        owner = self._cache.owner(request.cache.tenant)
        found = self._pool.match_prefix(owner, token_ids[:-1] if request.cache.leaves_last else token_ids)
        if found is not None and found.is_worth_waiting_for:
            return "later"
        allocation = self._pool.extend(found, *sizes) if found else self._pool.allocate(*sizes)
        if allocation is not None:
            allocation.owner = owner
        return allocation

    def _most_tokens(self, request: GenerateRequest) -> int:
        """Returns the tokens that a sequence may get. The last one of a reply is not computed."""
        return len(request.prompt.token_ids) + self._served.reply_limit(request) - 1

    def _accept(self, ticket: Ticket, memory: KVAllocation | TransformersState) -> RunningRequest | None:
        prompt = ticket.request.prompt
        try:
            running = self._make_running(ticket)
        except Exception as error:  # noqa: BLE001 (as above)
            if isinstance(memory, KVAllocation):
                self._pool.release(memory, keep=True)
            self._refuse(ticket, error)
            return None
        self._num_arrived += len(running.all_replies)
        self._inbox.begin_request(ticket)
        self.requests.append(running)
        first = running.replies[0]
        if isinstance(memory, KVAllocation):
            running.num_adopted = memory.num_computed
            memory.token_ids, memory.num_exact = prompt.token_ids, len(prompt.token_ids)
            first.use_memory(memory)
            return running
        first.state = memory
        if prompt.media:
            kinds = ", ".join(prompt.media)
            log.info("[disk-cache] %s: bypassed, the prompt holds media (%s)", ticket.request.id, kinds)
        return running

    def _make_running(self, ticket: Ticket) -> RunningRequest:
        request, served = ticket.request, self._served
        running = RunningRequest(
            ticket,
            self._cache.begin(request.prompt, request.cache),
            served.figures,
            served.reply_limit(request),
            torch.from_numpy(request.prompt.token_ids).long().unsqueeze(0),
        )
        first = None if request.constraint is None else served.constraints.begin_reply(request.constraint)
        constraints = [first] + [first and first.another() for _ in range(1, request.sampling.n)]
        replies = [self._make_reply(running, index, constraint) for index, constraint in enumerate(constraints)]
        running.replies, running.unforked = replies[:1], replies[1:]
        return running

    def _make_reply(self, running: RunningRequest, index: int, constraint: ConstrainedReply | None) -> Reply:
        request, served, layout = running.request, self._served, self._cache.layout
        prompt_tokens = len(request.prompt.token_ids)
        in_steps = not (layout.unsupported or request.prompt.media)
        return Reply(
            running=running,
            index=index,
            tenant=request.caller,
            arrived=self._num_arrived + index + 1,
            prompt_tokens=prompt_tokens,
            packs=served.packs and not request.prompt.media,
            grid=self._cache.settings.block_size if in_steps else prompt_tokens,
            sampler=Sampler(request.sampling, request.prompt.token_ids, served.model.device, index, constraint),
            text=served.text_stream(request),
            guesser=served.guesser(request),
            thought_limit=None if request.thought_budget is None else ThoughtLimit(request.thought_budget),
        )

    # A step gets its memory.

    def with_memory(self, step: list[Chunk[Reply]]) -> list[Chunk[Reply]]:
        """Returns the chunks of a step that have room. Where there is none, the youngest sequence gives up its memory,
        even if it is alone: to grow, it would need room for the old memory beside the new."""
        for chunk in step:
            while chunk.sequence.allocation is not None and not self._pool.grow(chunk.sequence.allocation, chunk.end):
                requests = [running for running in self.requests if not running.is_fetching]
                holders = [reply for running in requests for reply in running.replies if reply.allocation is not None]
                self.preempt(max(holders, key=lambda reply: reply.arrived))
        return [chunk for chunk in step if chunk.sequence.state is not None]

    def preempt(self, reply: Reply, why: str = "waits: others need its memory") -> None:
        """Takes the memory of a reply. Its tokens are computed again when there is memory for them."""
        running = reply.running
        log.info("[engine] %s %s", running.request.id, why)
        assert reply.allocation is not None
        self._served.figures.preemptions += 1
        self._scheduler.remove(reply)
        self._pool.release(reply.allocation, keep=False)
        # Logits that were held are computed again, too.
        reply.allocation = reply.state = reply.held = None
        reply.num_computed = 0
        self.preempted.append(reply)
        if running.source is reply:
            # The others have nothing to begin from any more.
            self.preempted.extend(running.unforked)
            running.replies, running.unforked, running.source = running.all_replies, [], None

    # A request ends.

    def release(self, reply: Reply, *, keep: bool) -> None:
        """Gives the memory of a reply back. `keep`: the next turn may begin there."""
        self._served.release_draft(reply, keep=keep)
        allocation, reply.allocation, reply.state = reply.allocation, None, None
        self._scheduler.remove(reply)
        if allocation is None:
            return
        options, layout = reply.running.request.cache, self._cache.layout
        is_exact = layout.exact_at == "token"
        allocation.token_ids = reply.computed_ids()
        allocation.num_computed = len(allocation.token_ids)
        if is_exact:
            allocation.num_exact = len(allocation.token_ids)
        allocation.expires_at = time.monotonic() + self._cache.lasts_s(options.ttl_s)
        allocation.options = options
        is_usable = is_exact or layout.is_sliceable or reply.num_computed <= reply.prompt_tokens
        keep = keep and is_usable and options.save and options.scope.kind != "off" and allocation.num_exact > 0
        self._pool.release(allocation, keep=keep)

    def end_request(self, running: RunningRequest, last: Callable[[CacheReport], Event | None]) -> None:
        """Ends a request, whatever goes wrong in it. `last` returns its last event."""
        running.is_over = True
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
        if isinstance(first.state, KVArena) and first.num_computed and not running.is_published:
            running.cached.leave(first.state)
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
        self._release_all(running, keep=False)
        self.end_request(running, lambda _: error_event(error, running.request))

    def _release_all(self, running: RunningRequest, *, keep: bool) -> None:
        self.preempted = [reply for reply in self.preempted if reply.running is not running]
        for reply in running.replies:
            self.release(reply, keep=keep and reply.index == 0)

    def _refuse(self, ticket: Ticket, error: Exception) -> None:
        """Fails a request that was not accepted."""
        raise_if_lost(error)
        self._inbox.begin_request(ticket)
        _send_last(ticket, error_event(error, ticket.request))
        self._inbox.end_request(ticket)


def _send_last(ticket: Ticket, event: Event) -> None:
    """Sends a request's last event, to a client that may have gone."""
    try:
        ticket.emit(event)
    except Exception:
        log.exception("[engine] %s: its end could not be told", ticket.request.id)
