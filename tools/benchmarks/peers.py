"""The daemon beside other programs that serve a model: same machine, same prompts, one after the other in each round.

Every figure is the client's. A program is alone on the machine while it is measured; a product of matrices and a copy
are timed before each, which says how even the machine was.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch
from rich.console import Console

from tools.measuring.live_server import step
from tools.measuring.options import FOLDER, JSON
from tools.measuring.report import machine, median, new_table, print_report, say, short, show_machine
from tools.measuring.workspace import model_folder
from tools.models import real
from tools.peers.environments import NotInstalled, python_of
from tools.peers.known import PEERS, Model
from tools.peers.peer import Peer, PeerError, rate_together

SIZES = (64, 4000, 16000)
TOGETHER_SIZES = (64, 4000)
"""Five long prompts take the slowest peers half an hour."""
RESTART_SIZE = 4000
NUM_TOGETHER = 5
REPLY_TOKENS = 64
NEW_WORDS = 23
OURS = "diskprefix"
_ROOM = 256
_PROBE_SIZE = 2048
_PROBE_REPEATS = 5
_PLOT = Path(__file__).parents[1] / "peers" / "workers" / "plot.py"

WORDS = (Path(__file__).parents[1] / "prompts" / "words.txt").read_text(encoding="utf-8").split()


@dataclass(frozen=True)
class Sample:
    """One figure. `case` is `ready_s`, `memory_mib`, `cold_s`, `rate`, `together`, `exact_s` or `next_s`; `size` is the
    length of the prompt in words, about as many tokens."""

    peer: str
    case: str
    size: int
    value: float


def prompt_text(size: int, name: str) -> str:
    choose = random.Random(f"{size}-{name}")
    return "".join(f" {word}" for word in choose.choices(WORDS, k=size))


def extended(prompt: str) -> str:
    return prompt + "".join(f" {word}" for word in WORDS[:NEW_WORDS])


def measured(name: str, peer: Peer, sizes: Sequence[int], round_: int) -> Iterator[Sample]:
    """Yields what one peer shows in one round. It is killed at the end. Raises `PeerError`."""
    try:
        # The first start of all may convert the model, and reads files that the next one finds in memory.
        peer.start()
        peer.kill()
        yield Sample(name, "ready_s", 0, peer.start())
        peer.ask([prompt_text(32, f"first-{round_}")], 2)
        for size in sizes:
            yield from _alone(name, peer, size, round_)
        for size in (size for size in TOGETHER_SIZES if size in sizes):
            prompts = [prompt_text(size, f"together-{round_}-{i}") for i in range(NUM_TOGETHER)]
            yield Sample(name, "together", size, rate_together(peer.ask(prompts, REPLY_TOKENS)))
        yield Sample(name, "memory_mib", 0, peer.memory_bytes() / 2**20)
        if peer.restores:
            yield from _restarted(name, peer, min(RESTART_SIZE, max(sizes)), round_)
    finally:
        peer.kill()


def _alone(name: str, peer: Peer, size: int, round_: int) -> Iterator[Sample]:
    reply = peer.ask([prompt_text(size, f"alone-{round_}")], REPLY_TOKENS)[0]
    yield Sample(name, "cold_s", size, reply.ttft_s)
    yield Sample(name, "rate", size, reply.decode_rate)


def _restarted(name: str, peer: Peer, size: int, round_: int) -> Iterator[Sample]:
    prompt = prompt_text(size, f"restart-{round_}")
    peer.ask([prompt], 2)
    for case, text in (("exact_s", prompt), ("next_s", extended(prompt))):
        peer.kill()
        peer.start()
        yield Sample(name, case, size, peer.ask([text], 2)[0].ttft_s)


def probe() -> dict[str, float]:
    """Returns what the machine does at this moment: products of bf16 matrices, and copies between warm buffers."""
    weights = torch.ones(_PROBE_SIZE, _PROBE_SIZE, dtype=torch.bfloat16)
    target = torch.empty_like(weights)
    product_s, copy_s = _seconds(lambda: weights @ weights), _seconds(lambda: target.copy_(weights))
    num_bytes = 2 * weights.numel() * weights.itemsize
    return {"bf16_gflops": 2 * _PROBE_SIZE**3 / product_s / 1e9, "copy_gb_s": num_bytes / copy_s / 1e9}


def _seconds(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_PROBE_REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(model: Model, names: Sequence[str], rounds: int, folder: Path | None, console: Console) -> dict[str, Any]:
    """Returns the report as JSON values. A peer that fails is left out with its reason."""
    samples: list[Sample] = []
    probes: list[dict[str, float]] = []
    left_out: dict[str, str] = {}
    sizes = [size for size in SIZES if size + REPLY_TOKENS + _ROOM <= model.context]
    for round_ in range(rounds):
        for name in names:
            if name in left_out:
                continue
            with (
                step(console, f"round {round_ + 1} of {rounds}: {name}") as note,
                TemporaryDirectory(prefix="diskprefix-peers-", dir=folder) as workspace,
            ):
                probes.append(probe())
                try:
                    samples += measured(name, PEERS[name](model, Path(workspace), note), sizes, round_)
                except (PeerError, NotInstalled) as error:
                    left_out[name] = str(error)
                    note(f"left out: {error}")
    cells = _cells(samples)
    return {
        "benchmark": "peers",
        "model": model.name,
        "rounds": rounds,
        "sizes": sizes,
        "machine": machine(),
        "noise": {name: _spread([one[name] for one in probes]) for name in probes[0]},
        "peers": cells,
        "left_out": left_out,
        "plot": plot_figures(cells),
        "samples": [asdict(sample) for sample in samples],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"min": round(min(values), 1), "median": median(values), "max": round(max(values), 1)}


def _cells(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Returns the medians: for each peer, by the name of the case with its size."""
    values: dict[str, dict[str, list[float]]] = {}
    for one in samples:
        values.setdefault(one.peer, {}).setdefault(cell_name(one.case, one.size), []).append(one.value)
    return {peer: {cell: median(found) for cell, found in cells.items()} for peer, cells in values.items()}


def cell_name(case: str, size: int) -> str:
    return f"{case} {size}" if size else case


def plot_figures(cells: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the figures of each panel of the plot: by what a bar says, then by peer."""

    def of(case: str, label: str = "") -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for peer, figures in cells.items():
            for cell, value in figures.items():
                if cell.split()[0] == case:
                    found.setdefault(label or f"{cell.split()[1]} tokens", {})[peer] = value
        return found

    restart = of("exact_s", "same prompt") | of("next_s", "next turn")
    return {"cold_s": of("cold_s"), "restart_s": restart, "rate": of("rate"), "together": of("together")}


def show(report: dict[str, Any], console: Console) -> None:
    cells = report["peers"]
    titles = {
        "ready_s": "ready, s",
        "memory_mib": "memory, MiB",
        "cold_s": "cold, s",
        "rate": "tokens/s",
        "together": f"{NUM_TOGETHER} at once, tokens/s",
        "exact_s": "restart, same prompt, s",
        "next_s": "restart, next turn, s",
    }
    names = sorted({cell for of_peer in cells.values() for cell in of_peer}, key=_order(list(titles)))
    table = new_table(
        f"{report['model']}, medians of {report['rounds']}; in brackets {OURS} against it, above 1 is better",
        left=("",),
        right=tuple(cells),
    )
    for name in names:
        case, *size = name.split()
        title = f"{titles[case]}{f', {size[0]}' if size else ''}"
        table.add_row(title, *(_cell(name, peer, cells) for peer in cells))
    console.print(table)
    for peer, reason in report["left_out"].items():
        say(console, f"{peer} was left out: {reason}")
    spreads = (f"{name} {s['min']} / {s['median']} / {s['max']}" for name, s in report["noise"].items())
    say(console, f"machine, min / median / max: {', '.join(spreads)}")
    show_machine(report["machine"], console)


def _order(cases: Sequence[str]) -> Callable[[str], tuple[int, int]]:
    def key(name: str) -> tuple[int, int]:
        case, *size = name.split()
        return cases.index(case), int(size[0]) if size else 0

    return key


def _cell(name: str, peer: str, cells: Mapping[str, Mapping[str, float]]) -> str:
    value = cells[peer].get(name)
    if value is None:
        return "–"
    figure = short(value) if value >= 10 else f"{value:.3g}"
    ratio = better(name, cells.get(OURS, {}).get(name), value)
    return figure if peer == OURS or ratio is None else f"{figure} ({ratio:.2g})"


def better(name: str, ours: float | None, theirs: float) -> float | None:
    """Returns how many times better `ours` is: more of a rate, less of everything else."""
    if not ours:
        return None
    return ours / theirs if name.split()[0] in ("rate", "together") else theirs / ours


def known_model(name: str, progress: Console) -> Model:
    folder = model_folder(name, progress)
    with step(progress, f"the GGUF file of {name}") as note:
        gguf = real.gguf_file(name, note)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    longest = max(SIZES) + REPLY_TOKENS + _ROOM
    return Model(name, folder, gguf, min(config["max_position_embeddings"], longest))


def draw(report: dict[str, Any], path: Path, progress: Console) -> None:
    """Writes a plot as SVG. Raises `NotInstalled`, or `PeerError` with what the program that draws it said."""
    with step(progress, f"plot {path}") as note, TemporaryDirectory() as folder:
        source = Path(folder) / "report.json"
        source.write_text(json.dumps(report), encoding="utf-8")
        command = [str(python_of("plot", note)), str(_PLOT), str(source), str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise PeerError(f"no plot: {ended.stderr.strip().splitlines()[-1]}")


@click.command()
@click.option("--model", type=click.Choice(real.NAMES), default=real.DEFAULT, show_default=True)
@click.option("--peer", "names", multiple=True, type=click.Choice(list(PEERS)), help="Only these; repeatable.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Figures are medians of them.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot here, as SVG.")
@FOLDER
@JSON
def main(
    model: str, names: tuple[str, ...], rounds: int, plot: Path | None, folder: Path | None, as_json: bool
) -> None:
    """Measure the daemon beside transformers, llama.cpp and vLLM.

    Each is installed on first use, in an environment of its own; llama.cpp is compiled, which takes minutes. A round
    of all of them takes 10 to 40 minutes. Nothing else should run on the machine. Exits with 1 if one was left out.
    """
    progress = Console(stderr=True)
    torch.set_num_threads(machine()["cpus"])
    report = measure(known_model(model, progress), names or tuple(PEERS), rounds, folder, progress)
    print_report(report, as_json, show)
    if plot is not None:
        draw(report, plot, progress)
    sys.exit(1 if report["left_out"] else 0)
