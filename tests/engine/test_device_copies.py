"""The engine of a device: what it restores over streams is what it computed, and its thread waits for no copy.

The device is one in main memory whose copies are made as late as possible (`tests.kv.late_streams`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from diskprefix.engine.inbox import Inbox
from diskprefix.engine.loop import Engine, Loop
from diskprefix.errors import NonFiniteLogits
from diskprefix.kv.copies import StreamCopies
from diskprefix.tokens import TokenIds
from tests.engine.driving import (
    Client,
    alone,
    forget_idle,
    load,
    request,
    run_together,
    tokens,
    tokens_of,
    wait_until_idle,
    write_model,
)
from tests.kv.late_streams import LateStreams, install

BLOCK = 16
PROMPTS = [tokens(6 * BLOCK + 5, 1), tokens(4 * BLOCK, 2), tokens(9 * BLOCK + 1, 3)]
PATIENCE_S = 60.0


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> LateStreams:
    streams = LateStreams()
    install(monkeypatch, streams)
    monkeypatch.setattr("diskprefix.cache.restoration.COPY_BYTES", 1 << 10)
    return streams


@pytest.fixture(params=["llama", "gemma3", "mamba2"])
def engine(request: pytest.FixtureRequest, streams: LateStreams, tmp_path: Path) -> Iterator[Engine]:
    engine = load(write_model(tmp_path / "model", request.param), tmp_path / "kv", block_size=BLOCK)
    streams.blocked.clear()
    yield engine
    engine.close()


def continued(prompt: TokenIds) -> TokenIds:
    return np.concatenate([prompt, tokens(21, 9)])


def stored(engine: Engine) -> None:
    """Leaves nothing but what is on the disk."""
    assert engine.cache.capturer.settle(timeout_s=PATIENCE_S)
    assert engine.cache.writer.flush(PATIENCE_S)
    forget_idle(engine.pool)


def test_requests_that_come_together_are_restored_over_streams_and_the_engine_waits_for_no_copy(
    engine: Engine, streams: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[str] = set()
    run = Loop.run

    def named(self: Loop) -> None:
        threads.add(threading.current_thread().name)
        run(self)

    monkeypatch.setattr(Loop, "run", named)
    cold = [client.tokens for client in run_together(engine, map(request, PROMPTS))]
    stored(engine)
    again = run_together(engine, map(request, PROMPTS))
    assert [client.tokens for client in again] == cold
    assert [client.done.usage.cached_tokens for client in again] == [len(prompt) for prompt in PROMPTS]
    stored(engine)
    longer = [continued(prompt) for prompt in PROMPTS]
    further = run_together(engine, map(request, longer))
    assert all(client.done.usage.cached_tokens for client in further)
    assert [client.tokens for client in further] == [alone(engine, request(one)).tokens for one in longer]
    assert streams.counts["loads"] > 0
    assert streams.counts["waits"] > 0
    assert threads
    assert not threads & set(streams.blocked)


def test_several_replies_begin_with_copies_of_what_is_still_on_its_way(engine: Engine) -> None:
    asked = request(PROMPTS[0], n=3, temperature=1.0, seed=4)
    (cold,) = run_together(engine, [asked])
    stored(engine)
    (again,) = run_together(engine, [asked])
    assert again.done.usage.cached_tokens == len(PROMPTS[0])
    assert [again.tokens_of(choice) for choice in range(3)] == [cold.tokens_of(choice) for choice in range(3)]


@pytest.mark.parametrize("engine", ["llama"], indirect=True)
def test_without_the_waits_it_computes_with_what_is_not_there(
    engine: Engine, streams: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_together(engine, [request(PROMPTS[0])])
    stored(engine)
    monkeypatch.setattr(streams, "wait", lambda _: None)
    with pytest.raises(NonFiniteLogits):
        assert run_together(engine, [request(continued(PROMPTS[0]))])[0].done


def test_a_cancelled_restore_leaves_memory_that_others_may_use(
    streams: LateStreams, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(write_model(tmp_path / "model", "llama"), tmp_path / "kv", block_size=BLOCK)
    expected = [client.tokens for client in run_together(engine, map(request, PROMPTS))]
    stored(engine)
    fill = StreamCopies.fill

    inbox = Inbox(engine.serve, 8)
    first = Client(inbox, request(continued(PROMPTS[2])))

    def cancelled(self: StreamCopies, *args: object) -> None:
        fill(self, *args)  # type: ignore[arg-type]
        first.ticket.cancel()

    with monkeypatch.context() as patch:
        patch.setattr(StreamCopies, "fill", cancelled)
        inbox.start()
        wait_until_idle(inbox)
    inbox.stop(0)
    assert not tokens_of(first.events)
    forget_idle(engine.pool)
    other = tokens(len(PROMPTS[2]), 5)
    assert run_together(engine, [request(other)])[0].tokens == alone(engine, request(other)).tokens
    assert [client.tokens for client in run_together(engine, map(request, PROMPTS))] == expected
    assert streams.counts["loads"]
    engine.close()
