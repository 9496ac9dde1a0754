"""Loads an engine, makes requests, and drives the engine: one request to its end, several together, step by step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from diskprefix.daemon.app import load_engine
from diskprefix.daemon.engine.device import raise_if_lost
from diskprefix.daemon.engine.inbox import Inbox, Serve, error_event
from diskprefix.daemon.engine.loop import Engine, Loop
from diskprefix.daemon.engine.request import (
    Constraint,
    DoneEvent,
    ErrorEvent,
    Event,
    FinishEvent,
    GenerateRequest,
    SamplingParams,
    TextEvent,
)
from diskprefix.daemon.engine.running_request import Reply
from diskprefix.daemon.engine.speculation.drafting import Proposer
from diskprefix.daemon.settings import Settings
from diskprefix.prefixstore.kv.page_cache import PageCache
from diskprefix.prefixstore.recording.recorded_request import RecordedRequest
from diskprefix.runtime.contract import StepOutput
from diskprefix.runtime.grid.grid_runtime import GridRuntime
from diskprefix.runtime.plan.planned import PlanRuntime
from diskprefix.scope import parse_scope
from diskprefix.tokens import TokenIds
from diskprefix.values import SHARED, CacheOptions, Prompt, Tenant
from tests.exactness.architectures import tiny_model
from tests.runtime.plan import tiny
from tests.waiting import wait_for

BLOCK = 64
BIAS = {2: -100.0}
"""No reply ends by itself."""
WORDS = Constraint(kind="lark", source="start: /([a-z]{3} )+/")


def write_model(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Writes the tiny model of an architecture and a tokenizer."""
    tiny_model(name, dtype).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def load(model: Path, kv: Path, *, block_size: int = BLOCK, **settings: Any) -> Engine:
    given: dict[str, Any] = {
        "kv_cache_min_tokens": block_size,
        "kv_cache_budget": 32 << 20,
        "kv_cache_gate": "off",
        "speculative": "off",
    } | settings
    engine = load_engine(Settings(model=str(model), kv_cache_dir=kv, block_size=block_size, **given), lambda _: None)
    engine.finish_load()
    return engine


def weight_of(engine: Engine, name: str) -> np.ndarray:
    """The memory of a parameter of an engine that computes by a plan."""
    runtime: Any = engine.runtime
    found: np.ndarray = runtime.weights.tensor(name)
    return found


def tokens(num_tokens: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(3, 250, num_tokens).astype(np.int32)


def request(
    token_ids: TokenIds,
    *,
    name: str = "",
    scope: str = "full",
    tenant: Tenant = SHARED,
    share: str = "",
    conversation: str = "",
    save: bool = True,
    constraint: Constraint | None = None,
    shown: frozenset[str] = frozenset(),
    **params: Any,
) -> GenerateRequest:
    """A greedy request of 12 tokens, unless the sampling parameters `params` say otherwise."""
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "logit_bias": BIAS} | params
    return GenerateRequest(
        id=name or f"{len(token_ids)} tokens",
        prompt=Prompt(token_ids),
        sampling=SamplingParams(**sampling),
        cache=CacheOptions(scope=parse_scope(scope, param="scope"), tenant=tenant, save=save, share=share),
        conversation=conversation,
        constraint=constraint,
        shown_special_tokens=shown,
    )


def tokens_of(events: Iterable[Event], choice: int = 0) -> list[int]:
    texts = [event for event in events if isinstance(event, TextEvent) and event.choice == choice]
    return [token for event in texts for token in event.token_ids]


class ScriptedProposer(Proposer):
    """Proposes tokens that come next in one of the replies to a prompt, each right with a probability. Its guesses
    always seem good."""

    name, _FIRST = "ngram", (0.9,)

    def __init__(self, replies_to: Callable[[TokenIds], list[list[int]]], right: float = 0.7) -> None:
        super().__init__()
        self._replies_to, self._right, self._chance = replies_to, right, random.Random(1)

    def propose(self, replies: Sequence[Reply], num_decoding: int) -> None:
        del num_decoding
        for reply in replies:
            reply.guesser.rates[self.name].values = [0.9]
            guesses = self.guesses(reply)
            reply.guesser.set_guesses(self.name, guesses, [(0,)] * len(guesses))

    def guesses(self, reply: Reply) -> list[int]:
        at = len(reply.token_ids)
        known = self._replies_to(reply.running.request.prompt.token_ids)
        coming = next((one[at:] for one in known if one[:at] == reply.token_ids), [])
        return [
            token if self._chance.random() < self._right else (token + 1) % 250
            for token in coming[: self._chance.choice([0, 1, 2, 5, 8])]
        ]


def patch_steps(patch: pytest.MonkeyPatch, run: Callable[..., StepOutput]) -> None:
    """Has `run` compute each step: it gets the runtime's own function, the runtime and the step."""
    for kind in (PlanRuntime, GridRuntime):
        patch.setattr(kind, "run", partialmethod(_run_by, run, kind.run))


def _run_by(runtime: Any, run: Callable[..., StepOutput], own: Any, step: Any, **options: Any) -> StepOutput:
    return run(partial(own, runtime, **options), step)


class Cancelled(Exception):
    """The request was cancelled: it has no last event."""


Run = Callable[[GenerateRequest, Callable[[Event], None], Callable[[], bool]], None]


def serve_one_at_a_time(run: Run) -> Serve:
    """Returns what an inbox's thread runs: `run` for each request, in order of arrival."""

    def serve(inbox: Inbox) -> None:
        while True:
            if not (waiting := inbox.waiting()):
                if inbox.wait():
                    continue
                return
            ticket = waiting[0]
            inbox.begin_request(ticket)
            try:
                run(ticket.request, ticket.emit, lambda ticket=ticket: ticket.cancelled)  # type: ignore[misc]
            except Cancelled:
                pass
            except Exception as error:  # noqa: BLE001 (as the engine's loop)
                raise_if_lost(error)
                ticket.emit(error_event(error, ticket.request))
            inbox.end_request(ticket)

    return serve


def wait_until_idle(inbox: Inbox) -> None:
    with inbox._changed:
        assert inbox._changed.wait_for(lambda: not inbox._waiting and not inbox._running, 120)


class Client:
    """One request and what came of it."""

    def __init__(self, inbox: Inbox, request: GenerateRequest) -> None:
        self.events: list[Event] = []
        self.ticket = inbox.submit(request, self.events.append)

    @property
    def tokens(self) -> list[int]:
        """Those of the first choice."""
        return self.tokens_of(0)

    def tokens_of(self, choice: int) -> list[int]:
        return tokens_of(self.events, choice)

    @property
    def done(self) -> DoneEvent:
        """Raises what the request failed with."""
        last = self.events[-1]
        if isinstance(last, ErrorEvent):
            raise last.error
        assert isinstance(last, DoneEvent)
        return last


@contextmanager
def running(engine: Engine) -> Iterator[Inbox]:
    """An inbox that the engine serves."""
    inbox = Inbox(engine.serve)
    inbox.start()
    yield inbox
    wait_until_idle(inbox)
    inbox.stop(0)


def run_together(engine: Engine, requests: Iterable[GenerateRequest]) -> list[Client]:
    """Submits all requests before the first step, and returns them when they are over."""
    inbox = Inbox(engine.serve)
    clients = [Client(inbox, request) for request in requests]
    inbox.start()
    wait_until_idle(inbox)
    inbox.stop(0)
    return clients


class BusyClient:
    """Sends a request as soon as the last one was answered: the engine is never idle within the block."""

    def __init__(self, inbox: Inbox) -> None:
        self.num_answered, self._inbox, self._is_over = 0, inbox, False

    def __enter__(self) -> BusyClient:
        self._send()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True

    def _send(self) -> None:
        prompt = tokens(100, seed=1000 + self.num_answered % 3)
        self._inbox.submit(request(prompt, max_tokens=8), self._on_event)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, DoneEvent):
            self.num_answered += 1
            if not self._is_over:
                self._send()


def alone(engine: Engine, one: GenerateRequest) -> Client:
    """Computes the request from its beginning, with nobody else."""
    (client,) = run_together(engine, [replace(one, cache=replace(one.cache, scope=parse_scope("off", param="scope")))])
    return client


def run_request(engine: Engine, request: GenerateRequest, *, steps: int | None = None) -> list[Event]:
    """Returns the events of one request, which is cancelled after so many steps. Raises what it failed with."""
    inbox = Inbox(engine.serve)
    client = Client(inbox, request)
    with pytest.MonkeyPatch.context() as patch:
        if steps is not None:
            after_steps(patch, steps, client.ticket.cancel)
        inbox.start()
        wait_until_idle(inbox)
    inbox.stop(0)
    if client.ticket.cancelled:
        raise Cancelled
    assert client.done
    return client.events


def run(engine: Engine, token_ids: TokenIds, *, steps: int | None = None, **options: Any) -> list[Event]:
    """`run_request` with a `request` of these options."""
    return run_request(engine, request(token_ids, **options), steps=steps)


def done(events: list[Event]) -> DoneEvent:
    last = events[-1]
    assert isinstance(last, DoneEvent)
    return last


def recorded_requests(path: Path) -> list[RecordedRequest]:
    """Returns the lines of a recording (`--record`), in the order in which the requests ended."""
    return [msgspec.json.decode(line, type=RecordedRequest) for line in path.read_bytes().splitlines()]


def bound_memory(pages: PageCache, limit_bytes: int) -> None:
    """Has memory hold nothing, and at most so many bytes from now on."""
    pages.forget_idle()
    wait_for(lambda: not pages.pool.holds)
    for free in pages.pool._free:
        while free:
            pages.pool._give_back(free)
    pages.pool.limit_bytes = limit_bytes


def after_steps(patch: pytest.MonkeyPatch, steps: int, act: Callable[[], object]) -> None:
    """Has the engine's thread call `act` once, after so many steps from now on."""
    compute, left = Loop._compute_step, [steps]

    def counted(self: Loop, step: Any) -> bool:
        is_computed = compute(self, step)
        left[0] -= 1
        if not left[0]:
            act()
        return is_computed

    patch.setattr(Loop, "_compute_step", counted)


def said(client: Client) -> list[Any]:
    """All that a client is told of each token and of each end, by choice."""
    assert client.done
    events = [event for event in client.events if isinstance(event, TextEvent | FinishEvent)]
    return sorted(events, key=lambda event: event.choice)
