"""The crash matrix: kills processes with SIGKILL while they work on a store, hundreds of times.

After each kill the store must open, `diskprefix verify` must find it clean, every entry that was acknowledged must be
restored byte for byte, whatever else is there must be whole, and no answer of a daemon may differ from the cold one.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import click
from rich.console import Console

from tests.faults.crash.phases import CompactPhase, DeletePhase, EvictPhase, ImportPhase, Round, SavePhase
from tests.faults.crash.servers import ServerPhase, SeveralPhase, StandbyPhase
from tools.measuring.live_server import step
from tools.measuring.options import FOLDER, JSON
from tools.measuring.report import machine, new_table, print_report


class Phase(Protocol):
    def __init__(self, folder: Path, rng: random.Random) -> None: ...

    def rounds(self, kills: int) -> Iterator[Round]: ...


PHASES: dict[str, tuple[type[Phase], int]] = {
    "save": (SavePhase, 60),
    "evict": (EvictPhase, 60),
    "compact": (CompactPhase, 30),
    "import": (ImportPhase, 20),
    "delete": (DeletePhase, 40),
    "servers": (ServerPhase, 15),
    "standby": (StandbyPhase, 6),
    "several": (SeveralPhase, 6),
}
"""The processes that are killed, each with its share of the kills."""
KILLS = sum(kills for _, kills in PHASES.values())


def share(kills: int, phases: tuple[str, ...]) -> dict[str, int]:
    """Returns how many of `kills` each phase gets, at least one."""
    weights = {name: PHASES[name][1] for name in phases}
    return {name: max(1, round(kills * weight / sum(weights.values()))) for name, weight in weights.items()}


def run(folder: Path, kills: dict[str, int], seed: int, console: Console) -> list[Round]:
    rounds: list[Round] = []
    for name, number in kills.items():
        make, _ = PHASES[name]
        with step(console, f"{name}: {number} kills") as note:
            for done in make(folder / name, random.Random(f"{seed} {name}")).rounds(number):
                rounds.append(done)
                if done.failures or console.is_terminal:
                    note("; ".join(done.failures) or f"{len(rounds)} kills so far")
    return rounds


def report_of(rounds: list[Round], seed: int, seconds: float) -> dict[str, Any]:
    names = list(dict.fromkeys(done.phase for done in rounds))
    return {
        "benchmark": "crash matrix",
        "machine": machine(),
        "seed": seed,
        "seconds": round(seconds, 1),
        "phases": {name: _summary([done for done in rounds if done.phase == name]) for name in names},
        "total": _summary(rounds),
        "rounds": [asdict(done) for done in rounds],
    }


def _summary(rounds: list[Round]) -> dict[str, Any]:
    doing = Counter(done.doing for done in rounds if done.doing is not None)
    return {
        "kills": len(rounds),
        "in_the_middle": sum(doing.values()),
        "doing": dict(doing.most_common()),
        "restored": sum(done.restored for done in rounds),
        "evicted_blocks": sum(done.evicted for done in rounds),
        "failed": sum(bool(done.failures) for done in rounds),
    }


def show(report: dict[str, Any], console: Console) -> None:
    title = f"SIGKILL at random moments, seed {report['seed']}"
    table = new_table(title, left=("phase",), right=("kills", "in the\nmiddle", "restored,\nall equal", "failed"))
    table.add_column("of what")
    for name, found in (*report["phases"].items(), ("all", report["total"])):
        table.add_row(
            name,
            f"{found['kills']}",
            f"{found['in_the_middle']}",
            f"{found['restored']:,}",
            f"{found['failed']}",
            "" if name == "all" else _doing(found),
        )
    console.print(table)
    console.print(f"{report['seconds']:.0f} s", highlight=False)
    for done in report["rounds"]:
        for failure in done["failures"]:
            console.print(f"{done['phase']} after {done['moment_s']:.3f} s: {failure}", highlight=False, markup=False)


def _doing(found: dict[str, Any]) -> str:
    deeds = [f"{deed} {number}" for deed, number in found["doing"].items()]
    return ", ".join([*deeds, f"{found['evicted_blocks']} blocks evicted"] if found["evicted_blocks"] else deeds)


@click.command()
@click.option("--kills", type=click.IntRange(min=1), default=KILLS, show_default=True, help="How many in all.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the moments.")
@click.option(
    "--phase",
    "phases",
    type=click.Choice(list(PHASES)),
    multiple=True,
    default=tuple(PHASES),
    show_default="all",
    help="What is killed; may be given several times.",
)
@FOLDER
@JSON
def main(kills: int, seed: int, phases: tuple[str, ...], folder: Path | None, as_json: bool) -> None:
    """Kill processes while they work on a store, and check what they leave.

    Exits with 1 if anything was lost, damaged or answered otherwise. Takes about nine minutes on two cores, and about
    1 GB of disk.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="diskprefix-crash-", dir=folder) as workspace:
        rounds = run(Path(workspace), share(kills, phases), seed, Console(stderr=True))
    report = report_of(rounds, seed, time.monotonic() - started)
    print_report(report, as_json, show)
    sys.exit(1 if report["total"]["failed"] else 0)
