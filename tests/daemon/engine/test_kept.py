"""What a reply finds on the disk, and leaves there: the first token of an exact repeat is sent before the prompt's
state is loaded, and stays right if that fails; the reply of the first choice is kept with its prompt if it ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from diskprefix.daemon.engine.inbox import Inbox
from diskprefix.daemon.engine.loop import Engine
from diskprefix.daemon.engine.request import DoneEvent, Event, FinishEvent, GenerateRequest, ProgressEvent, TextEvent
from diskprefix.daemon.engine.sampler import Sampler
from diskprefix.errors import InvalidRequest, StoreCorrupt, StoreUnavailable
from diskprefix.prefixstore.cache.tiers.loading import Loader
from diskprefix.prefixstore.cache.tiers.nodes import Node
from diskprefix.prefixstore.cache.tiers.tier import Write
from diskprefix.prefixstore.store.codec.codec import Piece
from diskprefix.prefixstore.store.schema import decode_node
from diskprefix.prefixstore.store.verify import verify_index
from diskprefix.tokens import TokenIds
from diskprefix.values import CacheReport
from tests.daemon.engine.driving import (
    Cancelled,
    Client,
    done,
    load,
    request,
    run_request,
    tokens,
    tokens_of,
    wait_until_idle,
)

BLOCK = 16
PATIENCE_S = 60.0


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Engine:
    """Nothing is restored from memory."""
    return load(folder, tmp_path / "kv", block_size=BLOCK, kv_memory_keeps=False)


def settle(engine: Engine) -> None:
    engine.cache.finish_aside()
    assert engine.cache.writer.flush(PATIENCE_S)


# The first token.

REPEATED = tokens(6 * BLOCK + 5, 7)
SEVERAL: dict[str, Any] = {"temperature": 1.0, "seed": 4, "n": 3}


def asked(**params: Any) -> GenerateRequest:
    few: dict[str, Any] = {"max_tokens": 6}
    return request(REPEATED, **(few | params))


def said(events: list[Event]) -> list[str]:
    """By choice, because the choices of a restored prompt are computed in other steps."""
    return sorted(repr(event) for event in events if not isinstance(event, DoneEvent | ProgressEvent))


def stored(engine: Engine, one: GenerateRequest) -> list[str]:
    """Returns what a cold run says, of which nothing stays but what is on the disk."""
    cold = said(run_request(engine, one))
    settle(engine)
    return cold


_load = Loader._load
Load = Callable[[Loader, Node, Piece, Write], None]


class Watched(Client):
    """A client of whose prompt nothing but logits is loaded before its first text has come. `load` then loads it, or
    fails."""

    def __init__(self, engine: Engine, one: GenerateRequest, patch: pytest.MonkeyPatch, load: Load) -> None:
        self.events = []
        came_first: list[bool] = []
        has_text = threading.Event()

        def loaded(loader: Loader, node: Node, piece: Piece, write: Write) -> None:
            if piece.group == loader.nodes.layout.logits_group:
                _load(loader, node, piece, write)
                return
            came_first.append(has_text.wait(PATIENCE_S))
            load(loader, node, piece, write)

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
        assert came_first
        assert all(came_first)


def damaged(position: int) -> Load:
    def load(loader: Loader, node: Node, piece: Piece, write: Write) -> None:
        if node.position == position:
            raise StoreCorrupt("its checksum is wrong")
        _load(loader, node, piece, write)

    return load


def unavailable(*_: Any) -> None:
    raise StoreUnavailable("the disk is gone")


@pytest.mark.parametrize(
    ("load", "params"),
    [
        (_load, {}),
        (_load, {"max_tokens": 1}),
        (_load, SEVERAL),
        (damaged(0), {}),
        (damaged(3 * BLOCK), SEVERAL),
        (damaged(6 * BLOCK), {"max_tokens": 1}),
        (unavailable, SEVERAL),
    ],
)
def test_the_first_token_comes_before_the_state_is_loaded_and_the_reply_is_right_if_that_fails(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, load: Load, params: dict[str, Any]
) -> None:
    cold = stored(engine, asked(**params))
    warm = Watched(engine, asked(**params), monkeypatch, load)
    assert said(warm.events) == cold
    assert (warm.done.usage.cached_tokens == len(REPEATED)) == (load is _load)
    assert warm.done.usage.completion_tokens == sum(isinstance(event, TextEvent) for event in warm.events)
    times = warm.done.timings
    parts_ms = times.queue_ms + times.lookup_ms + times.restore_ms + times.prefill_ms + times.others_ms
    assert load is not _load or parts_ms == pytest.approx(times.ttft_ms)
    # What was computed again is kept again.
    assert stored(engine, asked(**params)) == cold


def test_a_first_token_that_cannot_be_sampled_fails_the_request_when_its_memory_is_free(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = stored(engine, asked())
    refusing = threading.Event()

    def sample(*_: Any) -> int:
        refusing.set()
        raise InvalidRequest("no token has a score")

    def load(loader: Loader, node: Node, piece: Piece, write: Write) -> None:
        assert refusing.wait(PATIENCE_S)
        assert engine.pages.running
        _load(loader, node, piece, write)

    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "sample", sample)
        patch.setattr(Loader, "_load", load)
        with pytest.raises(InvalidRequest, match="no token has a score"):
            run_request(engine, asked())
    assert not engine.pages.running
    assert said(run_request(engine, asked())) == cold


def test_progress_is_told_before_the_first_token(engine: Engine) -> None:
    cold = stored(engine, asked())
    warm = run_request(engine, replace(asked(), reports_progress=True))
    assert isinstance(warm[0], ProgressEvent)
    assert warm[0].processed == len(REPEATED)
    assert said(warm) == cold


# The reply.

PROMPT = 3 * BLOCK + 4


def run(engine: Engine, token_ids: TokenIds, *, steps: int | None = None, **options: Any) -> list[Event]:
    defaults: dict[str, Any] = {"temperature": 1.0, "seed": 1, "max_tokens": 40, "logit_bias": {0: -100.0, 2: -100.0}}
    return run_request(engine, request(token_ids, **(defaults | options)), steps=steps)


def report_of(events: list[Event]) -> CacheReport:
    return done(events).cache


def next_turn(token_ids: TokenIds, reply: list[int]) -> TokenIds:
    return np.concatenate([token_ids, np.array([*reply, *range(3, 20)], dtype=np.int32)])


def reply_ends(engine: Engine) -> list[int]:
    """Returns the ends of the stored nodes that reach into replies. Asserts that the store is sound."""
    settle(engine)
    assert not verify_index(engine.cache.store).problems
    with engine.cache.store.snapshot() as snapshot:
        nodes = [decode_node(name, value) for name, value in snapshot.records("nodes")]
    return sorted(node.end for node in nodes if node.end > PROMPT)


WHOLE = [4 * BLOCK, 5 * BLOCK, PROMPT + 39]


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("scope", "ends"),
    [
        *((scope, WHOLE) for scope in ("full", "auto:8", "500")),
        (str(PROMPT + 20), [4 * BLOCK, PROMPT + 20]),
        *((scope, []) for scope in ("off", str(PROMPT), str(2 * BLOCK))),
    ],
)
def test_a_reply_is_kept_as_far_as_the_scope_says_and_the_next_turn_goes_on_there(
    engine: Engine, scope: str, ends: list[int]
) -> None:
    token_ids = tokens(PROMPT, 1)
    first = run(engine, token_ids, scope=scope)
    assert len(tokens_of(first)) == 40
    assert reply_ends(engine) == ends
    if ends:
        whole = next_turn(token_ids, tokens_of(first))
        second = run(engine, whole, scope=scope)
        assert (report_of(second).restored, report_of(second).source) == (ends[-1], "disk")
        assert tokens_of(second) == tokens_of(run(engine, whole, scope="off"))


def test_of_several_choices_the_first_is_kept_and_the_others_are_what_they_would_be_alone(engine: Engine) -> None:
    token_ids = tokens(PROMPT, 3)
    together = run(engine, token_ids, n=3)
    assert [e.choice for e in together if isinstance(e, FinishEvent)] == [0, 1, 2]
    assert reply_ends(engine) == WHOLE
    for choice in range(3):
        alone = run(engine, token_ids, scope="off", seed=1 + choice)
        assert tokens_of(together, choice) == tokens_of(alone)
    shared = [np.argmin(np.equal(tokens_of(together), tokens_of(together, choice))) for choice in (1, 2)]
    restored = [
        report_of(run(engine, next_turn(token_ids, tokens_of(together, choice)), scope="64")).restored
        for choice in range(3)
    ]
    assert restored == [PROMPT + 39, PROMPT + shared[0], PROMPT + shared[1]]


@pytest.mark.parametrize("steps", [2, 35])
def test_a_reply_that_is_cancelled_is_not_kept(engine: Engine, steps: int) -> None:
    """One step of prefill, then one for each token: the prompt is saved by then, and a block complete."""
    with pytest.raises(Cancelled):
        run(engine, tokens(PROMPT, 4), steps=steps)
    assert reply_ends(engine) == []
    assert engine.cache.stats()["pending_bytes"] == 0
    assert report_of(run(engine, tokens(PROMPT, 4))).restored == PROMPT


def test_a_reply_that_ends_by_itself_or_by_a_stop_string_is_kept_as_far_as_it_was_run(engine: Engine) -> None:
    token_ids = tokens(PROMPT, 5)
    reply = tokens_of(run(engine, token_ids, scope="off"))
    end = reply.index(next(token for token in reply[20:] if token not in reply[:20]))
    stop = engine.tokenizer.decode(reply[end : end + 1])
    stopped = tokens_of(run(engine, token_ids, stop=(stop,)))
    last = PROMPT + len(stopped) - 1
    kept = sorted({*range(4 * BLOCK, last, BLOCK), last})
    assert reply_ends(engine) == kept
    assert tokens_of(run(engine, tokens(PROMPT, 6), logit_bias={2: 100.0})) == [2]
    assert reply_ends(engine) == kept
