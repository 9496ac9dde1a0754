"""Which model of a daemon with several is watched."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diskprefix.errors import DiskPrefixError
from diskprefix.extras.daemon_call import Answer
from diskprefix.extras.watch.top.live import Source


class SmallFront:
    """The answers of a daemon with several models. `loaded` has those in memory, and `asked` the paths that it got."""

    def __init__(self, *loaded: str) -> None:
        self.loaded = loaded
        self.asked: list[str] = []

    def __call__(self, _method: str, path: str, _body: object) -> Answer:
        self.asked.append(path)
        places = [{"model": name, "phase": "ready"} for name in self.loaded]
        found: dict[str, Any] = {"models": places} if path == "/props" else {"status": "ok"}
        return Answer(200, json.dumps(found).encode())


def test_of_several_models_the_same_one_is_watched_while_it_is_loaded() -> None:
    front = SmallFront("a/b", "birch")
    source = Source(front, "here")
    assert [place["model"] for place in source.state(0)["models"]] == ["a/b", "birch"]
    front.loaded = ("birch", "a/b")
    source.state(7)
    assert [path for path in front.asked if path != "/props"] == [
        "/dashboard/state?since=0&model=a%2Fb",
        "/dashboard/state?since=7&model=a%2Fb",
    ]
    front.loaded = ("birch",)
    with pytest.raises(DiskPrefixError, match="a/b is unloaded"):
        source.state(7)
    source.state(0)
    assert front.asked[-1] == "/dashboard/state?since=0&model=birch"


@pytest.mark.parametrize(
    ("model", "said"),
    [(None, "the model is not loaded; a request loads one"), ("ash", "ash is not loaded; birch is ready")],
)
def test_without_a_loaded_model_nothing_is_asked_of_one(model: str | None, said: str) -> None:
    front = SmallFront(*(["birch"] if model else []))
    source = Source(front, "here", model)
    with pytest.raises(DiskPrefixError, match=said):
        source.state(0)
    assert front.asked == ["/props"]
    front.loaded = (model or "birch",)
    assert source.state(0)["status"] == "ok"
