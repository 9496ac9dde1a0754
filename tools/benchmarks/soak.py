"""The soak benchmark writes ten times its budget to one store and watches the file, the latency and the memory.

Conversations on a simulated clock grow turn by turn, share beginnings, end and come back. Between them come prompts
that come once. Each prompt is restored as far as it is stored, and the rest is published by the store's own writer
thread, with evictions. Some of what was restored is compared. An hour passes on the clock while ten times the budget is
written, so that half-life and expiry work as in a daemon.
"""

from __future__ import annotations

import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console

from diskprefix.cache.matching import Restored
from diskprefix.cache.tiers.nodes import Node
from diskprefix.errors import CacheError, StoreFull
from diskprefix.kv.layout import Layout
from diskprefix.store.codec.codec import Codec
from diskprefix.store.store import Publication, Store
from diskprefix.store.writer import Writer
from diskprefix.tokens import TokenIds
from diskprefix.units import format_size, parse_size
from tests.store.building import Clock
from tests.synthetic_model import Restorer, SyntheticModel, dense_layout
from tools.benchmarks.kv_sample import SMOLLM2, synthetic_sample
from tools.measuring.live_server import step
from tools.measuring.options import FOLDER, JSON, codec_option
from tools.measuring.processes import status_bytes
from tools.measuring.report import at_most, machine, none_of, print_report, say, show_machine, verdict, verdict_table

FILE_GOAL, LATENCY_GOAL, LIVE_GOAL, LOST_GOAL = 1.15, 1.3, 0.8, 0.005
MEMORY_GOAL, MEMORY_SLACK_BYTES = 1.05, 32 << 20
BUDGET_S = 360.0
"""Simulated seconds in which one budget is written: an hour for ten."""
TTL_S, EXPIRY_EVERY_S = 1.25 * BUDGET_S, 60.0
"""About as long as an unused prompt lives before it is evicted."""
BUFFERS_IN_BUDGET, PROMPTS_IN_BUDGET, MAX_TOKENS = 8, 16, 4096
"""The budget divided by the write buffer, whose nodes pin their parents, and by the longest prompt, uncompressed."""
CONVERSATIONS, ANCHORS, PINS, POOL_BLOCKS = 24, 6, 4, 12
STUCK = 100
"""Failures in a row that end the soak with an error."""
OTHER = dense_layout(layers=16, heads=2, head_dim=40, dtype=torch.float32, vocab_size=32000)
"""A second model in the same store, so that pieces of many sizes compete for the same pages."""


@dataclass(frozen=True, kw_only=True)
class Write:
    """One attempt to publish. `seconds` includes eviction, encoding and commit; `stored_bytes` are 0 if it failed."""

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
        evicted, failed, stored_bytes = 0, None, 0
        started = time.perf_counter()
        try:
            evicted = super().publish(publication)
        except CacheError as error:
            # Without sizes and paths, so that equal reasons have equal messages.
            failed = re.sub(r"/\S+|[0-9a-f]{32}|[0-9.]+ [KMG]?i?B", "…", error.message)
            raise
        finally:
            seconds = time.perf_counter() - started
            if not failed:
                with self.snapshot() as snapshot:
                    usages = [snapshot.usage(node.name) for node in publication.nodes]
                stored_bytes = sum(usage.stored_bytes for usage in usages if usage is not None)
            self.writes.append(
                Write(
                    seconds=seconds,
                    raw_bytes=0 if failed else publication.payload_bytes,
                    stored_bytes=stored_bytes,
                    evicted=evicted,
                    file_bytes=self.file_bytes(),
                    used_bytes=self.counts()["used_bytes"],
                    memory_bytes=status_bytes(os.getpid(), "RssAnon"),
                    failed=failed,
                )
            )
        return evicted


class Conversations:
    """Makes the prompts: turns of conversations with a few shared beginnings, and prompts that come once."""

    def __init__(self, rng: np.random.Generator, max_tokens: int) -> None:
        self._rng, self._max_tokens = rng, max_tokens
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


class Soak:
    """Drives one store."""

    def __init__(self, store: WatchedStore, clock: Clock, churn: float) -> None:
        self.store, self._clock, self._churn = store, clock, churn
        self.counts: Counter[str] = Counter()
        self._rng = np.random.default_rng(11)
        # A node's payload is a part of made-up KV that depends on its name alone.
        self._pool = np.concatenate([np.frombuffer(block, np.uint8) for block in synthetic_sample(POOL_BLOCKS).blocks])
        self.writer = Writer(store, buffer_bytes=store.budget_bytes // BUFFERS_IN_BUDGET)
        self._models = [self._model("soak-bf16", SMOLLM2), self._model("soak-fp32", OTHER)]
        self._pins: deque[ExitStack] = deque()
        self._next_expiry = clock.now + EXPIRY_EVERY_S

    def run(self) -> None:
        """Runs until so many budgets are written. Raises `StoreFull`."""
        while sum(write.stored_bytes for write in list(self.store.writes)) < self._churn * self.store.budget_bytes:
            latest = self.store.writes[-STUCK:]
            if len(latest) == STUCK and all(write.failed for write in latest):
                raise StoreFull(f"the store took none of {STUCK} prompts: {latest[-1].failed}")
            self._request(self._models[int(self._rng.random() < 0.3)])
            if self._clock.now >= self._next_expiry:
                self._next_expiry = self._clock.now + EXPIRY_EVERY_S
                self.counts["expired"] += self.store.evictor.expire(TTL_S)
        self.writer.flush(600.0)

    def close(self) -> None:
        for model in self._models:
            model.restorer.close()
        self.writer.close(600.0)
        self.store.close()

    def _model(self, identity: str, layout: Layout) -> Model:
        max_tokens = min(MAX_TOKENS, self.store.budget_bytes // PROMPTS_IN_BUDGET // layout.bytes_per_token)
        synthetic = SyntheticModel(self.store, layout, identity=identity)
        restorer = Restorer(synthetic, self.writer, capacity=max_tokens)
        return Model(synthetic, restorer, Conversations(self._rng.spawn(1)[0], max_tokens))

    def _payload(self, synthetic: SyntheticModel, node: Node) -> memoryview:
        size = synthetic.payload_bytes(node)
        step_bytes = 128
        start = int.from_bytes(node.name[:8], "little") % ((len(self._pool) - size) // step_bytes) * step_bytes
        return self._pool[start : start + size].data

    def _request(self, model: Model) -> None:
        """Does the same as a daemon with a prompt: restores, computes the rest, publishes."""
        prompt, pins = model.conversations.next_prompt(), ExitStack()
        restored = model.restorer.restore_pinned(prompt, pins)
        # It stays pinned for some more requests, as of a long request.
        self._pins.append(pins)
        if len(self._pins) > PINS:
            self._pins.popleft().close()
        if restored.last_node is not None:
            self.writer.touch(restored.last_node, self._clock.now)
        self.counts["prompts"] += 1
        if restored.num_tokens:
            self.counts["hits"] += 1
            if self.counts["hits"] % 8 == 0:
                self.counts["compared"] += 1
                self.counts["wrong"] += not self._is_right(model, prompt, restored)
        stored = len(restored.blocks) + (restored.logits is not None)
        payload = partial(self._payload, model.synthetic)
        publication = model.synthetic.publication(prompt, payload, stored=stored)
        if publication.payload_bytes > self.writer.room_bytes:
            self.writer.flush(600.0)
        self.writer.reserve(publication.payload_bytes)
        self.writer.submit(publication, reserved_bytes=publication.payload_bytes)
        self._clock.now += BUDGET_S * publication.payload_bytes / self.store.budget_bytes

    def _is_right(self, model: Model, prompt: TokenIds, restored: Restored) -> bool:
        """Returns whether the arena holds the bytes that were published."""
        return all(
            model.restorer.arena.read_tokens(node.position, node.num_tokens)
            == self._payload(model.synthetic, node)[: model.synthetic.layout.bytes_per_token * node.num_tokens]
            for node in model.synthetic.path(prompt)
            if node.end <= restored.num_tokens
        )


def measure(folder: Path, *, budget_bytes: int, churn: float, codec: str) -> dict[str, Any]:
    """Runs the soak. Returns the report as JSON values. Raises `CacheError`."""
    torch.set_num_threads(1)
    clock = Clock()
    store = WatchedStore(folder, budget_bytes=budget_bytes, clock=clock)
    store.writes = []
    store.codec = Codec[codec.upper()]
    soak = Soak(store, clock, churn)
    try:
        soak.run()
        dropped = soak.writer.dropped
    finally:
        soak.close()
    command = [sys.executable, "-m", "diskprefix", "verify", "--kv-cache-dir", str(folder)]
    verified = subprocess.run(command, capture_output=True, check=False).returncode
    return {
        "benchmark": "soak",
        "machine": machine(),
        "written_bytes": sum(write.stored_bytes for write in store.writes),
        "evicted": sum(write.evicted for write in store.writes),
        "failures": Counter(write.failed for write in store.writes if write.failed),
        "counts": soak.counts,
        "verdicts": _verdicts(store.writes, budget_bytes, soak.counts, dropped, verified),
    }


def _verdicts(
    writes: list[Write], budget_bytes: int, counts: Counter[str], dropped: int, verified: int
) -> list[dict[str, Any]]:
    written = np.cumsum([write.stored_bytes for write in writes])
    # The first part of the run only fills the store.
    edges = np.searchsorted(written, written[-1] * np.array([0.2, 0.5, 0.7])).tolist()
    early, late = writes[edges[0] : edges[1]], writes[edges[2] :]
    ms_per_mb = [
        statistics.median(write.seconds / write.raw_bytes * 1e9 for write in part if write.raw_bytes)
        for part in (early, late)
    ]
    memory = [max(write.memory_bytes for write in part) / 1e6 for part in (early, late)]
    live = statistics.median(write.used_bytes for write in writes[edges[0] :]) / budget_bytes
    lost = dropped / len(writes)
    return [
        at_most("largest file / budget", max(write.file_bytes for write in writes) / budget_bytes, FILE_GOAL),
        verdict("live data / budget, once full", f"{live:.2f}", f"≥ {LIVE_GOAL}", live >= LIVE_GOAL),
        at_most("ms per MB, end / beginning", ms_per_mb[1] / ms_per_mb[0], LATENCY_GOAL),
        at_most("memory in the end, MB", memory[1], memory[0] * MEMORY_GOAL + MEMORY_SLACK_BYTES / 1e6),
        verdict("publications lost", f"{lost:.2%}", f"≤ {LOST_GOAL:.1%}", lost <= LOST_GOAL),
        none_of(f"restores of {counts['compared']} that differ", counts["wrong"]),
        none_of("exit code of verify", verified),
    ]


def show(report: dict[str, Any], console: Console) -> None:
    say(console, f"{format_size(report['written_bytes'])} written, {report['evicted']} blocks evicted")
    say(console, ", ".join(f"{number} {name}" for name, number in report["counts"].items()))
    for failure, number in report["failures"].items():
        say(console, f"{number} × {failure}")
    console.print(verdict_table("Verdicts", report["verdicts"]))
    show_machine(report["machine"], console)


@click.command()
@click.option("--budget", default="1GiB", show_default=True, metavar="SIZE", help="Budget of the store.")
@click.option("--churn", type=float, default=10.0, show_default=True, help="How many times the budget to write.")
@codec_option("planes")
@FOLDER
@JSON
def main(budget: str, churn: float, codec: str, folder: Path | None, *, as_json: bool) -> None:
    """Write ten times its budget through one store, and say whether it stayed in bounds.

    Exits with 1 if a verdict does not hold.
    """
    budget_bytes = parse_size(budget, param="--budget")
    # Each lost publication is a line of the log; they are counted here.
    logging.getLogger("diskprefix").setLevel(logging.ERROR)
    title = f"writing {churn:g} times {format_size(budget_bytes)}"
    with (
        tempfile.TemporaryDirectory(prefix="diskprefix-soak-", dir=folder) as workspace,
        step(Console(stderr=True), title),
    ):
        try:
            report = measure(Path(workspace) / "kv", budget_bytes=budget_bytes, churn=churn, codec=codec)
        except CacheError as error:
            raise click.ClickException(str(error)) from error
    print_report(report, as_json, show)
    sys.exit(0 if all(row["holds"] for row in report["verdicts"]) else 1)
