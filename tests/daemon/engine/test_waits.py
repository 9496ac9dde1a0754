"""Whatever one request waits for at another, the other one goes on: a long reply of a stranger holds up neither."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diskprefix.daemon.engine import active_requests
from diskprefix.daemon.engine.active_requests import ActiveRequests
from diskprefix.daemon.engine.inbox import Inbox, Ticket
from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.engine.request import DoneEvent, FinishEvent, GenerateRequest, TextEvent
from diskprefix.daemon.engine.scheduler import Scheduler
from diskprefix.values import Tenant
from tests.daemon.engine.driving import Client, bound_memory, load, request, running, tokens, wait_until_idle
from tests.waiting import wait_for

STRANGER = Tenant.of_key("a stranger")
LONG = request(tokens(100, 1), name="the stranger's", tenant=STRANGER, max_tokens=1000)
BEGINNING = tokens(1000, 2)
PREWARM = request(BEGINNING, name="prewarm", max_tokens=0)
QUESTION = request(np.append(BEGINNING, tokens(20, 3)), name="question")
OTHER = request(tokens(1500, 4), name="other")


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Engine:
    return load(folder, tmp_path / "kv")


def has_ended(client: Client) -> bool:
    return bool(client.events) and isinstance(client.events[-1], DoneEvent)


def num_replies_begun(client: Client) -> int:
    return len({event.choice for event in client.events if isinstance(event, TextEvent)})


@contextmanager
def beside(engine: Engine, long: GenerateRequest, *others: GenerateRequest) -> Iterator[tuple[Client, list[Client]]]:
    """Yields the client of a long reply that has begun, and those of requests that came then, in this order. Cancels
    the long reply at the end."""
    with running(engine) as inbox:
        stranger = Client(inbox, long)
        wait_for(lambda: num_replies_begun(stranger) > 0)
        clients = [Client(inbox, one) for one in others]
        try:
            yield stranger, clients
        finally:
            for client in (stranger, *clients):
                client.ticket.cancel()
            inbox.wake()


def require_first(engine: Engine, *others: GenerateRequest) -> None:
    """Requires that the last of the requests ends before the stranger's reply."""
    with beside(engine, LONG, *others) as (stranger, clients):
        wait_for(lambda: has_ended(clients[-1]) or has_ended(stranger))
        assert not has_ended(stranger), "it waited for the stranger's whole reply"


def limit(engine: Engine, *num_tokens: int) -> None:
    """Bounds memory to what sequences of these lengths take together."""
    bound_memory(engine.pages, sum(engine.pages.pool.sequence_bytes(number) for number in num_tokens))


def test_who_waits_for_the_beginning_that_a_prewarmed_prompt_computes_gets_it(engine: Engine) -> None:
    require_first(engine, PREWARM, QUESTION)


def test_who_waits_for_the_memory_of_a_prewarmed_prompt_gets_it(engine: Engine) -> None:
    limit(engine, 1100, 1000, 200)
    require_first(engine, PREWARM, OTHER)


def test_who_waits_behind_a_prewarmed_prompt_that_waits_for_memory_passes_it(engine: Engine) -> None:
    limit(engine, 1100, 1000, 200)
    require_first(engine, PREWARM, request(tokens(1500, 5), max_tokens=0), request(tokens(50, 6)))


def test_who_waits_for_the_place_of_a_prewarmed_prompt_gets_it(folder: Path, tmp_path: Path) -> None:
    engine = load(folder, tmp_path / "kv", max_sequences=2)
    long = request(tokens(100, 1), name="the long one", max_tokens=1000)
    with beside(engine, long, PREWARM, OTHER) as (stranger, clients):
        wait_for(lambda: has_ended(clients[-1]) or has_ended(stranger))
        assert not has_ended(stranger), "it waited for the whole reply"


def test_a_further_reply_that_waits_for_the_place_of_a_prewarmed_prompt_gets_it(folder: Path, tmp_path: Path) -> None:
    engine = load(folder, tmp_path / "kv", max_sequences=2)
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    inbox = Inbox(engine.serve)
    # Before the first step, so that the prewarmed prompt has the other place.
    Client(inbox, PREWARM)
    both = Client(inbox, request(tokens(100, 1), name="two replies", n=2, max_tokens=1000, **options))
    inbox.start()
    wait_for(lambda: num_replies_begun(both) == 2)
    has_first_ended = any(isinstance(event, FinishEvent) for event in both.events)
    both.ticket.cancel()
    inbox.wake()
    wait_until_idle(inbox)
    inbox.stop(0)
    assert not has_first_ended, "it waited for the whole first reply"


def test_a_prewarmed_prompt_that_only_prewarmed_prompts_wait_for_gives_way(engine: Engine) -> None:
    """Nobody waits for either: the stranger's reply loses no time."""
    longer = request(np.append(BEGINNING, tokens(20, 3)), name="prewarm more", max_tokens=0)
    with beside(engine, LONG, PREWARM, longer) as (stranger, clients):
        wait_for(lambda: has_ended(stranger) or any(map(has_ended, clients)))
        assert not any(map(has_ended, clients))
        wait_for(lambda: all(map(has_ended, clients)))


def test_a_request_waits_once_for_all_saves_whose_pages_it_needs(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not answer holds up the engine's thread for one limit, not for one each."""
    writer, waits = engine.cache.writer, list[float]()

    def hang(timeout_s: float) -> bool:
        time.sleep(timeout_s)
        waits.append(timeout_s)
        return False

    monkeypatch.setattr(writer, "_held_s", lambda _: 60.0)
    limit(engine, 1600)
    with running(engine) as inbox:
        first = Client(inbox, request(tokens(1000, 7)))
        wait_for(lambda: has_ended(first))
        monkeypatch.setattr(writer, "write_pages", hang)
        second = Client(inbox, request(tokens(1500, 8)))
        wait_for(lambda: has_ended(second))
    assert len(waits) > 2
    assert sum(waits) <= active_requests._WRITE_S


def num_python_calls(work: Callable[[], object]) -> int:
    counted = [0]

    def count(_frame: object, event: str, _value: object) -> None:
        counted[0] += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return counted[0]


def test_the_turns_of_waiting_requests_cost_as_much_for_each_however_many_wait(engine: Engine) -> None:
    inbox = Inbox(engine.serve)
    active = ActiveRequests(engine, inbox, Scheduler())
    callers = [Tenant.of_key(str(number)) for number in range(5)]

    def cost(num_waiting: int) -> int:
        asked = (request(tokens(10), tenant=callers[number % 5]) for number in range(num_waiting))
        tickets = [Ticket(one, lambda _: None) for one in asked]
        found = list[Ticket]()
        num_calls = num_python_calls(lambda: found.extend(active._turns(tickets)))
        assert found == tickets
        return num_calls

    assert cost(800) < 1.5 * 8 * cost(100)
