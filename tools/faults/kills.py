"""Kills processes at random moments of a long prompt: how much of it does the next process find?

Tiny models compute at the pace of a slow machine, so that the prompt takes seconds; all else is what a daemon runs. A
kill may lose five seconds or 1,024 tokens of computing, whichever is more. The bytes are those that a process writes
for the prompt if nobody kills it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

import click
import numpy as np
from rich.console import Console

from tests import forked
from tests.faults.kills import KINDS, Kind, Loss, Task, compute_paced, kill_at
from tools.measuring.options import FOLDER, JSON, seed_option
from tools.measuring.report import machine, median, new_table, show_machine


def losses_of(
    kind: Kind, folder: Path, moments: Sequence[float], num_tokens: int, speed: float, lanes: int
) -> list[Loss]:
    """Returns what each kill loses, in the order of the moments."""
    tasks = [Task(kind, folder / str(number), num_tokens, number) for number in range(len(moments))]
    for task in tasks:
        task.folder.mkdir(parents=True)
    with ThreadPoolExecutor(lanes) as pool:
        return list(pool.map(kill_at, tasks, moments, repeat(speed)))


def bytes_of_whole(kind: Kind, folder: Path, num_tokens: int, speed: float) -> int:
    """Returns the bytes that a prompt which ends writes."""
    task = Task(kind, folder, num_tokens)
    task.folder.mkdir(parents=True)
    if forked.run(compute_paced, task, speed):
        raise click.ClickException(f"{kind.name}: the process ended with an error")
    written: int = task.said()["bytes"]
    return written


@click.command()
@click.option(
    "--kills", default=100, show_default=True, type=click.IntRange(min=1), help="Kills of each kind of model."
)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="Repeatable; default: all.")
@click.option("--tokens", default=6000, show_default=True, help="Tokens of a prompt.")
@click.option("--speed", default=400.0, show_default=True, help="Tokens that a second computes.")
@click.option("--lanes", default=4, show_default=True, help="Prompts at the same time.")
@seed_option("kills", "Of the moments.")
@FOLDER
@JSON
def main(
    kills: int,
    kinds: tuple[str, ...],
    tokens: int,
    speed: float,
    lanes: int,
    seed: int,
    folder: Path | None,
    as_json: bool,
) -> None:
    """Kill processes at random moments of a long prompt, and count what the next one finds.

    Exits with 1 if a kill loses more than five seconds and more than 1,024 tokens of computing.
    """
    console, table = (
        Console(stderr=True),
        new_table(
            f"Kills in a prompt of {tokens:,} tokens, {speed:,.0f} computed in a second",
            left=("model",),
            right=(
                "kills",
                "computed",
                "found",
                "lost, median",
                "lost, most",
                "seconds, most",
                "too much",
                "MB written",
            ),
        ),
    )
    show_machine(machine(), console)
    samples = dict[str, object]()
    num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="diskprefix-kills-", dir=folder) as work:
        for name in kinds or KINDS:
            kind, own = KINDS[name], Path(work) / name.replace(", ", "-")
            moments = np.random.default_rng([seed, len(samples)]).random(kills).tolist()
            losses = losses_of(kind, own, moments, tokens, speed, lanes)
            written = bytes_of_whole(kind, own / "whole", tokens, speed)
            too_much = sum(not loss.is_small for loss in losses)
            num_wrong += too_much
            computed, restored = sum(loss.computed for loss in losses), sum(loss.found for loss in losses)
            lost, seconds = [loss.tokens for loss in losses], max(loss.seconds for loss in losses)
            figures = (kills, computed, restored, round(median(lost)), max(lost))
            table.add_row(name, *(f"{n:,}" for n in figures), f"{seconds:.1f}", str(too_much), f"{written / 1e6:.2f}")
            samples[name] = {"bytes": written, "losses": losses}
            console.print(f"{name}: {too_much} of {kills} lost too much", highlight=False)
    if as_json:
        click.echo(json.dumps(samples, indent=2))
    else:
        Console().print(table)
    sys.exit(1 if num_wrong else 0)
