"""Requests that wait, run, are cancelled and fail, with an engine of which the test decides when a request ends; and
what is seen of a real one while it runs."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from diskprefix.daemon.engine import inbox as inbox_module
from diskprefix.daemon.engine import running_request
from diskprefix.daemon.engine.gauges import SLOWEST_ROW_S, Activity, Heartbeat
from diskprefix.daemon.engine.inbox import Inbox
from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.engine.request import ErrorEvent, Event, FinishEvent, GenerateRequest
from diskprefix.errors import ContextTooLong, DeviceLost, NonFiniteLogits, NotReady, QueueFull
from diskprefix.thread_pool import ThreadPool
from diskprefix.values import Picture, Prompt
from tests.daemon.engine import driving
from tests.daemon.engine.driving import (
    Cancelled,
    Client,
    after_steps,
    load,
    serve_one_at_a_time,
    tokens,
    wait_until_idle,
)

BLOCK = 16


def request(name: str, image_bytes: int = 0) -> GenerateRequest:
    picture = Picture(b"name", "", 0, {}, "1x1", image_bytes, "messages", dict)
    return replace(driving.request(tokens(1), name=name), prompt=Prompt(tokens(1), pictures=(picture,)))


class Steps:
    """An engine whose requests run until the test lets them go, in steps that look for a cancellation."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.ended: list[str] = []
        self.go = threading.Event()
        self.changed = threading.Condition()
        self.failure: Exception | None = None

    def run(
        self,
        request: GenerateRequest,
        emit: Callable[[Event], None],
        is_cancelled: Callable[[], bool],
    ) -> None:
        self._note(self.started, request.id)
        while not self.go.wait(0.001):
            if is_cancelled():
                self._note(self.ended, f"{request.id} cancelled")
                raise Cancelled
        if self.failure is not None:
            raise self.failure
        emit(FinishEvent(0, "stop"))
        self._note(self.ended, request.id)

    def _note(self, where: list[str], what: str) -> None:
        with self.changed:
            where.append(what)
            self.changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 30)


class Events(list[Event]):
    def __init__(self) -> None:
        super().__init__()
        self.last = threading.Event()

    def __call__(self, event: Event) -> None:
        self.append(event)
        self.last.set()


@pytest.fixture
def steps() -> Steps:
    return Steps()


def started(steps: Steps, on_fatal: Callable[[DeviceLost], None] = lambda _error: None) -> Inbox:
    inbox = Inbox(serve_one_at_a_time(steps.run), on_fatal)
    inbox.start()
    return inbox


def test_what_waiting_requests_hold_of_images_is_limited(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskprefix.daemon.engine.inbox.MAX_QUEUED_PICTURE_BYTES", 100)
    inbox = started(steps)
    inbox.submit(request("running", image_bytes=60), Events())
    steps.wait_until(lambda: bool(steps.started))
    waiting = inbox.submit(request("waiting", image_bytes=40), Events())
    inbox.submit(request("text"), Events())
    with pytest.raises(QueueFull, match="the images of waiting requests take") as refused:
        inbox.submit(request("more", image_bytes=1), Events())
    assert refused.value.retry_after_s >= 1
    theirs = request("another share's", image_bytes=50)
    inbox.submit(replace(theirs, cache=replace(theirs.cache, share="key bob")), Events()).cancel()
    waiting.cancel()
    inbox.submit(request("in its place", image_bytes=40), Events())
    steps.go.set()
    steps.wait_until(lambda: steps.ended == ["running", "text", "in its place"])
    inbox.stop(30)


def test_the_images_of_a_request_that_is_over_are_let_go_of(steps: Steps) -> None:
    """Its ticket lives on until its client has read all of the answer."""
    inbox = started(steps)
    tickets = [inbox.submit(request(name, image_bytes=60), Events()) for name in "ab"]
    tickets[1].cancel()
    steps.go.set()
    steps.wait_until(lambda: steps.ended == ["a"])
    inbox.submit(request("c"), Events())
    steps.wait_until(lambda: steps.ended == ["a", "c"])
    inbox.stop(30)
    assert not tickets[0].request.prompt.pictures


def test_cancelling_stops_a_running_request_and_the_next_one_runs(steps: Steps) -> None:
    inbox = started(steps)
    first, events = inbox.submit(request("a"), Events()), Events()
    inbox.submit(request("b"), events)
    steps.wait_until(lambda: bool(steps.started))
    first.cancel()
    steps.wait_until(lambda: steps.started == ["a", "b"])
    steps.go.set()
    assert events.last.wait(30)
    assert steps.ended[0] == "a cancelled"
    inbox.stop(30)


def test_stopping_refuses_what_waits_and_cancels_what_takes_too_long(steps: Steps) -> None:
    inbox = started(steps)
    running, waiting = Events(), Events()
    inbox.submit(request("a"), running)
    steps.wait_until(lambda: bool(steps.started))
    inbox.submit(request("b"), waiting)
    assert not inbox.stop(0.01)
    assert steps.ended == ["a cancelled"]
    for events in (running, waiting):
        (event,) = events
        assert isinstance(event, ErrorEvent)
        assert isinstance(event.error, NotReady)
    with pytest.raises(NotReady):
        inbox.submit(request("c"), Events())


def test_a_request_that_ends_while_the_daemon_stops_ends_once(steps: Steps) -> None:
    """The engine has sent its last event, and the inbox still has it as running."""
    inbox, events = started(steps), Events()
    ticket = inbox.submit(request("a"), events)
    steps.wait_until(lambda: bool(steps.started))
    ticket.send_last(ErrorEvent(ContextTooLong("its end")))
    assert not inbox.stop(0.01)
    (event,) = events
    assert isinstance(event, ErrorEvent)
    assert isinstance(event.error, ContextTooLong)


def test_a_lost_device_fails_all_requests_and_is_reported_once(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    probed_on: list[str] = []

    def probe() -> None:
        probed_on.append(threading.current_thread().name)
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("diskprefix.daemon.engine.device.probe_devices", probe)
    steps.failure = torch.AcceleratorError("CUDA error: device-side assert triggered")
    fatal: list[DeviceLost] = []
    reported = threading.Event()

    def on_fatal(error: DeviceLost) -> None:
        fatal.append(error)
        reported.set()

    inbox = started(steps, on_fatal=on_fatal)
    running, waiting = Events(), Events()
    inbox.submit(request("running"), running)
    steps.wait_until(lambda: bool(steps.started))
    inbox.submit(request("waiting"), waiting)
    steps.go.set()
    assert reported.wait(30)
    assert fatal[0].exit_code != 0
    assert running == [ErrorEvent(fatal[0])]
    assert isinstance(waiting[0], ErrorEvent)
    assert isinstance(waiting[0].error, NotReady)
    with pytest.raises(NotReady, match="lost its device"):
        inbox.submit(request("later"), Events())
    assert inbox.stop(30)
    assert (steps.started, len(fatal), inbox.num_running) == (["running"], 1, 0)
    assert probed_on == ["engine"]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ContextTooLong("too long"), "too long"),
        (ZeroDivisionError("secret detail"), "internal error"),
        (torch.OutOfMemoryError("CUDA out of memory."), ""),
        (torch.AcceleratorError("CUDA error: invalid configuration argument"), ""),
        (NonFiniteLogits("NaN"), ""),
    ],
    ids=str,
)
def test_an_error_of_one_request_is_told_to_it_alone(steps: Steps, failure: Exception, message: str) -> None:
    fatal: list[DeviceLost] = []
    steps.failure = failure
    steps.go.set()
    inbox = started(steps, on_fatal=fatal.append)
    failed, served = Events(), Events()
    inbox.submit(request("failed"), failed)
    assert failed.last.wait(30)
    (event,) = failed
    assert isinstance(event, ErrorEvent)
    assert message in event.error.message
    assert "secret" not in event.error.message
    steps.failure = None
    inbox.submit(request("served"), served)
    steps.wait_until(lambda: steps.ended == ["served"])
    assert inbox.stop(30)
    assert (served, fatal) == ([FinishEvent(0, "stop")], [])


def test_memory_is_given_back_once_when_no_request_has_come_for_a_while_and_none_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trimmed, may_end, came = threading.Semaphore(0), threading.Event(), threading.Event()

    def trim() -> None:
        trimmed.release()
        may_end.wait(60)

    monkeypatch.setattr(inbox_module, "_IDLE_S", 0.0)

    def serve(inbox: Inbox) -> None:
        inbox.on_idle = partial(aside.submit, trim)
        inbox.waiting()
        if inbox.wait():
            came.set()

    aside, inbox = ThreadPool(1, "aside").start(), Inbox(serve)
    inbox.start()
    assert trimmed.acquire(timeout=30)
    inbox.wake()
    assert came.wait(30)
    may_end.set()
    assert inbox.stop(30)
    aside.shutdown()
    assert not trimmed.acquire(blocking=False)


def test_a_wait_with_a_time_ends_without_news_until_all_is_over() -> None:
    has_waited = threading.Event()

    def serve(inbox: Inbox) -> None:
        inbox.waiting()
        while inbox.wait(0.0):
            has_waited.set()
            inbox.waiting()

    inbox = Inbox(serve)
    inbox.start()
    assert has_waited.wait(30)
    assert inbox.stop(30)


# What is seen of an engine.


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
    asked = driving.request(tokens(100), name="first"), driving.request(tokens(60, 1), name="second")
    first, second = seen_after(engine, 2, *asked)
    assert (first.id, first.state, first.ready_tokens, first.prompt_tokens) == ("first", "prefilling", 2 * BLOCK, 100)
    assert (second.id, second.state, second.ready_tokens, second.prompt_tokens) == ("second", "waiting", 0, 60)
    assert (str(first.scope), first.queue_s is None, second.queue_s) == ("full", False, None)
    assert first.ttft_s is None
    assert first.tokens_per_s is not None
    assert first.seconds_left is not None
    # The estimate counts down from the end of the last step.
    assert 0 <= first.seconds_left <= (100 - first.ready_tokens) / first.tokens_per_s
    assert (second.tokens_per_s, second.seconds_left) == (None, None)


def test_the_log_tells_how_far_a_long_prefill_is(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(running_request, "LOGGED_S", 0.0)
    with caplog.at_level("INFO", "diskprefix"):
        seen_after(engine, 1, driving.request(tokens(100, 3), name="long"))
        lines = [line for line in caplog.messages if "computes its prompt" in line]
    numbers = r"\[engine\] long computes its prompt: (\d+) of 100 tokens · \d+ tokens/s · \d+ s left"
    found = [re.fullmatch(numbers, line) for line in lines]
    assert [match and match[1] for match in found] == ["16", "32", "48", "64", "80", "96"]


def test_a_reply_is_seen_to_grow_with_what_was_restored_before_it(engine: Engine) -> None:
    seen_after(engine, 1, driving.request(tokens(48, 2)))
    [activity] = seen_after(engine, 3, driving.request(tokens(48, 2)))
    assert (activity.state, activity.restored_tokens, activity.ready_tokens) == ("decoding", 48, 48)
    assert activity.reply_tokens == 4
    assert activity.ttft_s is not None
    assert activity.tokens_per_s is not None
    assert activity.tokens_per_s > 0
    assert activity.elapsed_s >= activity.ttft_s


STEP, REST = "step", "rest"


@pytest.mark.parametrize(
    ("num_rows", "events", "has_stopped", "working_s"),
    [
        (1, [STEP, REST, 3600, 3600, 3600], [False] * 3, 0),
        (1, [STEP, 3600, STEP, 3600, STEP, 3600], [False] * 3, 3600),
        # At the first look it may have begun just now.
        (1, [STEP, 30, 30, 30], [False, True, True], 90),
        (1, [STEP, 30, 30, STEP, 30], [False, True, False], 30),
        (1000, [STEP, *[SLOWEST_ROW_S * 100] * 10, 1], [False] * 10 + [True], 1001),
    ],
    ids=["it waits", "it gets on", "a step does not end", "it ends", "a step of many rows"],
)
def test_an_engine_has_stopped_if_a_step_takes_too_long_for_its_rows(
    num_rows: int, events: list[str | float], has_stopped: list[bool], working_s: float
) -> None:
    """A number is a look at it after so many seconds."""
    now, found = [0.0], list[bool]()
    heartbeat = Heartbeat(clock=lambda: now[0])
    for event in events:
        if event == STEP:
            heartbeat.beat(num_rows)
        elif event == REST:
            heartbeat.rest()
        else:
            now[0] += float(event)
            found.append(heartbeat.has_stopped())
    assert (found, heartbeat.working_s) == (has_stopped, working_s)
