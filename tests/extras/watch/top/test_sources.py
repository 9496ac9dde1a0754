"""Which model of a daemon with several is watched."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from diskprefix.errors import DiskPrefixError, StoreUnavailable
from diskprefix.extras import daemon_call
from diskprefix.extras.daemon_call import Answer
from diskprefix.extras.watch.top import sources
from diskprefix.extras.watch.top.sources import DaemonSource, chosen_source


class SmallFront:
    """The answers of a daemon with several models. `loaded` has those in memory, and `asked` the paths that it got."""

    def __init__(self, *loaded: str) -> None:
        self.loaded = loaded
        self.asked: list[str] = []

    def __call__(self, _method: str, path: str, _body: object) -> Answer:
        self.asked.append(path)
        places = [{"model": name, "phase": "ready"} for name in self.loaded]
        known = {"data": [{"id": "ash"}, {"id": "birch"}]}
        found: dict[str, Any] = {"/props": {"models": places}, "/v1/models": known}.get(path, {"status": "ok"})
        return Answer(200, json.dumps(found).encode())


def test_of_several_models_the_same_one_is_watched_while_it_is_loaded() -> None:
    front = SmallFront("a/b", "birch")
    source = DaemonSource(front, "here")
    found = source.state(0)
    assert found is not None
    assert [place["model"] for place in found["models"]] == ["a/b", "birch"]
    front.loaded = ("birch", "a/b")
    source.state(7)
    source.entries()
    assert [path for path in front.asked if path != "/props"] == [
        "/dashboard/state?since=0&model=a%2Fb",
        "/dashboard/state?since=7&model=a%2Fb",
        "/dashboard/entries?model=a%2Fb",
    ]
    front.loaded = ("birch",)
    with pytest.raises(DiskPrefixError, match="a/b is unloaded"):
        source.state(7)
    source.state(0)
    assert front.asked[-1] == "/dashboard/state?since=0&model=birch"


@pytest.mark.parametrize(
    ("model", "said"),
    [(None, "no model is loaded; a request loads one of ash, birch"), ("ash", "ash is not loaded; birch is ready")],
)
def test_without_a_loaded_model_there_is_nothing_to_watch(model: str | None, said: str) -> None:
    with pytest.raises(DiskPrefixError, match=said):
        DaemonSource(SmallFront(*(["birch"] if model else [])), "here", model).state(0)


def test_a_port_that_says_nothing_is_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_call, "_CONNECT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StoreUnavailable, match="timed out"):
        chosen_source(f"http://127.0.0.1:{silent.getsockname()[1]}", None, tmp_path)


def test_a_daemon_with_nothing_loaded_is_watched_all_the_same_and_nothing_is_asked_of_a_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    front = SmallFront()
    monkeypatch.setattr(sources, "running_daemon", lambda *_: front)
    source = sources.chosen_source("here", None, tmp_path)
    for ask in (source.entries, lambda: source.delete("00"), lambda: source.state(0)):
        with pytest.raises(DiskPrefixError, match="no model is loaded"):
            ask()
    assert not [path for path in front.asked if path.startswith("/dashboard")]
    front.loaded = ("birch",)
    source.state(0)
    front.loaded = ()
    with pytest.raises(DiskPrefixError, match="no model is loaded"):
        source.state(0)
    with pytest.raises(DiskPrefixError, match="no model is loaded"):
        source.entries()
