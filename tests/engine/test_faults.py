"""A request that fails leaves the other requests and the memory as if it had never come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.cache.cache import PrefixCache
from diskprefix.cache.cached_request import CachedRequest
from diskprefix.engine import forward as engine_forward
from diskprefix.engine.detokenize import TextStream
from diskprefix.engine.inbox import Inbox
from diskprefix.engine.loop import Engine, Loop
from diskprefix.engine.request import ErrorEvent
from diskprefix.engine.sampler import Sampler
from diskprefix.engine.served_model import ServedModel
from diskprefix.errors import ContextTooLong, DeviceLost, DiskPrefixError, NotReady
from diskprefix.kv.arena import KVArena, bytes_for
from diskprefix.kv.pool import KVPool
from diskprefix.model.exact import runner
from tests.engine.driving import (
    Client,
    after_steps,
    alone,
    forget_idle,
    load,
    request,
    run_together,
    running,
    tokens,
    wait_until_idle,
    write_model,
)
from tests.model import tiny


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = load(folder, tmp_path / "kv")
    yield engine
    assert engine.pool.stats()["running"] == 0
    engine.close()


def replies(client: Client, n: int = 1) -> list[list[int]]:
    assert client.done
    return [client.tokens_of(choice) for choice in range(n)]


def limit_memory(engine: Engine, *num_tokens: int) -> None:
    """Room for sequences of so many tokens."""
    forget_idle(engine.pool)
    engine.pool._spare.clear()
    engine.pool.limit_bytes = sum(bytes_for(engine.cache.layout, count) for count in num_tokens)


# The memory tier.


def test_a_client_that_leaves_while_its_prompt_is_fetched_leaves_what_was_in_memory(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_together(engine, [request(tokens(300), save=True)])
    fetch = CachedRequest.fetch
    with running(engine) as inbox, monkeypatch.context() as patch:
        clients: list[Client] = []

        def leaving(*args: Any, **kwargs: Any) -> None:
            fetch(*args, **kwargs)
            clients[0].ticket.cancel()

        patch.setattr(CachedRequest, "fetch", leaving)
        with inbox._changed:
            clients.append(Client(inbox, request(np.concatenate([tokens(300), tokens(50, 1)]))))
        wait_until_idle(inbox)
    monkeypatch.setattr(CachedRequest, "_restoration", None)
    stats = engine.pool.stats()
    assert (stats["entries"], stats["entry_tokens"]) == (1, 300)


# Memory that does not suffice.


def test_a_reply_that_is_alone_grows_though_there_is_no_room_for_two_of_it(engine: Engine) -> None:
    one = request(tokens(1000), max_tokens=60, n=2)
    expected = replies(alone(engine, one), 2)
    limit_memory(engine, 2048)
    (client,) = run_together(engine, [one])
    assert replies(client, 2) == expected


@pytest.fixture
def tight(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[Engine]:
    """KV memory has room for 3 072 of 4 096 tokens."""
    caplog.set_level("INFO")
    sizes = {"max_position_embeddings": 4096, "num_hidden_layers": 5}
    folder = tiny.write_folder(tmp_path / "model", dtype=torch.bfloat16, **sizes)
    engine = load(folder, tmp_path / "kv", kv_memory=1 << 20)
    yield engine
    engine.close()


def test_the_context_is_as_long_as_kv_memory_has_room_for(tight: Engine, caplog: pytest.LogCaptureFixture) -> None:
    assert (tight.max_positions, tight.model_positions) == (3072, 4096)
    told = [record.getMessage() for record in caplog.get_records("setup")]
    assert "[engine] the context is 3072 of 4096 tokens, the room in KV memory (1.0 MiB, see --kv-memory)" in told
    (whole,) = run_together(tight, [request(tokens(3062), max_tokens=None)])
    assert (len(whole.tokens), tight.figures.preemptions) == (10, 0)
    (refused,) = run_together(tight, [request(tokens(3072))])
    with pytest.raises(ContextTooLong, match="3072 tokens, of 3072, the room in KV memory "):
        refused.done  # noqa: B018


def test_a_reply_that_cannot_grow_is_computed_again_once(tight: Engine) -> None:
    one = request(tokens(1000), max_tokens=1060)
    (client,) = run_together(tight, [one])
    assert tight.figures.preemptions == 1, "then it has memory for all of its reply"
    tight.pool.limit_bytes *= 10
    assert client.tokens == alone(tight, one).tokens


def test_a_reply_that_outgrows_all_memory_fails_and_others_are_served(engine: Engine) -> None:
    limit_memory(engine, 1024)
    long, short = run_together(engine, [request(tokens(1000), max_tokens=60), request(tokens(100))])
    with pytest.raises(DiskPrefixError, match="--kv-memory"):
        long.done  # noqa: B018
    assert short.done


def test_choices_of_which_one_loses_the_prompts_memory_are_all_the_same(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """The first has ended, the second has its memory, the third waits for it, and an older request takes it away."""
    old, many = request(tokens(990, 1), max_tokens=100), request(tokens(1000, 2), max_tokens=20, n=3)
    expected = replies(alone(engine, old)), replies(alone(engine, many), 3)
    limit_memory(engine, 1024, 1024)
    caplog.set_level("INFO")
    clients = run_together(engine, [old, many])
    assert (replies(clients[0]), replies(clients[1], 3)) == expected
    assert "others need its memory" in caplog.text


def test_no_more_sequences_run_than_allowed_whatever_n_is(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folder, tmp_path / "kv", max_sequences=3)
    one = request(tokens(100), n=8)
    expected = replies(alone(engine, one), 8)
    most, step = [0], Loop._compute

    def counted(self: Loop, chunks: Any) -> None:
        most[0] = max(most[0], len(self._scheduler.sequences))
        step(self, chunks)

    monkeypatch.setattr(Loop, "_compute", counted)
    for client in run_together(engine, [one, one]):
        assert replies(client, 8) == expected
    assert most[0] <= 3
    engine.close()


# Errors.

PLACES: list[tuple[type, str]] = [
    (PrefixCache, "begin"),
    (CachedRequest, "fetch"),
    (CachedRequest, "choose"),
    (CachedRequest, "after_step"),
    (CachedRequest, "publish"),
    (CachedRequest, "publish_reply"),
    (CachedRequest, "close"),
    (ServedModel, "record"),
    (TextStream, "event"),
    (Sampler, "__init__"),
    (Sampler, "sample"),
    (Sampler, "logprobs"),
    (KVPool, "fork"),
    (KVArena, "mark"),
]


def fail_for(patch: pytest.MonkeyPatch, owner: type, name: str, is_bad: Callable[..., bool]) -> None:
    real = getattr(owner, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if is_bad(*args):
            raise ZeroDivisionError("a bug")
        return real(*args, **kwargs)

    patch.setattr(owner, name, failing)


def of_the_bad_one() -> Callable[..., bool]:
    """Returns a function that tells whether the arguments of a call belong to the request of 333 tokens."""

    def is_bad(*args: Any) -> bool:
        for given in args:
            prompt = getattr(given, "prompt", None) or getattr(getattr(given, "request", None), "prompt", None) or given
            length = len(getattr(prompt, "token_ids", prompt if isinstance(prompt, np.ndarray) else ()))
            arena = getattr(given, "arena", given)
            if length == 333 or (isinstance(arena, KVArena) and arena.num_tokens == 333):
                return True
        return False

    return is_bad


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=[f"{owner.__name__}.{name}" for owner, name in PLACES])
def test_an_error_anywhere_fails_one_request(
    owner: type, name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [request(tokens(100 + seed, seed), n=2) for seed in range(2)]
    expected = [replies(alone(engine, one), 2) for one in good]
    bad = request(tokens(333, 9), n=3)
    is_bad = of_the_bad_one()
    if name in ("sample", "logprobs"):
        bad_samplers: list[int] = []
        init = Sampler.__init__

        def noted(self: Sampler, params: Any, prompt: Any, *others: Any) -> None:
            init(self, params, prompt, *others)
            if len(prompt) == 333:
                bad_samplers.append(id(self))

        monkeypatch.setattr(Sampler, "__init__", noted)
        is_bad = lambda sampler, *_: id(sampler) in bad_samplers  # noqa: E731
    elif name == "event":
        samples = [0]

        def is_bad(*_: Any) -> bool:
            samples[0] += 1
            return samples[0] == 1

    with monkeypatch.context() as patch:
        fail_for(patch, owner, name, is_bad)
        clients = run_together(engine, [bad, *good])
    errors = [client.events[-1] for client in clients if isinstance(client.events[-1], ErrorEvent)]
    assert len(errors) == 1
    assert "internal error" in errors[0].error.message
    assert [sum(isinstance(event, ErrorEvent) for event in client.events) for client in clients].count(1) == 1
    if name != "event":
        assert [replies(client, 2) for client in clients[1:]] == expected
    assert engine.pool.stats()["running"] == 0
    (after,) = run_together(engine, [good[0]])
    assert replies(after, 2) == expected[0]


@pytest.mark.parametrize("where", ["forward", "draw"])
def test_a_sequence_that_fails_in_a_step_of_several_with_states_fails_alone(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(write_model(tmp_path / "model", "mamba2", torch.float32), tmp_path / "kv")
    assert engine.packs
    places = {"forward": (runner, "run"), "draw": (engine_forward, "draw")}
    init = Sampler.__init__

    def noted(self: Sampler, params: Any, prompt: Any, *others: Any) -> None:
        init(self, params, prompt, *others)
        bad.extend([self] * (len(prompt) == 333))

    good = [request(tokens(100 + seed, seed), n=2) for seed in range(2)]
    expected = [replies(alone(engine, one), 2) for one in good]
    forget_idle(engine.pool)
    compute, shared, bad = getattr(*places[where]), list[int](), list[Sampler]()

    def failing(*args: Any) -> Any:
        """Fails when the states are new already."""
        found = compute(*args)
        if where == "forward":
            lengths = [rows.state.num_tokens for rows in args[1]]
        else:
            lengths = [333 * (ask.sampler in bad) for ask in args[0]]
        if max(lengths) >= 333:
            shared.append(len(lengths))
            raise ZeroDivisionError("a bug")
        return found

    monkeypatch.setattr(Sampler, "__init__", noted)
    monkeypatch.setattr(*places[where], failing)
    clients = run_together(engine, [*good, request(tokens(333, 9))])
    assert isinstance(clients[2].events[-1], ErrorEvent)
    assert max(shared) > 1
    assert [replies(client, 2) for client in clients[:2]] == expected
    assert engine.pool.stats()["running"] == 0
    engine.close()


def test_a_client_that_cannot_be_told_anything_harms_nobody(engine: Engine) -> None:
    one = request(tokens(100))
    expected = alone(engine, one).tokens

    def deaf(_: object) -> None:
        raise RuntimeError("Event loop is closed")

    inbox = Inbox(engine.serve)
    for seed in range(3):
        inbox.submit(request(tokens(200, seed)), deaf)
    inbox.submit(request(np.empty(0, np.int32)), deaf)
    client = Client(inbox, one)
    inbox.start()
    wait_until_idle(inbox)
    inbox.stop(0)
    assert client.tokens == expected


def test_leaving_that_fails_harms_nobody(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = request(tokens(100))
    expected = alone(engine, one).tokens
    fail_for(monkeypatch, CachedRequest, "leave", lambda *_: True)
    with running(engine) as inbox:
        with inbox._changed:
            gone, client = Client(inbox, request(tokens(1500, 1))), Client(inbox, one)
        after_steps(monkeypatch, 1, gone.ticket.cancel)
        wait_until_idle(inbox)
    assert client.tokens == expected


def test_an_error_of_no_request_ends_the_engine_and_tells_everybody(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "_take_in", lambda _: 1 // 0)
    fatal: list[DeviceLost] = []
    inbox = Inbox(engine.serve, fatal.append)
    client = Client(inbox, request(tokens(10)))
    inbox.start()
    assert inbox.stop(30)
    (event,) = client.events
    assert isinstance(event, ErrorEvent)
    assert isinstance(event.error, NotReady)
    assert "failed unexpectedly" in fatal[0].message


@pytest.mark.parametrize("name", ["fetch", "choose", "after_step", "publish", "publish_reply"])
def test_a_lost_device_ends_all_requests_in_any_state(
    name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> None:
        raise DeviceLost("it is gone")

    requests = [request(tokens(100 + 300 * seed, seed), n=2) for seed in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(CachedRequest, name, lost)
        fatal: list[DeviceLost] = []
        inbox = Inbox(engine.serve, fatal.append)
        clients = [Client(inbox, one) for one in requests]
        inbox.start()
        inbox._thread.join(60)
    assert not inbox._thread.is_alive()
    assert len(fatal) == 1
    for client in clients:
        assert isinstance(client.events[-1], ErrorEvent)
    engine.pool.allocations.clear()


@pytest.mark.parametrize("steps", range(1, 12, 2))
def test_the_engine_stops_in_any_state(steps: int, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [request(tokens(100 + 200 * seed, seed), n=1 + seed % 3, max_tokens=50) for seed in range(4)]
    inbox = Inbox(engine.serve)
    clients = [Client(inbox, one) for one in [*requests, requests[-1]]]
    refuse = inbox._refuse_all

    def stop() -> None:
        with inbox._changed:
            refuse()
            for ticket in inbox._running:
                ticket.cancel()

    after_steps(monkeypatch, steps, stop)
    inbox.start()
    inbox._thread.join(60)
    assert not inbox._thread.is_alive()
    assert inbox.num_running == inbox.queue_depth == 0
    assert engine.pool.stats()["running"] == 0
    assert len(clients) == 5


# Requests that wait for another one's prompt.


@pytest.mark.parametrize("how", ["cancelled", "fails", "preempted"])
def test_requests_that_wait_for_a_prompt_compute_it_if_it_is_not_computed(
    how: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = request(tokens(1500))
    expected = alone(engine, one).tokens
    forget_idle(engine.pool)
    bad = replace(one, sampling=replace(one.sampling, logit_bias={1: float("inf")}))
    with running(engine) as inbox:
        with inbox._changed:
            leader = Client(inbox, bad if how == "fails" else one)
            clients = [Client(inbox, one) for _ in range(3)]
        if how == "cancelled":
            after_steps(monkeypatch, 2, leader.ticket.cancel)
        if how == "preempted":
            loops: list[Loop] = []
            take_in = Loop._take_in

            def noted(loop: Loop) -> None:
                loops.append(loop)
                take_in(loop)

            monkeypatch.setattr(Loop, "_take_in", noted)
            after_steps(monkeypatch, 2, lambda: loops[0]._active.preempt(loops[0]._active.requests[0].replies[0]))
        wait_until_idle(inbox)
    assert [client.tokens for client in clients] == [expected] * 3
