"""The first token of an exact repeat is sent before the prompt's state is loaded, and stays right if that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diskprefix.cache.tiers.loading import Loader
from diskprefix.cache.tiers.nodes import Node
from diskprefix.cache.tiers.tier import Write
from diskprefix.engine.inbox import Inbox
from diskprefix.engine.loop import Engine
from diskprefix.engine.request import DoneEvent, Event, FinishEvent, GenerateRequest, ProgressEvent, TextEvent
from diskprefix.engine.sampler import Sampler
from diskprefix.errors import InvalidRequest, StoreCorrupt, StoreUnavailable
from diskprefix.store.pieces import Cut
from tests.engine.driving import Client, forget_idle, load, request, run_request, tokens, wait_until_idle

BLOCK = 16
PROMPT = tokens(6 * BLOCK + 5, 7)
PATIENCE_S = 60.0


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = load(folder, tmp_path / "kv", block_size=BLOCK)
    yield engine
    engine.close()


def asked(**params: Any) -> GenerateRequest:
    few: dict[str, Any] = {"max_tokens": 6}
    return request(PROMPT, **(few | params))


def said(events: list[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, DoneEvent | ProgressEvent)]


def stored(engine: Engine, one: GenerateRequest) -> list[Event]:
    """Returns what a cold run says, of which nothing stays but what is on the disk."""
    cold = run_request(engine, one)
    assert engine.cache.capturer.settle(timeout_s=PATIENCE_S)
    assert engine.cache.writer.flush(PATIENCE_S)
    forget_idle(engine.pool)
    return cold


_load = Loader._load
Load = Callable[[Loader, Node, Cut, Write], None]


class Watched(Client):
    """A client of whose prompt nothing but logits is loaded before its first text has come. `load` then loads it, or
    fails."""

    def __init__(self, engine: Engine, one: GenerateRequest, patch: pytest.MonkeyPatch, load: Load = _load) -> None:
        self.events = []
        self.came_first: list[bool] = []
        has_text = threading.Event()

        def loaded(loader: Loader, node: Node, cut: Cut, write: Write) -> None:
            if cut.group == loader.nodes.layout.logits_group:
                _load(loader, node, cut, write)
                return
            self.came_first.append(has_text.wait(PATIENCE_S))
            load(loader, node, cut, write)

        def emit(event: Event) -> None:
            self.events.append(event)
            if isinstance(event, TextEvent):
                has_text.set()

        with patch.context() as patched:
            patched.setattr(Loader, "_load", loaded)
            inbox = Inbox(engine.serve)
            self.ticket = inbox.submit(one, emit)
            inbox.start()
            wait_until_idle(inbox)
        inbox.stop(0)


@pytest.mark.parametrize(
    "params", [{}, {"max_tokens": 1}, {"temperature": 1.0, "seed": 3}, {"n": 3, "temperature": 1.0, "seed": 4}]
)
def test_the_first_token_comes_before_the_state_is_loaded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    cold = stored(engine, asked(**params))
    warm = Watched(engine, asked(**params), monkeypatch)
    assert warm.came_first
    assert all(warm.came_first)
    assert sorted(map(repr, said(warm.events))) == sorted(map(repr, said(cold)))
    assert warm.done.usage.cached_tokens == len(PROMPT)
    assert warm.done.usage.completion_tokens == sum(isinstance(event, TextEvent) for event in warm.events)


def damaged(position: int) -> Load:
    def load(loader: Loader, node: Node, cut: Cut, write: Write) -> None:
        if node.position == position:
            raise StoreCorrupt("its checksum is wrong")
        _load(loader, node, cut, write)

    return load


def unavailable(*_: Any) -> None:
    raise StoreUnavailable("the disk is gone")


@pytest.mark.parametrize(
    ("load", "params"),
    [
        (damaged(0), {}),
        (damaged(3 * BLOCK), {"temperature": 1.0, "seed": 5, "n": 2}),
        (damaged(6 * BLOCK), {"max_tokens": 1}),
        (unavailable, {}),
        (unavailable, {"temperature": 1.0, "seed": 5, "n": 2}),
    ],
)
def test_a_reply_whose_first_token_was_sent_goes_on_right_when_its_state_cannot_be_loaded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, load: Load, params: dict[str, Any]
) -> None:
    cold = stored(engine, asked(**params))
    warm = Watched(engine, asked(**params), monkeypatch, load)
    assert warm.came_first
    assert all(warm.came_first)
    assert sorted(map(repr, said(warm.events))) == sorted(map(repr, said(cold)))
    assert warm.done.usage.cached_tokens < len(PROMPT)
    assert warm.done.usage.completion_tokens == sum(isinstance(event, TextEvent) for event in warm.events)
    # What was computed again is kept again.
    again = stored(engine, asked(**params))
    assert sorted(map(repr, said(again))) == sorted(map(repr, said(cold)))


def test_a_first_token_that_cannot_be_sampled_fails_the_request_when_its_memory_is_free(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = stored(engine, asked())
    refusing = threading.Event()

    def sample(*_: Any) -> int:
        refusing.set()
        raise InvalidRequest("no token has a score")

    def load(loader: Loader, node: Node, cut: Cut, write: Write) -> None:
        assert refusing.wait(PATIENCE_S)
        assert all(allocation.is_busy for allocation in engine.pool.allocations)
        _load(loader, node, cut, write)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample", sample)
        patch.setattr(Loader, "_load", load)
        with pytest.raises(InvalidRequest, match="no token has a score"):
            run_request(engine, asked())
    assert not any(allocation.is_busy for allocation in engine.pool.allocations)
    assert said(run_request(engine, asked())) == said(cold)


def test_progress_is_told_before_the_first_token(engine: Engine) -> None:
    cold = stored(engine, asked())
    warm = run_request(engine, replace(asked(), reports_progress=True))
    assert isinstance(warm[0], ProgressEvent)
    assert warm[0].processed == len(PROMPT)
    assert said(warm) == said(cold)
    assert isinstance(said(warm)[-1], FinishEvent)
