"""Threads that fetch."""

from __future__ import annotations

import threading

import pytest

from diskprefix.extras.remote.fetchers import Fetchers

WAIT_S = 20.0


def test_who_wants_the_same_shares_a_call_and_later_ones_call_again() -> None:
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
