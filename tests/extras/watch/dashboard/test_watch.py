"""How often those who watch read the daemon's state, and what they get while that is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from diskprefix.extras.watch.dashboard import dashboard_routes
from diskprefix.extras.watch.dashboard.watch import Watch
from diskprefix.settings import Settings


def daemon(status: str = "ok", **others: Any) -> Any:
    recent = SimpleNamespace(failures=[], since=lambda number: list(range(number, 2)))
    breaks = SimpleNamespace(as_list=lambda **_: [])
    fields = {"settings": Settings(), "serving": None, "status": status, "doing": "reading the weights"}
    return SimpleNamespace(**fields | {"num_arriving": 0, "recent": recent, "breaks": breaks} | others)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def test_what_it_does_is_told_while_it_loads() -> None:
    assert run(Watch(daemon("loading")).state())["message"] == "reading the weights"
    assert run(Watch(daemon("ok")).state())["message"] is None


class States:
    """States that are told one after the other; the last one stays. Then the daemon has stopped."""

    def __init__(self, stream: Iterator[tuple[dict[str, Any], list[dict[str, Any]]]], stopping: Any) -> None:
        self._stream, self._stopping = stream, stopping
        self._ended: list[dict[str, Any]] = []
        self.since: list[int] = []

    async def state(self) -> dict[str, Any]:
        assert self._stopping.status != "stopping", "it goes on when the daemon has stopped"
        now, self._ended = next(self._stream, ({}, []))
        if not now:
            self._stopping.status = "stopping"
        return now

    def ended(self, since: int) -> list[dict[str, Any]]:
        self.since.append(since)
        return self._ended


def told(monkeypatch: pytest.MonkeyPatch, *states: Any, silent_s: float = 1e9) -> tuple[list[bytes], list[int]]:
    monkeypatch.setattr(dashboard_routes, "UPDATE_S", 0.0)
    monkeypatch.setattr(dashboard_routes, "_SILENT_S", silent_s)
    running = daemon("ok")
    watched = States(iter(states), running)
    dashboard: Any = SimpleNamespace(watch=watched, daemon=running)

    async def read() -> list[bytes]:
        return [event async for event in dashboard_routes._events(dashboard)]

    return run(read()), watched.since


def test_an_event_comes_when_something_but_the_time_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    calm: list[Any] = [({"now": at, "status": "ok"}, []) for at in range(3)]
    events, _ = told(monkeypatch, *calm, ({"now": 3, "status": "degraded"}, []))
    assert [b'"degraded"' in event for event in events[:-1]] == [False, True]
    assert all(event.startswith(b"event: state\ndata: {") and event.endswith(b"}\n\n") for event in events)


def test_requests_that_ended_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    same = {"now": 0, "status": "ok"}
    events, since = told(monkeypatch, (same, [{"number": 7}, {"number": 8}]), (same, []), (same, [{"number": 9}]))
    assert since == [0, 8, 8, 9]
    assert len(events) == 3, "the last one is that of the end"


def test_silence_is_broken_by_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    calm: list[Any] = [({"now": at, "status": "ok"}, []) for at in range(3)]
    assert told(monkeypatch, *calm, silent_s=0.0)[0][1:3] == [b": keepalive\n\n"] * 2
    assert not any(event.startswith(b":") for event in told(monkeypatch, *calm)[0])
