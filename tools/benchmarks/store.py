"""The store benchmark: restores against a memory copy, and codecs.

Figures that are compared are measured alternately in one run, so that a drift of the machine cancels.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console

from diskprefix.cache.tiers.nodes import Node
from diskprefix.store.codec.codec import Codec, Piece, decode_piece, encode_piece
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.folder import DATA
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import Kind
from diskprefix.store.store import Store
from diskprefix.tokens import TokenIds
from tests.synthetic_model import SyntheticModel, open_restorer
from tools.benchmarks.kv_sample import BLOCK_SIZE, KVSample, synthetic_sample
from tools.measuring import page_cache
from tools.measuring.live_server import step
from tools.measuring.options import FOLDER, JSON, runs_option
from tools.measuring.report import machine, new_table, print_report, say, show_machine
from tools.measuring.workspace import measuring

THREADS = 2
"""As many as a restore uses."""
CODECS = tuple(Codec)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The sizes of a run. `tokens` are restored."""

    sample: KVSample
    tokens: int
    runs: int
    folder: Path


def measure(plan: Plan, console: Console) -> dict[str, Any]:
    """Runs the benchmark. Returns the report as JSON values. Raises `CacheError`."""
    torch.set_num_threads(THREADS)
    sample = plan.sample
    with step(console, f"codecs, on {sample.num_bytes / 1e6:.0f} MB of KV"):
        codecs = {codec.name.lower(): _measure_codec(sample, codec, plan.runs) for codec in CODECS}
    restore = _measure_restore(plan, console)
    return {
        "benchmark": "store",
        "machine": machine(),
        "runs": plan.runs,
        "kv_bytes": sample.num_bytes,
        "codecs": codecs,
        "restore": restore,
    }


def _measure_codec(sample: KVSample, codec: Codec, runs: int) -> dict[str, float]:
    """Returns the ratio, and the speeds in GB/s of raw KV: one thread encodes, as in the writer, `THREADS` decode."""
    pieces = _pieces_of(sample)
    work = [(memoryview(encode_piece(raw, piece, codec, 0)), piece) for piece, raw in pieces]
    outs = [np.ones((piece.num_rows, piece.row_bytes), np.uint8) for piece, _ in pieces]
    encode_s = statistics.median(_encode_s(pieces, codec) for _ in range(runs))
    decode_s = statistics.median(_decode_s(work, outs) for _ in range(runs))
    return {
        "ratio": round(sample.num_bytes / sum(len(stored) for stored, _ in work), 3),
        "encode_gb_s": round(sample.num_bytes / encode_s / 1e9, 2),
        "decode_gb_s": round(sample.num_bytes / decode_s / 1e9, 2),
    }


def _pieces_of(sample: KVSample) -> list[tuple[Piece, memoryview]]:
    pieces = PayloadLayout.parse(sample.layout.describe()).pieces(BLOCK_SIZE, Kind.BLOCK)
    cut = []
    for block in sample.blocks:
        start = 0
        for piece in pieces:
            cut.append((piece, block[start : start + piece.num_bytes]))
            start += piece.num_bytes
    return cut


def _encode_s(pieces: Sequence[tuple[Piece, memoryview]], codec: Codec) -> float:
    started = time.perf_counter()
    for piece, raw in pieces:
        encode_piece(raw, piece, codec, 0)
    return time.perf_counter() - started


def _decode_s(work: Sequence[tuple[memoryview, Piece]], outs: Sequence[Bytes]) -> float:
    """Returns the seconds to decode everything on `THREADS` threads into memory that was touched before."""
    started = threading.Barrier(THREADS + 1)

    def decode(first: int) -> None:
        started.wait()
        for (stored, piece), out in zip(work[first::THREADS], outs[first::THREADS], strict=True):
            decode_piece(stored, piece, 0, out)

    with ThreadPoolExecutor(THREADS) as threads:
        running = [threads.submit(decode, first) for first in range(THREADS)]
        started.wait()
        before = time.perf_counter()
        for thread in running:
            thread.result()
        return time.perf_counter() - before


class Restore:
    """One prompt, in a store for each codec, which is restored many times."""

    def __init__(self, plan: Plan) -> None:
        blocks = plan.sample.blocks
        logits = memoryview(np.random.default_rng(0).bytes(plan.sample.layout.logits_bytes))
        self._layout = plan.sample.layout
        self._payload: Callable[[Node], memoryview] = lambda node: (
            logits if node.kind == Kind.TAIL else blocks[node.position // BLOCK_SIZE % len(blocks)]
        )
        self._folder = plan.folder / "restore"
        num_blocks = -(-plan.tokens // BLOCK_SIZE)
        self.prompt: TokenIds = np.random.default_rng(1).integers(0, 1000, num_blocks * BLOCK_SIZE).astype(np.int32)
        self.num_bytes = PayloadLayout.parse(self._layout.describe()).payload_bytes(len(self.prompt), Kind.TAIL)
        self._source = torch.ones(self.num_bytes, dtype=torch.uint8)
        self._target = torch.zeros(self.num_bytes, dtype=torch.uint8)

    def file(self, codec: Codec) -> Path:
        return self._folder / codec.name.lower() / DATA

    def save(self, codec: Codec) -> None:
        store = self._open(codec)
        store.codec = codec
        store.publish(self._model(store).publication(self.prompt, self._payload))
        store.close()

    def copy_s(self) -> float:
        """Returns the seconds of a memory copy of as many bytes, on `THREADS` threads, between warm buffers."""
        started = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - started

    def warm_s(self, codec: Codec) -> tuple[float, float]:
        """Returns the seconds of the first and of the second restore after opening, with the file in the page cache."""
        with self.opened(codec) as model, open_restorer(model, capacity=len(self.prompt)) as restorer:
            return restorer.seconds(self.prompt), restorer.seconds(self.prompt)

    @contextmanager
    def opened(self, codec: Codec) -> Iterator[SyntheticModel]:
        """Opens the store, with the file in the page cache."""
        page_cache.warm(self.file(codec))
        store = self._open(codec)
        try:
            yield self._model(store)
        finally:
            store.close()

    def _open(self, codec: Codec) -> Store:
        return Store(self.file(codec).parent, budget_bytes=2 * self.num_bytes + (64 << 20))

    def _model(self, store: Store) -> SyntheticModel:
        return SyntheticModel(store, self._layout, identity="bench")


def _measure_restore(plan: Plan, console: Console) -> dict[str, Any]:
    restore = Restore(plan)
    megabytes = restore.num_bytes / 1e6
    with step(console, f"saving {len(restore.prompt)} tokens, {megabytes:.0f} MB, with every codec"):
        for codec in CODECS:
            restore.save(codec)
    copies: list[float] = []
    first: dict[Codec, list[float]] = {codec: [] for codec in CODECS}
    again: dict[Codec, list[float]] = {codec: [] for codec in CODECS}
    with step(console, f"restoring {megabytes:.0f} MB, page cache warm, {plan.runs} times"):
        for _ in range(plan.runs):
            for codec in CODECS:
                copies.append(restore.copy_s())
                once, twice = restore.warm_s(codec)
                first[codec].append(once)
                again[codec].append(twice)
    copy_s = statistics.median(copies)

    def report(codec: Codec) -> dict[str, float]:
        first_s, again_s = (statistics.median(samples[codec]) for samples in (first, again))
        return {
            "first_gb_s": round(restore.num_bytes / first_s / 1e9, 2),
            "again_gb_s": round(restore.num_bytes / again_s / 1e9, 2),
            "again_to_copy": round(copy_s / again_s, 3),
        }

    return {
        "tokens": len(restore.prompt),
        "bytes": restore.num_bytes,
        "copy_gb_s": round(restore.num_bytes / copy_s / 1e9, 2),
        "codecs": {codec.name.lower(): report(codec) for codec in CODECS},
    }


def show(report: dict[str, Any], console: Console) -> None:
    restore = report["restore"]
    title = f"{restore['bytes'] / 1e6:.0f} MB of KV, medians of {report['runs']}, in GB/s"
    right = ("ratio", "encode\n1 thread", f"decode\n{THREADS} threads", "restore", "of a\ncopy", "first\none")
    table = new_table(title, left=("codec",), right=right)
    for name, codec in report["codecs"].items():
        found = restore["codecs"][name]
        figures = [codec["ratio"], codec["encode_gb_s"], codec["decode_gb_s"], found["again_gb_s"]]
        figures += [found[key] for key in ("again_to_copy", "first_gb_s")]
        table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    say(console, f"memory copy {restore['copy_gb_s']} GB/s")
    show_machine(report["machine"], console)


@click.command()
@click.option(
    "--tokens",
    type=click.IntRange(min=1024),
    default=8192,
    show_default=True,
    help="How much is saved and restored; of the embedded model's shape, 1 GiB is about 46 000 tokens.",
)
@runs_option(7)
@FOLDER
@JSON
def main(tokens: int, runs: int, folder: Path | None, as_json: bool) -> None:
    """Measure what the store can do: restores against a memory copy, and codecs.

    The KV is made up, so that it compresses as that of the embedded model does.
    """
    progress = Console(stderr=True)
    with measuring(folder, progress) as workspace:
        plan = Plan(sample=synthetic_sample(8), tokens=tokens, runs=runs, folder=workspace)
        report = measure(plan, progress)
    print_report(report, as_json, show)
