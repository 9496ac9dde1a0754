"""Several requests at once: each gets the reply that it gets alone. And what is left in memory when one is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from diskprefix.cache.cache import PrefixCache
from diskprefix.cache.tiers.tier import Prefetched, PrefetchRequest
from diskprefix.engine.constrained_reply import forbidden_by
from diskprefix.engine.loop import Engine
from diskprefix.engine.request import DoneEvent
from diskprefix.errors import ContextTooLong
from diskprefix.kv.arena import bytes_for
from diskprefix.model.exact import latent, runner
from diskprefix.nouns import Tenant
from diskprefix.store.purge import PurgeFilter, purge
from diskprefix.tokens import as_token_ids
from tests.engine.driving import (
    WORDS,
    Client,
    after_steps,
    alone,
    load,
    recorded_requests,
    request,
    run_request,
    run_together,
    running,
    tokens,
    wait_until_idle,
    write_model,
)
from tests.waiting import wait_for


class Asked:
    """In the place of the shared tier: notes how many tokens are in memory when it is asked."""

    def __init__(self) -> None:
        self.have: list[int] = []

    def prefetch(self, wish: PrefetchRequest) -> Prefetched:
        self.have.append(wish.have)
        return Prefetched()

    def upload(self, _: object) -> None:
        """Nothing is shared."""


@pytest.fixture
def engine(folder: Path, tmp_path: Path) -> Iterator[Engine]:
    engine = load(folder, tmp_path / "kv")
    assert engine.cache.layout.exact_at == "token"
    yield engine
    engine.close()


CONSTRAINED: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 2, "constraint": WORDS}


@pytest.mark.parametrize("num_before", [0, 4], ids=["the first", "a later one"])
def test_a_mask_that_is_not_ready_delays_nobody_else(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    held_request = request(tokens(80, 6), **CONSTRAINED)
    wanted = alone(engine, held_request)
    go_on, computed = threading.Event(), list[None]()

    def slow(matcher: LLMatcher, vocab_size: int) -> torch.Tensor:
        computed.append(None)
        assert len(computed) <= num_before or go_on.wait(120)
        return forbidden_by(matcher, vocab_size)

    monkeypatch.setattr("diskprefix.engine.constrained_reply.forbidden_by", slow)
    with running(engine) as inbox:
        held = Client(inbox, held_request)
        wait_for(lambda: len(computed) > num_before)
        free = Client(inbox, request(tokens(60, 2)))
        wait_for(lambda: free.events and isinstance(free.events[-1], DoneEvent))
        assert not any(isinstance(event, DoneEvent) for event in held.events)
        go_on.set()
    assert held.done
    assert [held.tokens_of(choice) for choice in range(3)] == [wanted.tokens_of(choice) for choice in range(3)]


def test_a_reply_whose_mask_never_comes_can_be_cancelled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, computed = threading.Event(), list[None]()

    def stuck(*_: object) -> torch.Tensor:
        computed.append(None)
        assert go_on.wait(120)
        raise AssertionError("nobody waits for it")

    monkeypatch.setattr("diskprefix.engine.constrained_reply.forbidden_by", stuck)
    with running(engine) as inbox:
        held = Client(inbox, request(tokens(80, 6), **CONSTRAINED))
        wait_for(lambda: computed)
        held.ticket.cancel()
        inbox.wake()
        wait_until_idle(inbox)
    go_on.set()
    assert not any(isinstance(event, DoneEvent) for event in held.events)


def test_models_with_recurrent_layers_share_steps(tmp_path: Path) -> None:
    model = write_model(tmp_path / "hybrid", "qwen3_next", torch.float32)
    engine = load(model, tmp_path / "kv")
    assert engine.packs
    requests = [request(tokens(100 + 90 * i, i), n=1 + i % 2, max_tokens=8) for i in range(4)]
    clients = run_together(engine, requests)
    for one, client in zip(requests, clients, strict=True):
        expected = alone(engine, one)
        assert [client.tokens_of(choice) for choice in (0, 1)] == [expected.tokens_of(choice) for choice in (0, 1)]
    engine.close()
    engine = load(model, tmp_path / "kv")
    whole = [(one.prompt.token_ids, as_token_ids(client.tokens)) for one, client in zip(requests, clients, strict=True)]
    turns = [request(np.concatenate([*known, tokens(9 * (i + 1), 9 + i)])) for i, known in enumerate(whole)]
    for one, turn, client in zip(requests, turns, run_together(engine, turns), strict=True):
        # Each from the checkpoint at the end of its own reply, whose last token was not computed.
        assert client.done.cache.restored == len(one.prompt.token_ids) + 7
        assert client.tokens == alone(engine, turn).tokens
    engine.close()


@pytest.mark.parametrize(("name", "exact_at"), [("mpt", "grid"), ("minicpm3", "token")])
def test_models_that_cannot_be_packed_take_turns(
    name: str, exact_at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers' own latent attention, which computes with the memory of one sequence.
    monkeypatch.setattr(latent, "expansion_of", lambda _: None)
    engine = load(write_model(tmp_path / name, name, torch.float32), tmp_path / "kv")
    assert not engine.packs
    assert engine.cache.layout.exact_at == exact_at
    requests = [request(tokens(100 + 90 * i, i), n=1 + i % 2, max_tokens=8) for i in range(4)]
    for one, client in zip(requests, run_together(engine, requests), strict=True):
        expected = alone(engine, one)
        assert [client.tokens_of(choice) for choice in (0, 1)] == [expected.tokens_of(choice) for choice in (0, 1)]
    assert "failed" not in caplog.text
    engine.close()


def test_a_caller_with_many_requests_leaves_every_second_place_to_the_other(folder: Path, tmp_path: Path) -> None:
    engine = load(folder, tmp_path / "kv", max_sequences=2, record=tmp_path / "trace.jsonl")
    many, one = Tenant.of_key("many"), Tenant.of_key("one")
    callers = [many, many, many, one]
    run_together(engine, [request(tokens(80 + i, i), tenant=caller) for i, caller in enumerate(callers)])
    engine.close()
    ended = [one.prompt_tokens for one in recorded_requests(tmp_path / "trace.jsonl")]
    assert (sorted(ended[:2]), ended[2:]) == ([80, 83], [81, 82])


def test_a_caller_who_runs_nothing_does_not_wait_for_the_many_replies_of_another(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(folder, tmp_path / "kv", max_sequences=2, record=tmp_path / "trace.jsonl")
    many = request(tokens(80), tenant=Tenant.of_key("many"), n=6, max_tokens=60)
    one = request(tokens(83, 1), tenant=Tenant.of_key("one"), max_tokens=2)
    with running(engine) as inbox:
        inbox.submit(many, lambda _: None)
        after_steps(monkeypatch, 3, lambda: inbox.submit(one, lambda _: None))
        wait_until_idle(inbox)
    engine.close()
    assert [ended.prompt_tokens for ended in recorded_requests(tmp_path / "trace.jsonl")] == [83, 80]


# What stays in memory.


def test_the_next_turn_goes_on_from_memory_without_a_copy(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    monkeypatch.setattr(engine.cache, "remote", asked)
    (first,) = run_together(engine, [request(tokens(300))])
    turn = np.concatenate([tokens(300), np.array(first.tokens, np.int32), tokens(20, 1)])
    (second,) = run_together(engine, [request(turn)])
    assert second.done.usage.cached_tokens == 300 + len(first.tokens) - 1
    assert second.done.cache.source == "memory"
    assert asked.have == [0, second.done.usage.cached_tokens], "the shared tier is told what memory has"
    assert second.tokens == alone(engine, request(turn)).tokens
    assert engine.pool.stats()["entries"] == 1


def test_an_exact_repeat_computes_nothing_of_the_prompt(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = run_together(engine, [request(tokens(300))])
    sizes = step_sizes(monkeypatch)
    (again,) = run_together(engine, [request(tokens(300))])
    assert again.tokens == first.tokens
    assert set(sizes) == {1}


def step_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    run, sizes = runner.run, list[int]()

    def noted(model: Any, step: Any) -> Any:
        sizes.append(sum(rows.token_ids.shape[1] for rows in step))
        return run(model, step)

    monkeypatch.setattr(runner, "run", noted)
    return sizes


def test_another_conversation_with_the_same_beginning_copies_it(engine: Engine) -> None:
    base = tokens(200)
    one, other = (np.concatenate([base, tokens(1000, seed)]) for seed in (1, 2))
    run_together(engine, [request(one)])
    (client,) = run_together(engine, [request(other)])
    assert (client.done.usage.cached_tokens, client.done.cache.source) == (200, "memory")
    assert client.tokens == alone(engine, request(other)).tokens
    (again,) = run_together(engine, [request(one)])
    assert again.done.usage.cached_tokens == len(one)


@pytest.mark.parametrize(
    "options", [{"scope": "off"}, {"save": False}, {"tenant": Tenant.of_key("somebody")}], ids=["off", "read", "tenant"]
)
def test_what_is_nobody_elses_is_not_found_in_memory(engine: Engine, options: dict[str, Any]) -> None:
    run_together(engine, [request(tokens(300), **options)])
    (client,) = run_together(engine, [request(tokens(300), save=False)])
    assert client.done.usage.cached_tokens == 0


def test_what_was_purged_is_forgotten_in_memory_too(engine: Engine) -> None:
    run_together(engine, [request(tokens(300))])
    engine.cache.settle()
    assert engine.cache.writer.flush(30)
    purge(engine.cache.store, PurgeFilter(), time.time(), lambda _: None)
    # The writer looks for purges of other processes every second.
    wait_for(lambda: engine.cache.namespaces.purged_at is not None)
    (client,) = run_together(engine, [request(tokens(300))])
    assert client.done.usage.cached_tokens == 0


def test_memory_forgets_what_was_to_be_kept_for_a_time_only(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    one = request(tokens(300))
    run_together(engine, [replace(one, cache=replace(one.cache, ttl_s=60))])
    # What waits to be written is in memory, too.
    engine.cache.settle()
    assert engine.cache.writer.flush(30)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    (client,) = run_together(engine, [one])
    assert client.done.cache.source == "disk"


def test_an_engine_without_work_forgets_what_was_to_be_kept_for_a_time_only(engine: Engine) -> None:
    one = request(tokens(300))
    with running(engine) as inbox:
        inbox.submit(replace(one, cache=replace(one.cache, ttl_s=0.5)), lambda _: None)
        wait_until_idle(inbox)
        wait_for(lambda: not engine.pool.idle)


@pytest.mark.parametrize(("ttl_s", "saved"), [(None, [78]), (60, [])])
def test_what_has_expired_is_not_saved(
    ttl_s: float | None, saved: Sequence[int], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        PrefixCache, "hibernate", lambda _cache, _arena, token_ids, _options: asked.append(len(token_ids))
    )
    engine = load(folder, tmp_path / "kv")
    one = request(tokens(67, 1))
    run_request(engine, replace(one, cache=replace(one.cache, ttl_s=ttl_s)))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    engine.hibernate()
    engine.close()
    assert asked == saved


def test_no_more_is_kept_than_was_asked_for(folder: Path, tmp_path: Path) -> None:
    engine = load(folder, tmp_path / "kv", kv_memory_entries=2)
    for seed in range(4):
        run_together(engine, [request(tokens(300, seed))])
    assert engine.pool.stats()["entries"] == 2
    sources = [run_together(engine, [request(tokens(300, seed))])[0].done.cache.source for seed in (3, 0)]
    assert sources == ["memory", "disk"]
    engine.close()


def test_identical_requests_compute_the_prompt_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = step_sizes(monkeypatch)
    clients = run_together(engine, [request(tokens(900)) for _ in range(3)])
    assert sum(sizes) < 900 + 3 * 20
    assert clients[0].tokens == clients[1].tokens == clients[2].tokens
    assert [client.done.usage.cached_tokens for client in clients] == [0, 900, 900]


def test_a_request_that_is_sent_again_goes_on_where_the_first_was_cancelled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = step_sizes(monkeypatch)
    expected = alone(engine, request(tokens(1500))).tokens
    sizes.clear()
    for _ in range(5):
        with running(engine) as inbox, pytest.MonkeyPatch.context() as patch:
            client = Client(inbox, request(tokens(1500)))
            after_steps(patch, 1, client.ticket.cancel)
            wait_until_idle(inbox)
    (last,) = run_together(engine, [request(tokens(1500))])
    assert last.tokens == expected
    assert sum(sizes) <= 1500 + 12


# Memory.


def test_a_request_waits_for_memory_and_one_that_never_fits_is_refused(folder: Path, tmp_path: Path) -> None:
    engine = load(folder, tmp_path / "kv", kv_memory=1 << 20)
    room = engine.pool.limit_bytes // bytes_for(engine.cache.layout, 1000)
    requests = [request(tokens(1000, seed)) for seed in range(room + 3)]
    used: list[int] = []
    run = runner.run

    def noted(*given: Any) -> Any:
        used.append(engine.pool.used_bytes)
        return run(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", noted)
        clients = run_together(engine, requests)
    assert max(used) <= engine.pool.limit_bytes
    for one, client in zip(requests, clients, strict=True):
        assert client.tokens == alone(engine, one).tokens
    engine.pool.limit_bytes = bytes_for(engine.cache.layout, 1000)
    (refused,) = run_together(engine, [request(tokens(2000))])
    with pytest.raises(ContextTooLong, match="--kv-memory allows"):
        refused.done  # noqa: B018
    engine.close()
