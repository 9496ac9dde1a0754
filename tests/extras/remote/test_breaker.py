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
