"""What is seen of an engine while it runs: its requests, and whether its thread hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from diskprefix.engine.gauges import SLOWEST_ROW_S, Activity, Heartbeat
from diskprefix.engine.inbox import Inbox
from diskprefix.engine.loop import Engine
from diskprefix.engine.request import GenerateRequest
from tests.engine.driving import Client, after_steps, load, request, tokens, wait_until_idle

BLOCK = 16


@pytest.fixture(scope="module")
def engine(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = load(folder, tmp_path_factory.mktemp("activity"), block_size=BLOCK, max_sequences=1)
    engine.max_rows = BLOCK
    yield engine
    engine.close()


def seen_after(engine: Engine, steps: int, *requests: GenerateRequest) -> list[Activity]:
    """Returns what another thread sees after a number of steps, while the engine's thread stands still."""
    inbox = Inbox(engine.serve)
    for one in requests:
        Client(inbox, one)
    found: list[Activity] = []

    def look() -> None:
        looking = threading.Thread(target=lambda: found.extend(inbox.activities()))
        looking.start()
        looking.join()

    with pytest.MonkeyPatch.context() as patch:
        after_steps(patch, steps, look)
        inbox.start()
        wait_until_idle(inbox)
    assert inbox.activities() == []
    inbox.stop(0)
    return found


def test_a_prompt_is_seen_to_grow_and_what_comes_after_it_to_wait(engine: Engine) -> None:
    first, second = seen_after(engine, 2, request(tokens(100), name="first"), request(tokens(60, 1), name="second"))
    assert (first.id, first.state, first.ready_tokens, first.prompt_tokens) == ("first", "prefilling", 2 * BLOCK, 100)
    assert (second.id, second.state, second.ready_tokens, second.prompt_tokens) == ("second", "waiting", 0, 60)
    assert (str(first.scope), first.queue_s is None, second.queue_s) == ("full", False, None)
    assert first.ttft_s is None


def test_a_reply_is_seen_to_grow_with_what_was_restored_before_it(engine: Engine) -> None:
    seen_after(engine, 1, request(tokens(48, 2)))
    [activity] = seen_after(engine, 3, request(tokens(48, 2)))
    assert (activity.state, activity.restored_tokens, activity.ready_tokens) == ("decoding", 48, 48)
    assert activity.reply_tokens == 4
    assert activity.ttft_s is not None
    assert activity.tokens_per_s is not None
    assert activity.tokens_per_s > 0
    assert activity.elapsed_s >= activity.ttft_s


class Watched:
    """A heartbeat, and the time that it reads."""

    def __init__(self) -> None:
        self.now = 0.0
        self.heartbeat = Heartbeat(clock=lambda: self.now)

    def stopped_after(self, seconds: float) -> bool:
        self.now += seconds
        return self.heartbeat.has_stopped()


def test_an_engine_that_waits_for_requests_has_not_stopped_however_long_it_waits() -> None:
    watched = Watched()
    watched.heartbeat.beat()
    watched.heartbeat.rest()
    assert not any(watched.stopped_after(3600) for _ in range(3))
    assert watched.heartbeat.working_s == 0


def test_an_engine_that_gets_on_has_not_stopped_however_long_its_steps_take() -> None:
    watched = Watched()
    for _ in range(3):
        watched.heartbeat.beat(num_rows=1)
        assert not watched.stopped_after(3600)


def test_a_step_that_does_not_end_has_stopped_from_the_second_look_on_until_it_ends() -> None:
    watched = Watched()
    watched.heartbeat.beat(num_rows=1)
    assert not watched.stopped_after(30), "it may have begun just now"
    assert watched.stopped_after(30)
    assert watched.stopped_after(30)
    assert watched.heartbeat.working_s == 90
    watched.heartbeat.beat()
    assert not watched.stopped_after(30)


def test_a_step_of_many_rows_may_take_longer() -> None:
    watched = Watched()
    watched.heartbeat.beat(num_rows=1000)
    assert not any(watched.stopped_after(SLOWEST_ROW_S * 100) for _ in range(10))
    assert watched.stopped_after(1)
