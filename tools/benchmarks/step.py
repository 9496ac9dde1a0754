"""Measures the time of a step by part: the operators of the plan, and the Python around the call that runs them; and
whole steps beside other engines.

    tools/bench step --rounds 0 --model qwen2.5-coder-0.5b --engine diskprefix --engine 'diskprefix --kernels avx2' \\
        --engine ik_llama.cpp --engine 'ik_llama.cpp FOLDER -rtr 1'
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from msgspec.structs import replace
from rich.console import Console

from diskprefix.daemon.settings import Settings
from diskprefix.native import calls
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.load.loader import load_model
from tools.benchmarks import whole_steps
from tools.benchmarks.engines import Model
from tools.measuring.options import JSON, known_engines
from tools.measuring.report import machine, new_table, print_report, show_machine
from tools.models import real

_TOKENS = {"prefill": 256, "decode": 1}
"""The number of tokens in each step. The second step continues the first."""
_CALL, _EMPTY, _PYTHON = "all in one call", "a call of none", "Python outside"

Run = Callable[[bytes, bytes], int]
"""The operator that runs operations of a step."""


def _timed(run: Run, part: str, seconds: dict[str, float]) -> Run:
    def timed(operations: bytes, step: bytes) -> int:
        begun = time.perf_counter()
        failed = run(operations, step)
        seconds[part] += time.perf_counter() - begun
        return failed

    return timed


def _one_by_one(run: Run, names: list[str], seconds: dict[str, float]) -> Run:
    def each(operations: bytes, step: bytes) -> int:
        first, size = calls.Operations.from_buffer_copy(operations).operations or 0, ctypes.sizeof(calls.Operation)
        for at, name in enumerate(names):
            for count, part in ((0, _EMPTY), (1, name)):
                if _timed(run, part, seconds)(bytes(calls.Operations(count, first + at * size)), step):
                    return 1
        return 0

    return each


def measured(model: str, rounds: int) -> dict[str, Any]:
    """Returns microseconds by step and part. Raises `ModelError`, and `ClickException` for a model without a plan."""
    loaded = load_model(Settings(model=model), real.print_report)
    if (runtime := loaded.runtime) is None:
        raise click.ClickException(f"{model} has no plan: {loaded.reason}")
    layout, operators = runtime.layout, runtime.runner.operators
    pool = PagePool(layout, block_size=256)
    names = [type(made.call).__name__.removesuffix("Call") for made in runtime.runner.plan.operations]
    samples: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in _TOKENS}
    for number in range(2 * rounds + 2):
        sequence, is_whole = KVSequence(pool), number % 2 == 0
        for name, num_tokens in _TOKENS.items():
            parts: dict[str, float] = defaultdict(float)
            run = _timed(operators.run, _CALL, parts) if is_whole else _one_by_one(operators.run, names, parts)
            runtime.runner.operators = replace(operators, run=run)
            begun = time.perf_counter()
            runtime.run([Rows(sequence, np.random.default_rng(0).integers(0, layout.vocab_size, num_tokens))])
            if is_whole:
                parts[_PYTHON] = time.perf_counter() - begun - parts[_CALL]
            # The time of a call itself belongs to no operator. The first two steps warm up.
            of_call = parts.pop(_EMPTY, 0.0) / len(names)
            for part, seconds in parts.items() if number > 1 else ():
                samples[name][part].append(1e6 * max(0.0, seconds - of_call * names.count(part)))
        sequence.close()
    medians = {name: {part: round(median(of), 1) for part, of in parts.items()} for name, parts in samples.items()}
    return {"calls": Counter(names), "microseconds": medians}


def show(report: dict[str, Any], console: Console) -> None:
    show_machine(report["machine"], console)
    if "whole_steps" in report:
        whole_steps.show(report["whole_steps"], console)
    for name, microseconds in report["microseconds"].items():
        table = new_table(f"{name}, tokens: {_TOKENS[name]}", left=("",), right=("calls", "µs", "share"))
        whole, of_calls = microseconds[_CALL] + microseconds[_PYTHON], report["calls"]
        for part in (*sorted(of_calls, key=microseconds.get, reverse=True), _CALL, _PYTHON):
            table.add_row(
                part, str(of_calls.get(part, "")), f"{microseconds[part]:,.0f}", f"{microseconds[part] / whole:.1%}"
            )
        console.print(table)


@click.command()
@click.option("--model", default=real.DEFAULT, show_default=True, help="A real model, or what `serve --model` takes.")
@click.option(
    "--rounds",
    default=20,
    show_default=True,
    type=click.IntRange(0),
    help="The number of measured steps, each by operator; 0 measures none.",
)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    callback=known_engines(whole_steps.ENGINES),
    help="Measure whole steps of this engine, too: diskprefix with flags of `serve`, such as 'diskprefix --kernels "
    "avx2', or 'ik_llama.cpp FOLDER' (llama-server: llama.cpp) with arguments of its llama-bench, such as '-rtr 1'. "
    "Without FOLDER, it is compiled on first use. Repeatable; ratios are to the first.",
)
@click.option("--prefill", default=1000, show_default=True, type=click.IntRange(1), help="Tokens of a whole prefill.")
@click.option("--decode", default=64, show_default=True, type=click.IntRange(1), help="Tokens decoded in whole steps.")
@JSON
def main(model: str, rounds: int, engines: tuple[str, ...], prefill: int, decode: int, *, as_json: bool) -> None:
    """Show how many microseconds each operator takes in a prefill of 256 tokens and in a step of one token.

    Figures are medians. An operator's figure comes from steps that call the operators one by one, less the time of a
    call itself. All other figures come from steps as they are served, and shares refer to these.

    With --engine, show the tokens a second of a prefill and of decoding, without drafts, beside other engines: medians
    of three. Ends with 1 if an engine was left out.
    """
    file = str(real.gguf_file(model, real.print_report)) if model in real.NAMES else model
    report: dict[str, Any] = {"benchmark": "step", "model": model, "machine": machine()}
    if engines:
        path = Path(file)
        measured_model = Model(model, path, path if path.is_dir() else None, prefill)
        lengths = whole_steps.Lengths(prefill, decode)
        report["whole_steps"] = whole_steps.measured(measured_model, lengths, engines, Console(stderr=True))
    report |= measured(file, rounds) if rounds else {"calls": {}, "microseconds": {}}
    print_report(report, as_json, show)
    sys.exit(1 if engines and report["whole_steps"]["left_out"] else 0)
