"""Random lives of an engine: whatever comes, leaves, fails and is restarted, each reply is the one computed alone."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from diskprefix.daemon.engine import running_request
from diskprefix.daemon.engine.constraints.constrained_reply import ConstrainedReply
from diskprefix.daemon.engine.inbox import Inbox
from diskprefix.daemon.engine.loop import Loop
from diskprefix.daemon.engine.request import (
    Constraint,
    ErrorEvent,
    Event,
    FinishEvent,
    GenerateRequest,
    SamplingParams,
    TextEvent,
)
from diskprefix.daemon.engine.speculation.choose_drafts import Speculation
from diskprefix.daemon.engine.speculation.step_times import StepTimes
from diskprefix.errors import CacheError
from diskprefix.prefixstore.cache.tiers.loading import Loader
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.runtime.contract import Rows
from diskprefix.scope import parse_scope
from diskprefix.tokens import TokenIds
from diskprefix.values import SHARED, CacheOptions, Prompt, Tenant
from tests.daemon.engine.driving import (
    BIAS,
    WORDS,
    Client,
    ScriptedProposer,
    bound_memory,
    load,
    patch_steps,
    request,
    said,
    tokens,
    tokens_of,
    write_model,
)
from tests.examples import examples
from tests.faults.seeds import seeds_of
from tests.prefixstore.kv.hashed_state import ids_of

LONGEST = 700
MAX_SEQUENCES = 3
SOMEBODY = Tenant.of_key("somebody")
FEW_WORDS = Constraint(kind="lark", source="start: /([a-z]{3} ){2}/")


@pytest.fixture(scope="module", params=["gemma3", "mamba2", "mpt"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with windows, and with states alone; and one that is exact on the grid only, which cannot be packed."""
    dtype = torch.bfloat16 if request.param == "gemma3" else torch.float32
    return write_model(tmp_path_factory.mktemp(request.param), request.param, dtype)


@pytest.fixture(autouse=True)
def masks_that_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A life can be lived again: not the time decides. Replies wait, some with guesses that they have not looked at."""
    chance = random.Random(1)
    monkeypatch.setattr(ConstrainedReply, "is_ready", property(lambda _: chance.random() < 0.8))


class AtOnce:
    """Fetches when it is asked to, so that a life can be lived again."""

    def submit(self, fetch: Callable[..., None], *args: Any) -> Future[None]:
        fetch(*args)
        return Future()

    def shutdown(self, **_: bool) -> None:
        pass


class Driven:
    """An engine that computes the steps that a test asks for."""

    def __init__(self, folder: Path, kv: Path, speculative: str = "off") -> None:
        limits: dict[str, Any] = {"kv_cache_write_buffer": 1 << 20, "max_sequences": MAX_SEQUENCES}
        self.engine = load(folder, kv, speculative=speculative, **limits)
        # So that a life can be lived again.
        self.engine.clock = lambda: 0.0
        self.inbox = Inbox(self.engine.serve)
        self.loop = Loop(self.engine, self.inbox)
        self.loop._fetches._pools = dict.fromkeys(self.loop._fetches._pools, AtOnce())  # type: ignore[arg-type]

    def step(self) -> bool:
        """Returns whether there is more to do."""
        self.loop._take_in()
        if step := self.loop._next_step():
            self.loop._compute_step(step)
        return bool(step or self.inbox._has_news or self.inbox.num_running or self.inbox.waiting())

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.step():
                return
        raise AssertionError("it never ends")


@dataclass(frozen=True)
class Asked:
    """The values that determine a reply. Nothing else may show in it. Log probabilities show the last bits."""

    token_ids: tuple[int, ...]
    sampling: tuple[tuple[str, Any], ...]

    def request(self, cache: CacheOptions) -> GenerateRequest:
        sampling: dict[str, Any] = {"logprobs": 0} | dict(self.sampling)
        constraint, bias = sampling.pop("constraint", None), {2: sampling.pop("end_bias", BIAS[2])}
        return GenerateRequest(
            id="r",
            prompt=Prompt(np.array(self.token_ids, np.int32)),
            sampling=SamplingParams(logit_bias=bias, **sampling),
            cache=cache,
            constraint=constraint,
        )


@dataclass(frozen=True)
class Choice:
    token_ids: list[int]
    logprobs: list[Any]
    text: str
    end: FinishEvent


Reply = list[Choice]


def reply_of(events: list[Event], n: int) -> Reply:
    found: Reply = []
    for choice in range(n):
        texts = [event for event in events if isinstance(event, TextEvent) and event.choice == choice]
        (end,) = [event for event in events if isinstance(event, FinishEvent) and event.choice == choice]
        text = "".join(event.text for event in texts)
        found.append(Choice(tokens_of(texts, choice), [event.logprobs for event in texts], text, end))
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

    def replies_to(self, token_ids: TokenIds) -> list[list[int]]:
        prompt = tuple(map(int, token_ids))
        known = [reply for asked, reply in self.replies.items() if asked.token_ids == prompt]
        return [choice.token_ids for reply in known for choice in reply]


@pytest.fixture(scope="module")
def alone(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alone]:
    alone = Alone(folder, tmp_path_factory.mktemp("alone"))
    yield alone
    alone.driven.engine.close()


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0, "n": 1, "logprobs": None},
    {"temperature": 0, "n": 1, "logprobs": 3},
    {"temperature": 1.0, "seed": 5, "n": 3},
    {"temperature": 0.7, "seed": 1, "n": 2, "frequency_penalty": 0.6, "presence_penalty": 0.2},
    {"temperature": 0, "n": 2, "repetition_penalty": 1.2},
    {"temperature": 1.0, "seed": 3, "n": 2, "constraint": WORDS},
    {"temperature": 1.0, "seed": 3, "n": 2, "constraint": FEW_WORDS},
    # Any token of these ends it.
    {"temperature": 1.0, "seed": 4, "n": 2, "stop": ("a", "e", "1", " ")},
    {"temperature": 1.0, "seed": 2, "n": 2, "end_bias": 4.0},
]


class Life:
    """An engine, and what happens to it. `chance` decides."""

    def __init__(self, chance: random.Random, folder: Path, kv: Path, alone: Alone, patch: pytest.MonkeyPatch) -> None:
        self.chance, self.folder, self.kv, self.alone = chance, folder, kv, alone
        self.clients: list[tuple[Client, Asked]] = []
        self.ended: list[tuple[Client, Asked]] = []
        self.fault_rate = 0.0
        """The share of the computations of several sequences that fail."""
        self.bad_fetches, self.is_excused = 0, False
        load_pieces = Loader.run

        def loaded(loader: Loader, readers: Any) -> Any:
            found = load_pieces(loader, readers)
            if self.bad_fetches:
                self.bad_fetches -= 1
                raise CacheError("the store failed in the middle")
            return found

        patch_steps(patch, self._compute)
        patch.setattr(Loader, "run", loaded)
        self._open()

    def _open(self) -> None:
        self.driven = Driven(self.folder, self.kv, "ngram")
        engine = self.driven.engine
        self.all_memory = engine.pages.pool.limit_bytes
        if engine.speculation.proposers:
            engine.speculation = Speculation(ScriptedProposer(self.alone.replies_to), [], StepTimes(), engine.clock)

    def _compute(self, compute: Callable[..., Any], step: list[Any]) -> Any:
        is_alone = len(step) == 1
        if self.chance.random() >= self.fault_rate * (0.1 if is_alone else 1):
            return compute(step)
        # One sequence alone fails with its step.
        self.is_excused |= is_alone
        if self.chance.random() < 0.5:
            compute(step)
        raise RuntimeError("a kernel failed")

    def _submit(self, asked: Asked, cache: CacheOptions) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "fault_rate", 0.0)
            self.alone.reply(asked)
        self.clients.append((Client(self.driven.inbox, asked.request(cache)), asked))

    def happen(self) -> None:
        """Has something happen, and after it several steps."""
        events: list[Callable[[], None]] = [
            *[self.some_arrive] * 3,
            *[self.next_turns] * 2,
            *[self.cancel] * 2,
            *[self.bound_memory] * 2,
            self.finish,
            self.restart,
            self.stop_in_the_middle,
            self.forget,
            self.a_fetch_fails,
        ]
        event = self.chance.choice(events)
        print(event.__name__)
        event()
        self.fault_rate = self.chance.choice([0.0, 0.0, 0.1])
        for _ in range(self.chance.choice([0, 1, 2, 3, 10, 30])):
            self.driven.step()
            self.check_memory()

    def some_arrive(self) -> None:
        """Prompts that share their beginnings, and leave each other anywhere."""
        choice = self.chance.choice
        for _ in range(choice([1, 2, 4, 6])):
            # A reply to most of them needs one step of memory more than its prompt.
            cut = choice([480, 480, 400, self.chance.randrange(520)])
            token_ids = [*tokens(cut, choice([0, 1])), *tokens(choice([1, 1, 20, 130]), choice([10, 11, 12]))]
            sampling = {"max_tokens": choice([1, 3, 12, 40])} | choice(SAMPLING)
            cache = CacheOptions(
                scope=parse_scope(choice(["off", "full", "full", "auto", 2, 200]), param="scope"),
                tenant=choice([SHARED, SHARED, SOMEBODY]),
                save=choice([True, True, False]),
                ttl_s=choice([None, None, 0.001, 60.0]),
            )
            for _ in range(choice([1, 1, 2])):
                self._submit(Asked(tuple(map(int, token_ids)), tuple(sampling.items())), cache)

    def next_turns(self) -> None:
        for client, asked in self.ended[:2]:
            if len(asked.token_ids) + len(client.tokens) <= LONGEST:
                more = tokens(17, self.chance.randrange(20))
                turn = (*asked.token_ids, *client.tokens, *map(int, more))
                sampling = {"max_tokens": 5} | self.chance.choice(SAMPLING)
                cache = replace(client.ticket.request.cache, save=True)
                self._submit(Asked(turn, tuple(sampling.items())), cache)

    def cancel(self) -> None:
        if self.clients:
            self.chance.choice(self.clients)[0].ticket.cancel()

    def bound_memory(self) -> None:
        """Room for so many of the longest prompts."""
        pages, sequences = self.driven.engine.pages, self.chance.choice([1, 1, 1.5, 1.5, 2, 3.5, None])
        self.finish()
        each = pages.pool.sequence_bytes(LONGEST + 60)
        bound_memory(pages, self.all_memory if sequences is None else int(each * sequences))

    def finish(self) -> None:
        self.driven.finish()
        self.check_replies()

    def restart(self) -> None:
        self.finish()
        if self.chance.random() < 0.5:
            self.driven.engine.save_idle()
        # A model is loaded without a fault.
        self.fault_rate = 0.0
        assert self.driven.engine.close()
        self._open()

    def stop_in_the_middle(self) -> None:
        for client, _ in self.clients:
            client.ticket.cancel()
        self.restart()

    def forget(self) -> None:
        """As purged, or as evicted: some of what nothing continues, which are checkpoints, tails and last blocks."""
        cache = self.driven.engine.cache
        cache.finish_aside()
        assert cache.writer.flush(30)
        if self.chance.random() < 0.3:
            purge(cache.store, PurgeFilter(), time.time(), lambda _: None)
            return
        with cache.store.changes() as changes:
            for _ in range(self.chance.randint(1, 6)):
                table = changes.usages()
                leaves = np.flatnonzero(table.records["children"] == 0)
                if len(leaves):
                    name = table.names[self.chance.choice(leaves.tolist())]
                    changes.delete_node(name, changes.parent(name))

    def a_fetch_fails(self) -> None:
        self.bad_fetches += 1

    def check_memory(self) -> None:
        """It is bounded and belongs to somebody."""
        engine, pages, loop = self.driven.engine, self.driven.engine.pages, self.driven.loop
        assert pages.pool.used_bytes <= pages.pool.limit_bytes
        assert pages.check() == []
        running = loop._active.requests
        owned = [reply.state for one in running for reply in one.replies if reply.state is not None]
        assert set(owned) == pages.running.keys()
        # Each of the two callers may have one reply whatever the other has, and what lost its memory gets it back.
        assert engine.figures.preemptions or len(owned) <= MAX_SEQUENCES + 1

    def check_replies(self) -> None:
        loop, cache = self.driven.loop, self.driven.engine.cache
        assert [*loop._active.requests, *loop._active.waiting, *loop._scheduler.sequences] == []
        assert self.driven.inbox.num_running == 0
        assert not self.driven.engine.pages.running
        cache.finish_aside()
        assert cache.writer.flush(30)
        assert not any(cache.store.evictor._pins.values())
        assert cache.writer.pending_bytes == 0
        assert not self.driven.engine.pages.pool.holds
        for client, asked in self.clients:
            if client.ticket.cancelled:
                continue
            if isinstance(client.events[-1], ErrorEvent):
                assert self.is_excused, client.events[-1].error
                continue
            assert reply_of(client.events, dict(asked.sampling)["n"]) == self.alone.replies[asked]
        self.ended = [(client, asked) for client, asked in self.clients if not client.ticket.cancelled] or self.ended
        self.clients, self.is_excused = [], False


@pytest.mark.cases(1)
@pytest.mark.parametrize("number", range(examples(4)))
def test_every_reply_is_the_one_computed_alone(
    number: int, folder: Path, tmp_path: Path, alone: Alone, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = seeds_of("lives", number + 1)[number]
    print(f"life {seed}")
    life = Life(random.Random(seed), folder, tmp_path / "kv", alone, monkeypatch)
    life.bound_memory()
    for _ in range(12):
        life.happen()
    life.restart()
    assert life.driven.engine.close()


@pytest.mark.parametrize("how", ["cancelled", "preempted"])
def test_a_reply_that_waits_with_guesses_leaves_the_state_of_its_tokens(how: str, tmp_path: Path) -> None:
    """It waits for a mask behind some of its guesses, and has not looked at others."""
    driven = Driven(write_model(tmp_path / "model", "lfm2"), tmp_path / "kv", "ngram")
    engine, active = driven.engine, driven.loop._active
    one = request(tokens(90), max_tokens=40, constraint=WORDS)
    expected = Client(driven.inbox, one)
    driven.finish()
    engine.pages.forget_idle()
    engine.speculation = Speculation(ScriptedProposer(lambda _: [expected.tokens]), [], StepTimes(), engine.clock)
    found = Client(driven.inbox, one)

    def waiting() -> list[running_request.Reply]:
        replies = [reply for running in active.requests for reply in running.replies]
        return [one for one in replies if one.held is not None and one.held.had_guesses]

    while not waiting():
        assert driven.step()
    (reply,) = waiting()
    num_tokens = reply.num_computed
    if how == "cancelled":
        active.cancel(reply.running)
    else:
        active.preempt(reply)
    node = next(node for node in engine.pages.kept.sequence_ends() if node.end == num_tokens)
    kept, again = engine.pages.resume(node), KVSequence(engine.pages.pool)
    assert kept is not None
    engine.runtime.run([Rows(again, ids_of(engine.pages, node).astype(np.int64))])
    assert kept.content(num_tokens) == again.content(num_tokens)
    engine.pages.end_sequence(kept, keep=False)
    again.close()
    driven.finish()
    assert how == "cancelled" or said(found) == said(expected)
    assert engine.close()
