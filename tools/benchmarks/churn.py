"""Load for a store: conversations on a simulated clock, until a number of budgets is written.

Conversations grow turn by turn, share beginnings, end and come back. Between them come prompts that come once. Each
prompt is restored as far as it is stored, and the rest is published by the store's own writer thread, with evictions.
Some of what was restored is compared. An hour passes on the clock while ten times the budget is written, so that
half-life and expiry work as in a daemon.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from diskprefix.cache.matching import Restored
from diskprefix.cache.tiers.nodes import Node
from diskprefix.errors import CacheError, StoreFull
from diskprefix.kv.layout import Layout
from diskprefix.store.store import Publication, Store
from diskprefix.store.writer import Writer
from diskprefix.tokens import TokenIds
from tests.store.building import Clock
from tests.synthetic_model import Restorer, SyntheticModel, dense_layout
from tools.benchmarks.kv_sample import SMOLLM2, synthetic_sample
from tools.measuring.processes import status_bytes

BUDGET_S = 360.0
"""Simulated seconds in which one budget is written: an hour for ten."""
TTL_S = 1.25 * BUDGET_S
"""About as long as an unused prompt lives before it is evicted."""
EXPIRY_EVERY_S = 60.0
BUFFERS_IN_BUDGET = 8
"""The budget divided by the write buffer. Nodes that wait in the buffer pin their parents."""
MAX_TOKENS = 4096
PROMPTS_IN_BUDGET = 16
"""The number of longest prompts that fit into the budget, uncompressed."""
CONVERSATIONS = 24
ANCHORS = 6
PINS = 4
STUCK = 100
"""Failures in a row that end the soak with an error."""
POOL_BLOCKS = 12
OTHER = dense_layout(layers=16, heads=2, head_dim=40, dtype=torch.float32, vocab_size=32000)
"""A second model in the same store, so that pieces of many sizes compete for the same pages."""


@dataclass(frozen=True, kw_only=True)
class Write:
    """One attempt to publish. `seconds` includes eviction, encoding and commit."""

    seconds: float
    raw_bytes: int
    stored_bytes: int
    evicted: int
    file_bytes: int
    used_bytes: int
    memory_bytes: int
    failed: str | None


class WatchedStore(Store):
    """A store that records each publication."""

    writes: list[Write]

    def publish(self, publication: Publication) -> int:
        evicted, failed = 0, None
        started = time.perf_counter()
        try:
            evicted = super().publish(publication)
        except CacheError as error:
            failed = f"{type(error).__name__}: {_without_figures(error)}"
            raise
        finally:
            seconds = time.perf_counter() - started
            self.writes.append(
                Write(
                    seconds=seconds,
                    raw_bytes=0 if failed else publication.payload_bytes,
                    stored_bytes=0 if failed else self._stored_bytes(publication),
                    evicted=evicted,
                    file_bytes=self.file_bytes(),
                    used_bytes=self.counts()["used_bytes"],
                    memory_bytes=status_bytes(os.getpid(), "RssAnon"),
                    failed=failed,
                )
            )
        return evicted

    def _stored_bytes(self, publication: Publication) -> int:
        with self.snapshot() as snapshot:
            usages = [snapshot.usage(node.name) for node in publication.nodes]
        return sum(usage.stored_bytes for usage in usages if usage is not None)


def failures(writes: Sequence[Write]) -> dict[str, int]:
    """Returns the number of failures of each kind."""
    return dict(sorted(Counter(write.failed for write in writes if write.failed is not None).items()))


def _without_figures(error: CacheError) -> str:
    """Returns the message without sizes and paths, so that equal reasons have equal messages."""
    return re.sub(r"/\S+|[0-9a-f]{32}|[0-9.]+ [KMG]?i?B", "…", error.message)


class Payloads:
    """Gives each node a payload that depends on its name alone: a part of made-up KV."""

    def __init__(self) -> None:
        sample = synthetic_sample(POOL_BLOCKS)
        self._pool = np.concatenate([np.frombuffer(block, np.uint8) for block in sample.blocks])

    def of(self, synthetic: SyntheticModel, node: Node) -> memoryview:
        size = synthetic.payload_bytes(node)
        step_bytes = 128
        starts = (len(self._pool) - size) // step_bytes
        start = int.from_bytes(node.name[:8], "little") % starts * step_bytes
        return self._pool[start : start + size].data


@dataclass
class Counts:
    prompts: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    restored_tokens: int = 0
    compared: int = 0
    wrong: int = 0
    expired: int = 0
    waits: int = 0


class Conversations:
    """Makes the prompts: turns of conversations with a few shared beginnings, and prompts that come once."""

    def __init__(self, rng: np.random.Generator, max_tokens: int) -> None:
        self._rng = rng
        self._max_tokens = max_tokens
        self._anchors = [self._tokens(max_tokens // 2) for _ in range(ANCHORS)]
        self._open: list[TokenIds] = [self._opening() for _ in range(CONVERSATIONS)]

    def next_prompt(self) -> TokenIds:
        if self._rng.random() < 0.15:
            return self._tokens(self._max_tokens * 3 // 4)
        which = int(self._rng.integers(len(self._open)))
        prompt = self._open[which]
        if self._rng.random() < 0.85:
            prompt = np.concatenate([prompt, self._tokens(self._max_tokens // 6)])
        if len(prompt) > self._max_tokens or self._rng.random() < 0.04:
            prompt = self._opening()
        self._open[which] = prompt
        return prompt

    def _opening(self) -> TokenIds:
        anchor = self._anchors[int(self._rng.integers(len(self._anchors)))]
        return np.concatenate([anchor, self._tokens(self._max_tokens // 6)])

    def _tokens(self, most: int) -> TokenIds:
        return self._rng.integers(0, 30_000, int(self._rng.integers(most // 16, most))).astype(np.int32)


@dataclass(eq=False)
class Model:
    """One model that uses the store: its names, its restorer, its prompts."""

    synthetic: SyntheticModel
    restorer: Restorer
    conversations: Conversations


@dataclass(eq=False)
class Soak:
    """Drives one store."""

    store: WatchedStore
    clock: Clock
    churn: float
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(11)
        self._payloads = Payloads()
        self.writer = Writer(self.store, buffer_bytes=self.store.budget_bytes // BUFFERS_IN_BUDGET)
        self._models = [self._model("soak-bf16", SMOLLM2), self._model("soak-fp32", OTHER)]
        self._pins: deque[ExitStack] = deque()
        self._next_expiry = self.clock.now + EXPIRY_EVERY_S

    def run(self) -> None:
        """Runs until `churn` budgets are written. Raises `StoreFull`."""
        while self.progress() < 1.0:
            if self._is_stuck():
                raise StoreFull(f"the store took none of {STUCK} prompts: {failures(self.store.writes[-STUCK:])}")
            self._request(self._models[int(self._rng.random() < 0.3)])
            if self.clock.now >= self._next_expiry:
                self._next_expiry = self.clock.now + EXPIRY_EVERY_S
                self.counts.expired += self.store.evictor.expire(TTL_S)
        self.writer.flush(600.0)

    def progress(self) -> float:
        """Returns the written share of all that is to be written, 0 to 1."""
        return sum(write.stored_bytes for write in list(self.store.writes)) / (self.churn * self.store.budget_bytes)

    def _is_stuck(self) -> bool:
        latest = self.store.writes[-STUCK:]
        return len(latest) == STUCK and all(write.failed is not None for write in latest)

    def close(self) -> None:
        for model in self._models:
            model.restorer.close()
        self.writer.close(600.0)
        self.store.close()

    def _model(self, identity: str, layout: Layout) -> Model:
        max_tokens = min(MAX_TOKENS, self.store.budget_bytes // PROMPTS_IN_BUDGET // layout.bytes_per_token)
        synthetic = SyntheticModel(self.store, layout, identity=identity)
        return Model(
            synthetic,
            Restorer(synthetic, self.writer, capacity=max_tokens),
            Conversations(self._rng.spawn(1)[0], max_tokens),
        )

    def _request(self, model: Model) -> None:
        """Does the same as a daemon with a prompt: restores, computes the rest, publishes."""
        prompt = model.conversations.next_prompt()
        pins = ExitStack()
        restored = model.restorer.restore_pinned(prompt, pins)
        self._keep_pinned(pins)
        if restored.last_node is not None:
            self.writer.touch(restored.last_node, self.clock.now)
        self._note(model, prompt, restored)
        stored = len(restored.blocks) + (restored.logits is not None)
        publication = model.synthetic.publication(prompt, partial(self._payloads.of, model.synthetic), stored=stored)
        if publication.payload_bytes > self.writer.room_bytes:
            self.counts.waits += 1
            self.writer.flush(600.0)
        self.writer.reserve(publication.payload_bytes)
        self.writer.submit(publication, reserved_bytes=publication.payload_bytes)
        self.clock.now += BUDGET_S * publication.payload_bytes / self.store.budget_bytes

    def _note(self, model: Model, prompt: TokenIds, restored: Restored) -> None:
        counts = self.counts
        counts.prompts += 1
        counts.prompt_tokens += len(prompt)
        counts.hits += restored.num_tokens > 0
        counts.restored_tokens += restored.num_tokens
        if restored.num_tokens and counts.hits % 8 == 0:
            counts.compared += 1
            counts.wrong += not self._is_right(model, prompt, restored)

    def _is_right(self, model: Model, prompt: TokenIds, restored: Restored) -> bool:
        """Returns whether the arena holds the bytes that were published."""
        path = [node for node in model.synthetic.path(prompt) if node.end <= restored.num_tokens]
        return all(
            model.restorer.arena.read_tokens(node.position, node.num_tokens)
            == self._payloads.of(model.synthetic, node)[: model.synthetic.layout.bytes_per_token * node.num_tokens]
            for node in path
        )

    def _keep_pinned(self, pins: ExitStack) -> None:
        """Keeps a restored prefix pinned for some more requests, as a long request does."""
        self._pins.append(pins)
        if len(self._pins) > PINS:
            self._pins.popleft().close()
