"""The daemon beside other programs that serve a model: same machine, same prompts, one after the other in each round.

    tools/bench peers --results peers.json                                  # everything, three rounds
    tools/bench peers --results peers.json --peer llama.cpp --rounds 1      # a part of it; the file has them all
    tools/bench peers --results peers.json --size 64 --size 4000            # without the prompts that take minutes

Every figure is the client's. A program is alone on the machine while it is measured.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console

from diskprefix.progress import Report
from tools.measuring.installing import NotInstalled
from tools.measuring.live_server import step
from tools.measuring.options import FOLDER, JSON, MODELS
from tools.measuring.prompts import WORDS, extended, prompt_text
from tools.measuring.report import new_table, print_report, say, show_machine
from tools.measuring.workspace import model_folder
from tools.models import real
from tools.peers.known import PEERS, Model
from tools.peers.peer import Peer, PeerError, rate_together
from tools.peers.results import Figure, Results, order, shown

REPLY_TOKENS = {64: 64, 4000: 64, 16000: 16}
"""By the size of the prompt: after a long one, a token takes long."""
TOGETHER_SIZES = (64, 4000)
"""Five longer prompts take too long for those that compute them five times."""
RESTART_SIZE = 4000
NUM_TOGETHER = 5
_ROOM = 256

TITLES = {
    "ready_s": "ready, s",
    "memory_mib": "memory, MiB",
    "cold_s": "cold, s",
    "rate": "tokens/s",
    "together": f"{NUM_TOGETHER} at once, tokens/s",
    "exact_s": "restart, same prompt, s",
    "next_s": "restart, next turn, s",
}


def measured(peer: Peer, sizes: Sequence[int], round_: int) -> Iterator[Figure]:
    """Yields the figures of one peer in one round. It is killed at the end. Raises `PeerError`."""
    try:
        peer.start()
        peer.ask([prompt_text(32, f"first-{round_}")], 2)
        restored = max((size for size in sizes if size <= RESTART_SIZE), default=max(sizes))
        for size in sizes:
            yield from _alone(peer, size, f"alone-{round_}")
            if size == restored and peer.restores:
                yield from _alone(peer, size, f"first-turn-{round_}")
        for size in (size for size in TOGETHER_SIZES if size in sizes):
            yield from _together(peer, size, round_)
        yield Figure("memory_mib", 0, peer.process.memory_bytes() / 2**20)
        yield from _restarted(peer, restored, round_)
    finally:
        peer.kill()


def _alone(peer: Peer, size: int, name: str) -> Iterator[Figure]:
    reply = peer.ask([prompt_text(size, name)], REPLY_TOKENS[size])[0]
    yield Figure("cold_s", size, reply.ttft_s)
    yield Figure("rate", size, reply.decode_rate)


def _together(peer: Peer, size: int, round_: int) -> Iterator[Figure]:
    """Asks for prompts that begin with an answered one: decoding is measured, and restored prompts need no prefill."""
    prompts = [prompt_text(size, f"alone-{round_}") + f" {word}" for word in WORDS[:NUM_TOGETHER]]
    yield Figure("together", size, rate_together(peer.ask(prompts, REPLY_TOKENS[size])))


def _restarted(peer: Peer, size: int, round_: int) -> Iterator[Figure]:
    """Kills it and asks for prompts that were answered before: two, as the second would find the first in memory.

    The first start of a round is not counted. It may convert the model, and reads files that this one finds in memory.
    """
    peer.kill()
    yield Figure("ready_s", 0, peer.start())
    if peer.restores:
        for case, prompt in (
            ("exact_s", prompt_text(size, f"alone-{round_}")),
            ("next_s", extended(prompt_text(size, f"first-turn-{round_}"))),
        ):
            yield Figure(case, size, peer.ask([prompt], 2)[0].ttft_s)


def measure(
    model: Model,
    sizes: Sequence[int],
    names: Sequence[str],
    rounds: int,
    results: Results,
    folder: Path | None,
    console: Console,
) -> list[str]:
    """Adds the missing results. Returns the peers that failed, which are left out with their reasons."""
    failed: list[str] = []
    for round_ in range(rounds):
        for name in names:
            if name in failed or results.has(model.name, name, round_):
                continue
            with (
                step(console, f"{model.name}, round {round_ + 1} of {rounds}: {name}") as note,
                TemporaryDirectory(prefix="diskprefix-peers-", dir=folder) as workspace,
            ):
                try:
                    figures = list(told(measured(PEERS[name](model, Path(workspace), note), sizes, round_), note))
                except (PeerError, NotInstalled) as error:
                    failed.append(name)
                    results.leave_out(model.name, name, str(error))
                    note(f"left out: {error}")
                else:
                    results.add(model.name, name, round_, figures)
                    results.end(model.name, name)
    return failed


def told(figures: Iterator[Figure], note: Report) -> Iterator[Figure]:
    """Passes figures on, and says when each is there."""
    began = time.perf_counter()
    for figure in figures:
        note(f"{time.perf_counter() - began:4.0f} s: {figure.cell} {shown(figure.value)}")
        yield figure


def show(report: dict[str, Any], console: Console) -> None:
    for model, cells in report["models"].items():
        title = f"{model}; ratio: how many times better diskprefix is"
        table = new_table(title, left=("", "peer"), right=("min", "median", "max", "ratio"))
        for cell in sorted(cells, key=partial(order, TITLES)):
            case, *size = cell.split()
            for i, (peer, spread) in enumerate(cells[cell].items()):
                name = "" if i else ", ".join([TITLES[case], *size])
                ratio = f"{spread['ratio']:.2g}" if "ratio" in spread else ""
                table.add_row(name, peer, *(shown(spread[of]) for of in ("min", "median", "max")), ratio)
        console.print(table)
    for model, reasons in report["left_out"].items():
        for peer, reason in reasons.items():
            say(console, f"{model}: {peer} was left out: {reason}")
    show_machine(report["machine"], console)


def known_model(name: str, wanted: Sequence[int], progress: Console) -> tuple[Model, list[int]]:
    """Returns a model with room for the longest of the sizes that it takes, and these sizes."""
    folder = model_folder(name, progress)
    with step(progress, f"the GGUF file of {name}") as note:
        gguf = real.gguf_file(name, note)
    positions = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    rooms = {size: size + REPLY_TOKENS[size] + _ROOM for size in wanted}
    sizes = [size for size, room in rooms.items() if room <= positions]
    return Model(name, folder, gguf, max(rooms[size] for size in sizes)), sizes


@click.command()
@MODELS
@click.option(
    "--peer",
    "names",
    multiple=True,
    default=tuple(PEERS),
    type=click.Choice(list(PEERS)),
    help="Only these; repeatable.",
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=click.Choice([str(size) for size in REPLY_TOKENS]),
    help="Only prompts of these lengths; repeatable.",
)
@click.option("--rounds", type=click.IntRange(min=0), default=3, show_default=True, help="0: show what the file has.")
@click.option(
    "--results",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Add to this file each round that it has not yet, and show all that it has.",
)
@FOLDER
@JSON
def main(
    models: tuple[str, ...],
    names: tuple[str, ...],
    sizes: tuple[str, ...],
    rounds: int,
    results: Path | None,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Measure the daemon beside transformers, llama.cpp and vLLM.

    Each is installed on first use, in an environment of its own. A round of all takes half an hour; one that is
    stopped goes on with `--results`. Nothing else should run on the machine. Exits with 1 if a peer was left out.
    """
    progress = Console(stderr=True)
    found = Results(results)
    wanted = sorted(map(int, sizes)) or list(REPLY_TOKENS)
    failed = [
        name
        for model in (models if rounds else ())
        for name in measure(*known_model(model, wanted, progress), names, rounds, found, folder, progress)
    ]
    report = found.report()
    print_report(report, as_json, show)
    sys.exit(1 if failed else 0)
