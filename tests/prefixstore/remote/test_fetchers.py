"""Threads that fetch, the breaker that lets them ask, and counts of what was missing."""

from __future__ import annotations

import threading

import pytest

from diskprefix.prefixstore.remote.breaker import Breaker
from diskprefix.prefixstore.remote.counts import Counts
from diskprefix.prefixstore.remote.fetchers import Fetchers
from tests.prefixstore.store.building import Clock

WAIT_S = 20.0


def test_concurrent_fetches_of_one_key_share_a_call() -> None:
    fetchers: Fetchers[int] = Fetchers(2)
    goes_on, calls = threading.Event(), []

    def call() -> int:
        assert goes_on.wait(WAIT_S)
        calls.append(threading.current_thread())
        return len(calls)

    one, other = fetchers.share("a", call), fetchers.share("a", call)
    assert one is other
    goes_on.set()
    assert one.future.result(WAIT_S) == 1
    assert fetchers.share("a", call).future.result(WAIT_S) == 2
    fetchers.close()
    for thread in calls:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    fetchers: Fetchers[None] = Fetchers(1)
    began, goes_on, done = threading.Event(), threading.Event(), []

    def hang() -> None:
        began.set()
        assert goes_on.wait(WAIT_S)

    first = fetchers.share("a", hang)
    assert began.wait(WAIT_S)
    given_up, shared = fetchers.share("b", lambda: done.append("b")), fetchers.share("c", lambda: done.append("c"))
    assert fetchers.share("c", lambda: done.append("c")) is shared
    fetchers.leave(given_up)
    fetchers.leave(shared)
    fetchers.leave(first)
    again = fetchers.share("b", lambda: done.append("b again"))
    goes_on.set()
    again.future.result(WAIT_S)
    assert done == ["c", "b again"]
    fetchers.close()


def test_who_waits_is_told_of_any_error() -> None:
    fetchers: Fetchers[None] = Fetchers(1)

    def panic() -> None:
        raise SystemExit("in a thread")

    with pytest.raises(SystemExit):
        fetchers.share("a", panic).future.result(WAIT_S)
    fetchers.share("a", lambda: None).future.result(WAIT_S)
    fetchers.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock)


def fail(breaker: Breaker, times: int) -> list[bool]:
    return [breaker.failed() for _ in range(times)]


def test_three_failures_in_a_row_open_it_and_a_success_closes_it(breaker: Breaker) -> None:
    assert fail(breaker, 2) == [False, False]
    breaker.succeeded()
    assert fail(breaker, 2) == [False, False]
    assert breaker.allows()
    assert fail(breaker, 2) == [True, False]
    assert not breaker.allows()
    assert breaker.is_open
    breaker.succeeded()
    assert breaker.allows()
    assert not breaker.is_failing


def test_one_caller_a_minute_is_let_through_whether_it_answers_or_not(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    for _ in range(2):
        clock.now += 60.0
        assert not breaker.is_open
        assert [breaker.allows() for _ in range(3)] == [True, False, False]
    fail(breaker, 1)
    clock.now += 59.0
    assert not breaker.allows()
    assert breaker.is_failing


def test_what_was_there_a_day_ago_is_asked_for_again() -> None:
    clock = Clock()
    counts = Counts(clock)
    counts.add_known("a")
    clock.now += 86000.0
    assert counts.is_known("a")
    clock.now += 1000.0
    assert not counts.is_known("a")
    counts.add_known("a")
    assert counts.is_known("a")
