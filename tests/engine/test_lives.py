"""Random lives of an engine: whatever comes, leaves, fails and is restarted, each reply is the one computed alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.cache.tiers.loading import Loader
from diskprefix.engine.constrained_reply import ConstrainedReply
from diskprefix.engine.inbox import Inbox
from diskprefix.engine.loop import Loop
from diskprefix.engine.request import (
    ErrorEvent,
    Event,
    FinishEvent,
    GenerateRequest,
    SamplingParams,
    TextEvent,
)
from diskprefix.errors import CacheError
from diskprefix.kv.arena import bytes_for
from diskprefix.model.exact import runner
from diskprefix.nouns import SHARED, CacheOptions, Prompt, Tenant
from diskprefix.store.purge import PurgeFilter, purge
from tests.engine.driving import BIAS, WORDS, Client, forget_idle, load, memory_in_steps_of, tokens, write_model
from tests.examples import examples

CAPACITY = 256
"""Memory grows in small steps, so that much happens while there are few tokens."""
LONGEST = 700
TENANTS = (SHARED, SHARED, Tenant.of_key("somebody"))


@pytest.fixture(scope="module", params=["gemma3", "qwen3_next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    dtype = torch.float32 if request.param == "qwen3_next" else torch.bfloat16
    return write_model(tmp_path_factory.mktemp(request.param), request.param, dtype)


@pytest.fixture(autouse=True)
def small_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_in_steps_of(CAPACITY, monkeypatch)


@pytest.fixture(autouse=True)
def masks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits for what constraints allow, so that a life can be lived again."""
    monkeypatch.setattr(ConstrainedReply, "is_ready", True)


class AtOnce:
    """Fetches when it is asked to, so that a life can be lived again."""

    def submit(self, fetch: Callable[..., None], *args: Any) -> Future[None]:
        fetch(*args)
        return Future()

    def shutdown(self) -> None:
        pass


class Driven:
    """An engine that computes the steps that a test asks for."""

    def __init__(self, folder: Path, kv: Path, draft_model: str | None = None) -> None:
        self.engine = load(folder, kv, kv_cache_write_buffer=1 << 20, draft_model=draft_model)
        # So that a life can be lived again.
        self.engine.clock = lambda: 0.0
        self.inbox = Inbox(self.engine.serve)
        self.loop = Loop(self.engine, self.inbox)
        self.loop._fetcher.shutdown()
        self.loop._fetcher = AtOnce()  # type: ignore[assignment]

    def step(self) -> bool:
        """Returns whether there is more to do."""
        with torch.inference_mode():
            self.loop._take_in()
            if step := self.loop._next_step():
                self.loop._compute(step)
        return bool(step or self.inbox._has_news or self.inbox.num_running or self.inbox.waiting())

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.step():
                return
        raise AssertionError("it never ends")


@dataclass(frozen=True)
class Asked:
    """The values that determine a reply. Nothing else may show in it."""

    token_ids: tuple[int, ...]
    sampling: tuple[tuple[str, Any], ...]

    def request(self, cache: CacheOptions) -> GenerateRequest:
        sampling = dict(self.sampling)
        constraint = sampling.pop("constraint", None)
        return GenerateRequest(
            id="r",
            prompt=Prompt(np.array(self.token_ids, np.int32)),
            sampling=SamplingParams(logit_bias=BIAS, **sampling),
            cache=cache,
            constraint=constraint,
        )


Reply = list[tuple[tuple[int, ...], list[Any], str]]


def reply_of(events: list[Event], n: int) -> Reply:
    """By choice: the tokens, their logprobs and the text."""
    found: Reply = []
    for choice in range(n):
        texts = [event for event in events if isinstance(event, TextEvent) and event.choice == choice]
        assert sum(isinstance(event, FinishEvent) and event.choice == choice for event in events) == 1
        token_ids = tuple(token for event in texts for token in event.token_ids)
        found.append((token_ids, [event.logprobs for event in texts], "".join(event.text for event in texts)))
    return found


OFF = CacheOptions(scope=parse_scope("off", param="scope"), tenant=SHARED)


class Alone:
    """An engine without a cache and without guesses that computes one request after the other."""

    def __init__(self, folder: Path, kv: Path) -> None:
        self.driven = Driven(folder, kv)
        self.replies: dict[Asked, Reply] = {}

    def reply(self, asked: Asked) -> Reply:
        if asked not in self.replies:
            client = Client(self.driven.inbox, asked.request(OFF))
            self.driven.finish()
            assert client.done
            self.replies[asked] = reply_of(client.events, dict(asked.sampling)["n"])
        return self.replies[asked]


@pytest.fixture
def alone(folder: Path, tmp_path: Path) -> Iterator[Alone]:
    alone = Alone(folder, tmp_path / "alone")
    yield alone
    alone.driven.engine.close()


SAMPLING = st.sampled_from(
    [
        {"temperature": 0, "n": 1},
        {"temperature": 0, "n": 1, "logprobs": 3},
        {"temperature": 1.0, "seed": 5, "n": 3, "logprobs": 0},
        {"temperature": 0.7, "seed": 1, "n": 2, "frequency_penalty": 0.6, "presence_penalty": 0.2},
        {"temperature": 0, "n": 2, "repetition_penalty": 1.2},
        {"temperature": 1.0, "seed": 3, "n": 2, "constraint": WORDS},
    ]
)


def lives_of(folder: Path, kv: Path, alone: Alone, patch: pytest.MonkeyPatch) -> type[RuleBasedStateMachine]:
    run, load_pieces, count = runner.run, Loader.run, [0]

    class Lives(RuleBasedStateMachine):
        driven: Driven

        @initialize()
        def begin(self) -> None:
            count[0] += 1
            self.kv = kv / str(count[0])
            self.clients: list[tuple[Client, Asked]] = []
            self.ended: list[tuple[Client, Asked]] = []
            self.bad_steps = self.bad_fetches = 0
            self.is_excused = False
            patch.setattr(runner, "run", self._run)
            patch.setattr(Loader, "run", lambda loader, readers: self._load(loader, readers))
            self.open()

        def open(self) -> None:
            # A model is loaded without a fault.
            self.bad_steps = 0
            self.driven = Driven(folder, self.kv, "ngram")
            self.all_memory = self.driven.engine.pool.limit_bytes

        def _run(self, *args: Any) -> Any:
            if self.bad_steps:
                self.bad_steps -= 1
                # One sequence alone fails with its step.
                self.is_excused |= len(args[1]) == 1
                raise RuntimeError("a kernel failed")
            return run(*args)

        def _load(self, loader: Loader, readers: Any) -> Any:
            loaded = load_pieces(loader, readers)
            if self.bad_fetches:
                self.bad_fetches -= 1
                raise CacheError("the store failed in the middle")
            return loaded

        @rule(
            base=st.integers(0, 2),
            cut=st.integers(0, 520),
            tail=st.integers(0, 3),
            tail_tokens=st.sampled_from([1, 1, 20, 130]),
            max_tokens=st.sampled_from([1, 3, 12, 40]),
            sampling=SAMPLING,
            scope=st.sampled_from(["off", "full", "full", "auto", 2, 200]),
            tenant=st.sampled_from(TENANTS),
            save=st.booleans() | st.just(True),
            ttl_s=st.sampled_from([None, None, 0.001, 60.0]),
            times=st.sampled_from([1, 1, 2]),
        )
        def arrive(
            self,
            base: int,
            cut: int,
            tail: int,
            tail_tokens: int,
            max_tokens: int,
            sampling: dict[str, Any],
            times: int,
            scope: str | int,
            **options: Any,
        ) -> None:
            token_ids = [*tokens(cut, base), *tokens(tail_tokens, 10 + tail)]
            asked = Asked(tuple(map(int, token_ids)), (("max_tokens", max_tokens), *sampling.items()))
            cache = CacheOptions(scope=parse_scope(scope, param="scope"), **options)
            for _ in range(times):
                self.clients.append((Client(self.driven.inbox, asked.request(cache)), asked))

        @precondition(lambda self: self.ended)
        @rule(which=st.integers(0, 20), sampling=SAMPLING)
        def next_turn(self, which: int, sampling: dict[str, Any]) -> None:
            client, asked = self.ended[which % len(self.ended)]
            if len(asked.token_ids) + len(client.tokens) > LONGEST:
                return
            turn = (*asked.token_ids, *client.tokens, *map(int, tokens(17, which)))
            following = Asked(turn, (("max_tokens", 5), *sampling.items()))
            request = following.request(replace(client.ticket.request.cache, save=True))
            self.clients.append((Client(self.driven.inbox, request), following))

        @rule(count=st.sampled_from([1, 2, 3, 10, 30]))
        def steps(self, count: int) -> None:
            for _ in range(count):
                self.driven.step()

        @precondition(lambda self: self.clients)
        @rule(which=st.integers(0, 20))
        def cancel(self, which: int) -> None:
            self.clients[which % len(self.clients)][0].ticket.cancel()

        @rule(sequences=st.sampled_from([1, 1.5, 2, 3.5, None]))
        def bound_memory(self, sequences: float | None) -> None:
            """Room for so many of the longest prompts."""
            pool = self.driven.engine.pool
            self.finish()
            forget_idle(pool)
            pool._spare.clear()
            each = bytes_for(pool.layout, LONGEST + 60)
            pool.limit_bytes = self.all_memory if sequences is None else int(each * sequences)

        @rule()
        def finish(self) -> None:
            self.driven.finish()
            self.check_replies()

        @rule()
        def restart(self) -> None:
            self.driven.finish()
            self.check_replies()
            assert self.driven.engine.close()
            self.open()

        @rule()
        def stop_in_the_middle(self) -> None:
            for client, _ in self.clients:
                client.ticket.cancel()
            self.restart()

        @rule()
        def forget(self) -> None:
            """As purged, and as evicted."""
            cache = self.driven.engine.cache
            cache.settle()
            assert cache.writer.flush(30)
            purge(cache.store, PurgeFilter(), time.time(), lambda _: None)

        @rule()
        def a_step_fails(self) -> None:
            self.bad_steps += 1

        @rule()
        def a_fetch_fails(self) -> None:
            self.bad_fetches += 1

        @invariant()
        def memory_is_bounded_and_belongs_to_somebody(self) -> None:
            pool, loop = self.driven.engine.pool, self.driven.loop
            assert pool.used_bytes <= pool.limit_bytes
            replies = [reply for running in loop._active.requests for reply in running.replies]
            owned = [reply.allocation for reply in replies if reply.allocation is not None]
            busy = [allocation for allocation in pool.allocations if allocation.is_busy]
            assert sorted(map(id, owned)) == sorted(map(id, busy))
            assert pool.stats()["entries"] <= pool.max_idle
            assert all(
                allocation.num_computed == len(allocation.token_ids)
                for allocation in pool.allocations
                if not allocation.is_busy
            )

        def check_replies(self) -> None:
            loop, cache = self.driven.loop, self.driven.engine.cache
            assert [*loop._active.requests, *loop._active.preempted, *loop._scheduler.sequences] == []
            assert self.driven.inbox.num_running == 0
            assert self.driven.engine.pool.stats()["running"] == 0
            cache.settle()
            assert cache.writer.flush(30)
            assert not any(cache.store.evictor._pins.values())
            assert cache.writer.pending_bytes == 0
            for client, asked in self.clients:
                if client.ticket.cancelled:
                    continue
                if isinstance(client.events[-1], ErrorEvent):
                    assert self.is_excused, client.events[-1].error
                    continue
                found = reply_of(client.events, dict(asked.sampling)["n"])
                with patch.context() as unpatched:
                    unpatched.setattr(runner, "run", run)
                    assert found == alone.reply(asked)
            self.ended = self.clients or self.ended
            self.clients = []
            self.is_excused = False

        def teardown(self) -> None:
            if hasattr(self, "driven"):
                self.bad_steps = 0
                self.driven.finish()
                self.check_replies()
                self.driven.engine.close()

    return Lives


def test_every_reply_is_the_one_computed_alone(
    folder: Path, tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = lives_of(folder, tmp_path / "kv", alone, monkeypatch)
    run_machine(machine, settings=settings(max_examples=examples(2), stateful_step_count=20, deadline=None))
