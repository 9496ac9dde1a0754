"""The roofline: what decoding, prefill and a restore move or multiply, and the limits of this machine.

Decoding and a restore are held against reading and copying as many bytes, prefill against a large product of bfloat16
matrices: each measured here, on the same threads, just before. A step is also taken apart: its products of weights
alone, its attention alone, and what is left, which is Python and small operators.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.console import Console
from torch import nn

from diskprefix.engine.forward import prefill
from diskprefix.model.quants.quantised import QuantisedLinear
from diskprefix.native import library
from diskprefix.store.codec.codec import Codec
from tools.measuring import kv_sample
from tools.measuring.live_server import step
from tools.measuring.model_steps import STEP, Model, limits
from tools.measuring.options import FOLDER, JSON, MODELS, runs_option
from tools.measuring.report import machine, new_table, print_report, say, short, show_machine
from tools.models import real
from tools.programs.store import Plan, Restore

DECODE = (64, 4_000, 16_000)
PREFILL = (2_000, 6_000, 15_000)
RESTORE = 4_096


@dataclass(frozen=True)
class Case:
    """`moved` are bytes, or operations of a product. `limit` is what the machine does of them in a second; `seconds` is
    what was measured, `parts` what single parts of it take alone."""

    name: str
    moved: float
    limit: float
    seconds: float
    parts: dict[str, float]

    @property
    def share(self) -> float:
        return self.moved / self.limit / self.seconds


def measure(model: Model, runs: int, folder: Path, console: Console) -> Iterator[Case]:
    """Yields the cases of one model, as far as it has positions."""
    config = model.model.config.get_text_config(decoder=True)
    longest = config.max_position_embeddings
    with torch.inference_mode():
        for tokens in (tokens for tokens in DECODE if tokens < longest):
            with step(console, f"decoding after {tokens} tokens"):
                yield decoding(model, tokens, runs)
        for tokens in (tokens for tokens in PREFILL if tokens < longest):
            with step(console, f"prefill of {tokens} tokens"):
                yield prefilling(model, tokens)
    with step(console, f"restoring {RESTORE} tokens"):
        yield from restoring(model, runs, folder)


@dataclass(frozen=True)
class Matrix:
    """A module that multiplies rows with weights."""

    module: nn.Module
    columns: int
    rows: int
    num_bytes: int
    """Of the weights as they are read to compute: quants where it has them."""

    @classmethod
    def of(cls, module: nn.Module) -> Matrix:
        linear: Any = module
        weights: torch.Tensor = linear.packed if isinstance(module, QuantisedLinear) else linear.weight
        return cls(module, linear.in_features, linear.out_features, weights.numel() * weights.element_size())


def matrices(model: Model) -> list[Matrix]:
    """Returns the matrices of the decoder, and that of the logits."""
    return [Matrix.of(one) for one in model.model.modules() if isinstance(one, nn.Linear | QuantisedLinear)]


def decoding(model: Model, tokens: int, runs: int) -> Case:
    arena = model.arena(tokens)
    used = matrices(model)
    moved = sum(matrix.num_bytes for matrix in used) + model.layout.bytes_per_token * (tokens + 1)
    inputs = [torch.randn(1, 1, matrix.columns).bfloat16() for matrix in used]

    def products() -> None:
        for matrix, rows in zip(used, inputs, strict=True):
            matrix.module(rows)

    times: dict[str, list[float]] = {"step": [], "products": [], "attention": []}
    layers = len(model.layout.groups[0].specs) // 2
    for _ in range(runs):
        times["step"].append(model.step_ms([arena], 1) / 1e3)
        times["products"].append(_seconds(products))
        times["attention"].append(model.attention_ms([arena], 1) * layers / 1e3)
    found = {name: statistics.median(taken) for name, taken in times.items()}
    seconds = found.pop("step")
    found["rest"] = seconds - sum(found.values())
    return Case(f"decode after {tokens:,}", moved, read_rate(moved), seconds, found)


def prefilling(model: Model, tokens: int) -> Case:
    config = model.model.config.get_text_config(decoder=True)
    group = model.layout.groups[0]
    arena = model.arena(tokens)
    arena.truncate(0)
    prompt = np.random.default_rng(0).integers(0, 1000, tokens).astype(np.int32)
    seconds = _seconds(lambda: prefill(model.model, arena, prompt, start=0, block_size=STEP, after_step=lambda _: None))
    head = model.model.get_output_embeddings()
    weights = sum(matrix.columns * matrix.rows for matrix in matrices(model) if matrix.module is not head)
    attention = 2 * config.num_attention_heads * group.head_dim * tokens * (tokens + 1) * len(group.specs) // 2
    moved = 2 * weights * tokens + attention
    parts = {"attention, by operations": seconds * attention / moved}
    return Case(f"prefill of {tokens:,}", moved, limits()["bf16_tflops"] * 1e12, seconds, parts)


def restoring(model: Model, runs: int, folder: Path) -> Iterator[Case]:
    """A restore of KV of the model's form, from pages that the system has in memory."""
    sample = kv_sample.synthetic_sample(8, model.layout)
    restore = Restore(Plan(sample=sample, tokens=RESTORE, blocks=0, runs=runs, folder=folder))
    restore.save(Codec.RAW)
    copies, firsts, agains = [], [], []
    for _ in range(runs):
        copies.append(restore.copy_s())
        first, again = restore.warm_s(Codec.RAW)
        firsts.append(first)
        agains.append(again)
    limit = restore.num_bytes / statistics.median(copies)
    for name, taken in (("first", firsts), ("later", agains)):
        yield Case(f"restore of {RESTORE:,}, {name}", restore.num_bytes, limit, statistics.median(taken), {})


def read_rate(num_bytes: float) -> float:
    """Returns the bytes a second of reading `num_bytes` from memory, the best of ten times."""
    numbers = torch.ones(int(num_bytes) // 4)
    return numbers.numel() * 4 / min(_seconds(numbers.sum) for _ in range(10))


def _seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def show(report: dict[str, Any], console: Console) -> None:
    for name, cases in report["models"].items():
        right = ("moved", "limit", "at it, ms", "ms", "share")
        table = new_table(f"{name}, --weights {report['weights']}", left=("",), right=right)
        for case in cases:
            unit, per_s = ("GFLOP", "TFLOPS") if case["name"].startswith("prefill") else ("MB", "GB/s")
            scale = (1e9, 1e12) if unit == "GFLOP" else (1e6, 1e9)
            table.add_row(
                case["name"],
                f"{case['moved'] / scale[0]:,.0f} {unit}",
                f"{case['limit'] / scale[1]:.2f} {per_s}",
                short(case["moved"] / case["limit"] * 1e3),
                short(case["seconds"] * 1e3),
                f"{case['share']:.0%}",
            )
        console.print(table)
        for case in (case for case in cases if case["parts"]):
            parts = ", ".join(f"{part} {short(taken * 1e3)} ms" for part, taken in case["parts"].items())
            say(console, f"{case['name']}: {parts}")
    say(console, f"kernels: {report['kernels']}")
    show_machine(report["machine"], console)


@click.command()
@MODELS
@click.option("--weights", default="auto", show_default=True, help="As for `diskprefix serve`.")
@runs_option(15)
@FOLDER
@JSON
def main(models: tuple[str, ...], weights: str, runs: int, folder: Path | None, as_json: bool) -> None:
    """Hold decoding, prefill and restores against what the machine reads, multiplies and copies."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    progress = Console(stderr=True)
    if library.operators() is None:
        raise click.ClickException(f"there are no compiled operators: {library.described()}")
    torch.set_num_threads(machine()["cpus"])
    found: dict[str, list[dict[str, Any]]] = {}
    for name in models:
        with step(progress, f"loading {name}") as note:
            loaded = Model.of(real.gguf_file(name, note), weights)
        with tempfile.TemporaryDirectory(prefix="diskprefix-bench-", dir=folder) as workspace:
            cases = measure(loaded, runs, Path(workspace), progress)
            found[name] = [{**asdict(case), "share": case.share} for case in cases]
    report = {
        "benchmark": "roofline",
        "weights": weights,
        "kernels": library.described(),
        "machine": machine(),
        "models": found,
    }
    print_report(report, as_json, show)
