"""Drives an engine from a test: one request to its end, and an engine thread that runs a function a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.inbox import Inbox, Serve, error_event
from diskprefix.engine.loop import Engine, Loop
from diskprefix.engine.request import DoneEvent, ErrorEvent, Event, GenerateRequest, TextEvent
from diskprefix.extras.simulate.recording import RecordedRequest
from diskprefix.kv import arena
from diskprefix.kv.arena import KVArena
from diskprefix.kv.pool import KVPool


class Cancelled(Exception):
    """The request was cancelled: it has no last event."""


Run = Callable[[GenerateRequest, Callable[[Event], None], Callable[[], bool]], None]


def serve_one_at_a_time(run: Run) -> Serve:
    """Returns what an inbox's thread runs: `run` for each request, in order of arrival."""

    def serve(inbox: Inbox) -> None:
        while True:
            if not (waiting := inbox.waiting()):
                if inbox.wait():
                    continue
                return
            ticket = waiting[0]
            inbox.begin_request(ticket)
            try:
                run(ticket.request, ticket.emit, lambda ticket=ticket: ticket.cancelled)  # type: ignore[misc]
            except Cancelled:
                pass
            except Exception as error:  # noqa: BLE001 (as the engine's loop)
                raise_if_lost(error)
                ticket.emit(error_event(error, ticket.request))
            inbox.end_request(ticket)

    return serve


def wait_until_idle(inbox: Inbox) -> None:
    with inbox._changed:
        assert inbox._changed.wait_for(lambda: not inbox._waiting and not inbox._running, 120)


class Client:
    """One request and what came of it."""

    def __init__(self, inbox: Inbox, request: GenerateRequest) -> None:
        self.events: list[Event] = []
        self.ticket = inbox.submit(request, self.events.append)

    @property
    def tokens(self) -> list[int]:
        """Those of the first choice."""
        return self.tokens_of(0)

    def tokens_of(self, choice: int) -> list[int]:
        texts = [event for event in self.events if isinstance(event, TextEvent) and event.choice == choice]
        return [token for event in texts for token in event.token_ids]

    @property
    def done(self) -> DoneEvent:
        """Raises what the request failed with."""
        last = self.events[-1]
        if isinstance(last, ErrorEvent):
            raise last.error
        assert isinstance(last, DoneEvent)
        return last


@contextmanager
def running(engine: Engine) -> Iterator[Inbox]:
    """An inbox that the engine serves."""
    inbox = Inbox(engine.serve, 1000)
    inbox.start()
    yield inbox
    wait_until_idle(inbox)
    inbox.stop(0)


def run_together(engine: Engine, requests: Iterable[GenerateRequest]) -> list[Client]:
    """Submits all requests before the first step, and returns them when they are over."""
    inbox = Inbox(engine.serve, 1000)
    clients = [Client(inbox, request) for request in requests]
    inbox.start()
    wait_until_idle(inbox)
    inbox.stop(0)
    return clients


def run_request(engine: Engine, request: GenerateRequest, *, steps: int | None = None) -> list[Event]:
    """Returns the events of one request, which is cancelled after so many steps. Raises what it failed with."""
    inbox = Inbox(engine.serve, 8)
    client = Client(inbox, request)
    with pytest.MonkeyPatch.context() as patch:
        if steps is not None:
            after_steps(patch, steps, client.ticket.cancel)
        inbox.start()
        wait_until_idle(inbox)
    inbox.stop(0)
    if client.ticket.cancelled:
        raise Cancelled
    assert client.done
    return client.events


def recorded_requests(path: Path) -> list[RecordedRequest]:
    """Returns the lines of a recording (`--record`), in the order in which the requests ended."""
    return [msgspec.json.decode(line, type=RecordedRequest) for line in path.read_bytes().splitlines()]


def forget_idle(pool: KVPool) -> None:
    """Has the pool forget all sequences that ended."""
    for allocation in [allocation for allocation in pool.allocations if not allocation.is_busy]:
        pool.release(allocation, keep=False)


def after_steps(patch: pytest.MonkeyPatch, steps: int, act: Callable[[], object]) -> None:
    """Has the engine's thread call `act` once, after so many steps from now on."""
    compute, left = Loop._compute, [steps]

    def counted(self: Loop, step: Any) -> None:
        compute(self, step)
        left[0] -= 1
        if not left[0]:
            act()

    patch.setattr(Loop, "_compute", counted)


def memory_in_steps_of(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory grows in steps of so many tokens, so that with small ones much happens while there are few tokens."""
    given = KVArena.__init__.__defaults__
    assert given is not None
    steps = tuple(num_tokens if value == arena._CAPACITY_STEP else value for value in given)
    monkeypatch.setattr(KVArena.__init__, "__defaults__", steps)
    monkeypatch.setattr(arena, "_CAPACITY_STEP", num_tokens)
