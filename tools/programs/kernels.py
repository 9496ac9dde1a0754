"""The kernels benchmark: a step of a real model in bfloat16 with the compiled operators and with torch's, in turns, and
what the machine could do.

The memory of a sequence is filled with random numbers, so that a long context costs nothing to make.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console

from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Layout
from diskprefix.model.exact.invariance import make_exact
from diskprefix.model.exact.invariant import install, uninstall
from diskprefix.model.exact.rehearsal import rehearse
from diskprefix.model.exact.runner import Rows, run
from diskprefix.model.load.fingerprint import Fingerprint
from diskprefix.model.load.loader import load_model
from diskprefix.native import attention_operator as native
from diskprefix.native import library
from diskprefix.settings import Settings
from tools.measuring.live_server import step
from tools.measuring.options import JSON, MODEL, runs_option
from tools.measuring.report import machine, median, new_table, print_report, say, short, show_machine
from tools.measuring.workspace import model_folder

KERNELS = ("auto", "torch")
DECODE = ((1, 64), (1, 4_000), (1, 16_000), (5, 4_000))
"""Sequences, and the tokens before the next one."""
PREFILL = (0, 2_000, 6_000, 15_000)
STEP = 256


@dataclass
class Model:
    """A loaded model that is exact at every token."""

    model: Any
    layout: Layout

    @classmethod
    def of(cls, source: Path, weights: str = "auto") -> Model:
        """`source` is a model's folder or .gguf file, `weights` as for `diskprefix serve`."""
        loaded = load_model(Settings(model=str(source), weights=weights), lambda _: None)
        identity = str(Fingerprint.of(loaded.model, loaded.weights_digest))
        layout, reason = make_exact(loaded.model, rehearse(loaded.model, identity=identity), identity=identity)
        if reason:
            raise click.ClickException(f"this model is not exact at every token: {reason}")
        return cls(loaded.model, layout)

    def arena(self, num_tokens: int) -> KVArena:
        arena = KVArena(self.layout, torch.device("cpu"))
        arena.reserve(num_tokens + STEP)
        for memory in arena.memory:
            memory.tensor.normal_()
        arena.truncate(num_tokens)
        return arena

    def step_ms(self, arenas: Sequence[KVArena], num_rows: int) -> float:
        """Returns the time of one step, after which the sequences are as they were."""
        starts = [arena.num_tokens for arena in arenas]
        rows = [Rows(arena, torch.arange(10, 10 + num_rows).unsqueeze(0)) for arena in arenas]
        took = _ms(lambda: run(self.model, rows))
        for arena, start in zip(arenas, starts, strict=True):
            arena.take_back(start)
        return took

    def use(self, kernels: str) -> None:
        """Has the model computed by these kernels from now on. The bits of a product by torch's are not measured."""
        library.choose(kernels)
        uninstall(self.model)
        install(self.model)

    def attention_ms(self, arenas: Sequence[KVArena], num_rows: int) -> float:
        """Returns the time of the compiled attention of one layer, all of which are as large as the first."""
        memory, heads = arenas[0].memory[0], self.model.config.get_text_config(decoder=True).num_attention_heads
        operators = library.operators()
        assert operators is not None
        query = torch.randn(heads, num_rows * len(arenas), memory.group.head_dim).to(memory.group.dtype)
        layers = [
            [
                (arena.num_tokens, num_rows, 0, arena.memory[0].tensor[2 * n, 0], arena.memory[0].tensor[2 * n + 1, 0])
                for arena in arenas
            ]
            for n in range(len(memory.group.specs) // 2)
        ]
        times = [_ms(partial(native.attention, operators, query, runs, scale=0.1)) for runs in layers]
        return statistics.median(times)


def _ms(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def limits() -> dict[str, float]:
    """Returns what this machine reads from memory and multiplies in bfloat16, the best of several runs."""
    numbers = torch.ones(1 << 26)
    matrix = torch.randn(2048, 2048).bfloat16()
    read_s = min(_ms(numbers.sum) for _ in range(10)) / 1e3
    product_s = min(_ms(lambda: matrix @ matrix) for _ in range(10)) / 1e3
    return {"read_gb_s": numbers.numel() * 4 / read_s / 1e9, "bf16_tflops": 2 * 2048**3 / product_s / 1e12}


def measure(model: Model, runs: int, console: Console) -> list[dict[str, Any]]:
    cases = [(count, tokens, 1) for count, tokens in DECODE] + [(1, tokens, STEP) for tokens in PREFILL]
    found = []
    with torch.inference_mode():
        for count, tokens, num_rows in cases:
            with step(console, f"{count} × {num_rows} rows after {tokens} tokens"):
                found.append(_case(model, [model.arena(tokens) for _ in range(count)], tokens, num_rows, runs))
    return found


def _case(model: Model, arenas: list[KVArena], tokens: int, num_rows: int, runs: int) -> dict[str, Any]:
    steps: dict[str, list[float]] = {kernels: [] for kernels in KERNELS}
    for number in range(runs + 1):
        for kernels in KERNELS:
            model.use(kernels)
            took = model.step_ms(arenas, num_rows)
            if number:
                # The first one is slower.
                steps[kernels].append(took)
    model.use("auto")
    attention_ms = min(model.attention_ms(arenas, num_rows) for _ in range(runs))
    group = arenas[0].memory[0].group
    layers, heads = len(group.specs) // 2, model.model.config.get_text_config(decoder=True).num_attention_heads
    seen = sum(tokens + row + 1 for row in range(num_rows)) * len(arenas)
    return {
        "sequences": len(arenas),
        "tokens": tokens,
        "rows": num_rows,
        "step_ms": steps,
        "attention_of_a_layer_ms": attention_ms,
        "attention_share": attention_ms * layers / min(steps["auto"]),
        "kv_gb_s": group.bytes_per_token / layers * (tokens + num_rows) * len(arenas) / attention_ms / 1e6,
        "attention_tflops": 4 * heads * group.head_dim * seen / attention_ms / 1e9,
    }


def show(report: dict[str, Any], console: Console) -> None:
    right = ("rows", "after", "ms", "torch", "ratio", "layer ms", "share", "GB/s", "TFLOPS")
    table = new_table(f"{report['model']}: {report['kernels']}", left=("sequences",), right=right)
    for case in report["cases"]:
        own, torchs = (median(case["step_ms"][kernels]) for kernels in KERNELS)
        table.add_row(
            *(str(case["sequences"]), str(case["rows"]), f"{case['tokens']:,}", short(own), short(torchs)),
            *(f"{torchs / own:.2f}", f"{case['attention_of_a_layer_ms']:.3f}", f"{case['attention_share']:.0%}"),
            *(f"{case['kv_gb_s']:.1f}", f"{case['attention_tflops']:.2f}"),
        )
    console.print(table)
    limit = report["limits"]
    say(console, f"The machine reads {limit['read_gb_s']:.1f} GB/s and multiplies {limit['bf16_tflops']:.2f} TFLOPS.")
    show_machine(report["machine"], console)


@click.command()
@MODEL
@runs_option(15)
@JSON
def main(model: str, runs: int, as_json: bool) -> None:
    """Measure steps of decoding and prefill with the compiled operators and with torch's, in turns."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    progress = Console(stderr=True)
    source = model_folder(model, progress)
    if library.operators() is None:
        raise click.ClickException(f"there are no compiled operators: {library.described()}")
    with step(progress, "loading"):
        loaded = Model.of(source)
    report = {
        "benchmark": "kernels",
        "model": model,
        "kernels": library.described(),
        "machine": machine(),
        "limits": limits(),
        "cases": measure(loaded, runs, progress),
    }
    print_report(report, as_json, show)
