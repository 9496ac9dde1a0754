"""Pools and threads go on whatever the system refuses and whatever fails."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, wait
from typing import Any

import pytest

from diskprefix import thread_pool
from diskprefix.thread_pool import ThreadPool, standing_thread, start_helper


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_started_pool_starts_no_thread_where_work_is_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    starters, start = list[str](), threading.Thread.start
    pool, together = ThreadPool(3, "pool").start(), threading.Barrier(3)

    def noted(thread: threading.Thread) -> None:
        starters.append(threading.current_thread().name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    for _ in range(3):
        assert not wait([pool.submit(together.wait, 30) for _ in range(3)]).not_done
    pool.shutdown()
    assert starters == ["pool_0", "pool_1"]


def test_while_the_system_refuses_a_thread_work_waits_for_those_that_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, may_end, together = ThreadPool(2, "pool").start(), threading.Event(), threading.Barrier(2)
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        first, second = pool.submit(may_end.wait, 30), pool.submit(threading.get_ident)
        may_end.set()
        assert first.result(30)
        assert second.result(30)
    # The next work asks again.
    assert not wait([pool.submit(together.wait, 30) for _ in range(2)]).not_done
    pool.shutdown()


def test_a_pool_whose_first_thread_is_refused_queues_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, done = ThreadPool(1, "pool"), list[int]()
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        for begin in (pool.start, lambda: pool.submit(done.append, 1)):
            with pytest.raises(RuntimeError, match="can't start"):
                begin()
    pool.submit(done.append, 2).result(30)
    pool.shutdown()
    assert done == [2]


def test_an_error_of_a_call_is_that_of_its_future_and_the_thread_goes_on() -> None:
    pool = ThreadPool(1, "pool")
    failed = pool.submit(int, "x")
    with pytest.raises(ValueError, match="invalid literal"):
        failed.result(30)
    assert pool.submit(int, "1").result(30) == 1
    pool.shutdown()


class Argument:
    """What a call is given."""


def test_what_a_call_was_given_is_gone_before_its_result_is_known() -> None:
    pool, may_begin, alive = ThreadPool(1, "pool"), threading.Event(), list[bool]()

    def work(argument: Argument) -> str:
        assert may_begin.wait(30)
        return repr(argument)

    argument = Argument()
    given, done = weakref.ref(argument), pool.submit(work, argument)
    done.add_done_callback(lambda _: alive.append(given() is not None))
    del argument
    may_begin.set()
    assert "Argument" in done.result(30)
    pool.shutdown()
    assert alive == [False]


def test_what_a_failed_call_was_given_is_gone_with_its_error() -> None:
    def work(argument: Argument) -> None:
        raise ValueError(repr(argument))

    pool, argument = ThreadPool(1, "pool"), Argument()
    given, failed = weakref.ref(argument), pool.submit(work, argument)
    assert isinstance(failed.exception(30), ValueError)
    pool.shutdown()
    gc.disable()
    try:
        del argument, failed
        assert given() is None, "no cycle of references keeps it until garbage is collected"
    finally:
        gc.enable()


@pytest.mark.parametrize("drops", [False, True])
def test_a_closed_pool_completes_its_work_or_drops_it_and_takes_no_more(drops: bool) -> None:
    pool, has_begun, may_end = ThreadPool(1, "pool"), threading.Event(), threading.Event()

    def work() -> bool:
        has_begun.set()
        return may_end.wait(30)

    first, second = pool.submit(work), pool.submit(int, "1")
    assert has_begun.wait(30)
    pool.shutdown(wait=False, cancel_futures=drops)
    with pytest.raises(RuntimeError, match="no more work"):
        pool.submit(int, "2")
    may_end.set()
    assert first.result(30)
    if drops:
        with pytest.raises(CancelledError):
            second.result(30)
    else:
        assert second.result(30) == 1
    pool.shutdown()


def test_each_thread_of_a_pool_begins_as_asked() -> None:
    begun = list[int]()
    pool = ThreadPool(1, "pool", lambda: begun.append(threading.get_ident()))
    assert [pool.submit(threading.get_ident).result(30)] == begun
    pool.shutdown()


def test_a_standing_thread_begins_again_after_an_error_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(thread_pool, "_AGAIN_S", 0.0)
    idents, errors = list[int](), list[Exception]()

    def work() -> None:
        idents.append(threading.get_ident())
        if len(idents) < 3:
            raise MemoryError

    thread = standing_thread(work, "standing", errors.append)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert len(idents) == 3
    assert len(set(idents)) == 1, "no other thread is asked for, which might be refused"
    assert [type(error) for error in errors] == [MemoryError, MemoryError]
    assert caplog.text.count("the thread standing failed, and begins again") == 2


def test_work_that_can_be_left_out_is_left_out_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    assert start_helper(done.set, "helper")
    assert done.wait(30)
    refuse_threads(monkeypatch)
    work: Callable[[], Any] = done.clear
    assert not start_helper(work, "helper")
    assert done.is_set()
