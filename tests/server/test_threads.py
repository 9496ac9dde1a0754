"""The threads of the server: no kind of work waits for another, and one caller's compilations wait for each other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from diskprefix.server.threads import Threads

WAIT_S = 60


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.close()


async def nobody_left() -> bool:
    return False


def test_no_kind_of_work_waits_for_another(threads: Threads) -> None:
    go_on = threading.Event()

    async def fill() -> None:
        async with asyncio.timeout(WAIT_S):
            stuck = [
                asyncio.create_task(threads.compile(caller, nobody_left, lambda: go_on.wait(WAIT_S)))
                for caller in range(100)
            ]
            stuck += [asyncio.create_task(threads.run("parsing", go_on.wait, WAIT_S)) for _ in range(100)]
            assert await threads.run("rendering", lambda: 1) == 1
            assert await threads.run("stopping", lambda: 2) == 2
            assert threads.are_busy
            go_on.set()
            await asyncio.gather(*stuck)
            assert not threads.are_busy

    asyncio.run(fill())


def test_work_of_a_client_that_left_does_not_begin_and_what_began_keeps_its_turn(threads: Threads) -> None:
    began: list[str] = []
    go_on = threading.Event()

    def work(name: str) -> None:
        began.append(name)
        assert go_on.wait(WAIT_S)

    async def leave() -> None:
        async with asyncio.timeout(WAIT_S):
            tasks = [
                asyncio.create_task(threads.compile("caller", nobody_left, partial(work, name)))
                for name in ("first", "second")
            ]
            tasks += [asyncio.create_task(threads.run("media", work, name)) for name in ("running", "waiting")]
            while len(began) < 2:
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            third = asyncio.create_task(threads.compile("caller", nobody_left, partial(work, "third")))
            assert await threads.compile("other", nobody_left, lambda: 1) == 1
            assert sorted(began) == ["first", "running"]
            go_on.set()
            await third
            assert await threads.run("media", lambda: 2) == 2

    asyncio.run(leave())
    assert sorted(began) == ["first", "running", "third"]


def test_nothing_is_compiled_for_a_client_that_left(threads: Threads) -> None:
    async def left() -> bool:
        return True

    def compiled() -> int:
        raise AssertionError("nobody waits for it")

    async def compile_one() -> None:
        assert await threads.compile("caller", left, compiled) is None

    asyncio.run(compile_one())


def test_an_error_of_the_work_is_raised_where_it_is_awaited(threads: Threads) -> None:
    async def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            await threads.run("rendering", lambda: 1 // 0)

    asyncio.run(fail())
