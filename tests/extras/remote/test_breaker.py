"""When a server that fails is left alone, and when it is asked again."""

from __future__ import annotations

import pytest

from diskprefix.extras.remote.breaker import Breaker
from tests.store.building import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock, jitter=lambda: 1.0)


def fail(breaker: Breaker, times: int) -> None:
    for _ in range(times):
        breaker.failed()


def test_three_failures_in_a_row_open_it(breaker: Breaker) -> None:
    fail(breaker, 2)
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.allows()
    fail(breaker, 1)
    assert not breaker.allows()
    assert not breaker.would_allow()
    assert breaker.is_open


def test_one_caller_is_let_through_when_its_time_is_over(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 2.0
    assert breaker.would_allow()
    assert [breaker.allows() for _ in range(3)] == [True, False, False]
    breaker.succeeded()
    assert breaker.allows()
    assert not breaker.is_open


def test_each_failure_doubles_the_time_up_to_a_minute(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    waits = []
    for _ in range(7):
        before = clock.now
        while not breaker.would_allow():
            clock.now += 0.5
        waits.append(clock.now - before)
        assert breaker.allows()
        breaker.failed()
    assert waits == [2, 4, 8, 16, 32, 60, 60]


def test_what_began_before_it_opened_and_fails_does_not_lengthen_its_time(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 10)
    clock.now += 2.0
    assert breaker.allows()
    breaker.failed()
    fail(breaker, 10)
    clock.now += 4.0
    assert breaker.allows()


def test_a_caller_who_never_answers_does_not_keep_it_open(breaker: Breaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 2.0
    assert breaker.allows()
    clock.now += 60.0
    assert breaker.allows()


def test_machines_do_not_come_back_at_once(clock: Clock) -> None:
    early, late = Breaker(clock, jitter=lambda: 0.0), Breaker(clock, jitter=lambda: 1.0)
    fail(early, 3)
    fail(late, 3)
    clock.now += 1.0
    assert (early.would_allow(), late.would_allow()) == (True, False)
