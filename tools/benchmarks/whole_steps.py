"""Whole steps beside other engines: tokens a second of a prefill and of decoding, and the share of the memory bandwidth
that decoding uses. Each engine is measured in a process of its own, and is alone on the machine."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console

from diskprefix.control_groups import num_cpus
from diskprefix.progress import Report
from tools.benchmarks.engines import Model, program_of, require_file
from tools.measuring.answers import LiveServerError
from tools.measuring.environments import NotInstalled
from tools.measuring.live_server import ROOT, Process, step
from tools.measuring.memory import bytes_of_a_token, read_bandwidth
from tools.measuring.report import new_table, say, short

ROUNDS = 3


class Lengths(NamedTuple):
    """The tokens of a measured prefill and of decoding."""

    prefill: int
    decode: int


Speeds = Mapping[str, Sequence[float]]
"""Tokens a second, round by round, of `prefill` and of `decode`."""


def _diskprefix(model: Model, lengths: Lengths, log: Path, report: Report, more: Sequence[str]) -> Speeds:
    del report
    command = [sys.executable, "-P", "-m", "tools.benchmarks.own_steps", *map(str, (*lengths, ROUNDS))]
    speeds: Speeds = json.loads(_output([*command, "--model", str(model.file), *more], log))
    return speeds


def _llama_bench(engine: str, model: Model, lengths: Lengths, log: Path, report: Report, more: Sequence[str]) -> Speeds:
    """Returns what the `llama-bench` of llama.cpp or its fork says. It decodes in an empty sequence, too."""
    require_file(model)
    program, *own = program_of(engine, "llama-bench", report, more)
    command = [program, "-m", str(model.file), "-p", str(lengths.prefill), "-n", str(lengths.decode)]
    command += ["-r", str(ROUNDS)]
    tests = json.loads(_output([*command, "-t", str(num_cpus()), "-o", "json", *own], log))
    return {("decode" if test["n_gen"] else "prefill"): test["samples_ts"] for test in tests}


def _output(command: Sequence[str], log: Path) -> str:
    """Runs a program to its end. Returns what it printed. Raises `LiveServerError` if it failed."""
    process = Process(command, log, {"PYTHONPATH": ROOT})
    process.start(piped=True)
    try:
        assert process.popen is not None
        printed = process.popen.communicate()[0]
        if process.popen.returncode or not printed.strip():
            process.check()
    finally:
        process.kill()
    return printed


ENGINES: Mapping[str, Callable[[Model, Lengths, Path, Report, Sequence[str]], Speeds]] = {
    "diskprefix": _diskprefix,
    "llama-server": partial(_llama_bench, "llama-server"),
    "ik_llama.cpp": partial(_llama_bench, "ik_llama.cpp"),
}


def measured(model: Model, lengths: Lengths, engines: Sequence[str], progress: Console) -> dict[str, Any]:
    """Returns the speeds of engines, each a name with arguments of its own, why others have none, the bandwidth (the
    best of all measured) in GB/s, and the bytes of weights that a token reads, None without a `.gguf` file."""
    speeds, left_out = dict[str, Speeds](), dict[str, str]()
    bandwidths = [read_bandwidth()]
    with TemporaryDirectory(prefix="diskprefix-step-") as folder:
        for number, engine in enumerate(engines):
            name, *more = shlex.split(engine)
            with step(progress, f"{model.name}, whole steps: {engine}") as note:
                try:
                    speeds[engine] = ENGINES[name](model, lengths, Path(folder) / f"{number}.log", note, more)
                except (LiveServerError, NotInstalled) as error:
                    left_out[engine] = str(error)
            bandwidths.append(read_bandwidth())
    token_bytes = bytes_of_a_token(model.file) if model.file.suffix == ".gguf" else None
    measured = {"lengths": lengths._asdict(), "speeds": speeds, "left_out": left_out}
    return measured | {"bandwidth_gb_s": max(bandwidths), "token_bytes": token_bytes}


def show(report: Mapping[str, Any], console: Console) -> None:
    """Prints medians, and how many times faster the first engine is."""
    bandwidth, token_bytes = report["bandwidth_gb_s"], report["token_bytes"]
    lengths = Lengths(**report["lengths"])
    table = new_table(
        f"whole steps, tokens/s: prefill of {lengths.prefill:,} tokens and decode of {lengths.decode}",
        left=("",),
        right=("prefill", "×", "decode", "×", "GB/s", "share"),
    )
    medians = {name: {part: median(of) for part, of in parts.items()} for name, parts in report["speeds"].items()}
    first = next(iter(medians.values()), {})
    for name, of in medians.items():
        row = [text for part in ("prefill", "decode") for text in (short(of[part]), f"{first[part] / of[part]:.2f}")]
        if token_bytes is not None:
            read = token_bytes * of["decode"] / 1e9
            row += [f"{read:.1f}", f"{read / bandwidth:.0%}"]
        # Without folders, which are long.
        table.add_row(" ".join(part for part in shlex.split(name) if "/" not in part), *row)
    console.print(table)
    for name, reason in report["left_out"].items():
        say(console, f"{name} was left out: {reason}")
    weights = "" if token_bytes is None else f"; a token reads {token_bytes / 1e9:.3g} GB of weights"
    say(console, "×: how many times faster the first is; GB/s, share: weights that decoding reads, of the bandwidth")
    say(console, f"all threads read memory at {bandwidth:.1f} GB/s{weights}")
