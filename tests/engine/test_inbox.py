"""Requests that wait, run, are cancelled and fail, with an engine of which the test decides when a request ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.engine import inbox as inbox_module
from diskprefix.engine.inbox import Inbox
from diskprefix.engine.request import ErrorEvent, Event, FinishEvent, GenerateRequest, SamplingParams
from diskprefix.errors import ContextTooLong, DeviceLost, NonFiniteLogits, NotReady, QueueFull
from diskprefix.nouns import SHARED, CacheOptions, Prompt, Tenant
from tests.engine.driving import Cancelled, serve_one_at_a_time


def request(name: str, tenant: Tenant = SHARED, media_bytes: int = 0) -> GenerateRequest:
    media = {"pixel_values": np.zeros(media_bytes, np.uint8)} if media_bytes else {}
    prompt = Prompt(np.zeros(1, dtype=np.int32), media=media)
    cache = CacheOptions(scope=parse_scope("off", param="scope"), tenant=tenant)
    return GenerateRequest(id=name, prompt=prompt, sampling=SamplingParams(), cache=cache)


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
    monkeypatch.setattr("diskprefix.engine.inbox.MAX_QUEUED_MEDIA_BYTES", 100)
    inbox = started(steps)
    inbox.submit(request("running", media_bytes=60), Events())
    steps.wait_until(lambda: bool(steps.started))
    waiting = inbox.submit(request("waiting", media_bytes=40), Events())
    inbox.submit(request("text"), Events())
    with pytest.raises(QueueFull, match="the images and sounds of waiting requests take") as refused:
        inbox.submit(request("more", media_bytes=1), Events())
    assert refused.value.retry_after_s >= 1
    waiting.cancel()
    inbox.submit(request("in its place", media_bytes=40), Events())
    steps.go.set()
    steps.wait_until(lambda: steps.ended == ["running", "text", "in its place"])
    inbox.stop(30)


def test_the_images_of_a_request_that_is_over_are_let_go_of(steps: Steps) -> None:
    """Its ticket lives on until its client has read all of the answer."""
    inbox = started(steps)
    tickets = [inbox.submit(request(name, media_bytes=60), Events()) for name in "ab"]
    tickets[1].cancel()
    steps.go.set()
    steps.wait_until(lambda: steps.ended == ["a"])
    inbox.submit(request("c"), Events())
    steps.wait_until(lambda: steps.ended == ["a", "c"])
    inbox.stop(30)
    assert not tickets[0].request.prompt.media


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


def test_a_lost_device_fails_all_requests_and_is_reported_once(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    probed_on: list[str] = []

    def probe() -> None:
        probed_on.append(threading.current_thread().name)
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr("diskprefix.engine.device.probe_devices", probe)
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
    monkeypatch.setattr(inbox_module, "trim_heap", trim)

    def serve(inbox: Inbox) -> None:
        inbox.waiting()
        if inbox.wait():
            came.set()

    inbox = Inbox(serve)
    inbox.start()
    assert trimmed.acquire(timeout=30)
    inbox.wake()
    assert came.wait(30)
    may_end.set()
    assert inbox.stop(30)
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
