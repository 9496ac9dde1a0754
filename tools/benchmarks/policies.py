"""Replays workloads with little room and with enough: `tools/bench policies --data FOLDER --before CHECKOUT`.

A replay is a process of its own, so that the code of another commit can run. The budget of a store is a part of the
bytes that the scope `full` keeps of the workload.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click
from rich.console import Console

from diskprefix.control_groups import num_cpus
from diskprefix.units import parse_size
from tools.measuring.options import JSON
from tools.measuring.report import new_table, print_report
from tools.workloads.generated import GENERATED
from tools.workloads.published import PUBLISHED
from tools.workloads.replay import GEOMETRIES

Row: TypeAlias = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (1, 2, 8)
"""The store has room for all that `full` keeps, for a half, and for an eighth."""
BEFORE = "before"


def replayed(asked: Row, runs: Sequence[Row], code: Path) -> list[Row]:
    """Returns the rows of runs with the package in the folder `code`."""
    environment = {**os.environ, "PYTHONPATH": str(code), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tools.workloads.replay"],
        input=json.dumps({**asked, "runs": runs}),
        text=True,
        stdout=subprocess.PIPE,
        env=environment,
        check=True,
    )
    return [{"workload": asked["workload"], **json.loads(line)} for line in done.stdout.splitlines()]


def rows_of(name: str, *, data: Path, state: str, memory: int, code: Mapping[str, Path]) -> list[Row]:
    """Returns the rows of a workload: each code's `auto:30` and `full`, and the optimum, for each room."""
    asked = {"workload": name, "data": str(data), "state": state}
    own = next(iter(code.values()))
    whole = replayed(asked, [{"scope": "full", "budget": None, "memory": 0}], own)[0]["peak"]
    rows = []
    for label, folder in code.items():
        scopes = ("auto:30", "full") if label == BEFORE or len(code) == 1 else ("auto:30",)
        scopes = scopes if label == BEFORE else (*scopes, "optimum")
        runs = [
            {"code": label, "room": room, "scope": scope, "budget": budget_of(whole, room), "memory": memory}
            for room in ROOMS
            for scope in scopes
        ]
        rows += replayed(asked, runs, folder)
    return rows


def budget_of(num_bytes: int, room: int) -> int | None:
    """Returns the budget with room for a part of these bytes: the inverse of `eviction.usable_bytes`."""
    return None if room == 1 else int((num_bytes / room + 2**20) / 0.9) + 16


def show(report: Row, console: Console) -> None:
    table = new_table(
        "restored, after the first tenth of the requests",
        left=("workload", "room", "code", "scope"),
        right=("restored", "GB written", "GB again"),
    )
    for row in report["rows"]:
        room = "all" if row["room"] == 1 else f"1/{row['room']}"
        restored = row["restored"] if row["room"] == 1 else row["late"]
        gigabytes = [f"{row[key] / 1e9:.2f}" for key in ("written", "again")]
        table.add_row(row["workload"], room, row["code"], row["scope"], f"{restored:.1%}", *gigabytes)
    console.print(table)


def named(names: Sequence[str], data: Path) -> Iterator[str]:
    """Yields the workloads to replay. Those without data in `data` are left out."""
    for name in names or (*PUBLISHED, *GENERATED):
        if name in GENERATED or (data / name).is_dir():
            yield name
        else:
            print(f"policies: {name} is left out: {data} has no folder of its name", file=sys.stderr)


@click.command()
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="The folder with the published workloads, each in a folder of its name.",
)
@click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A checkout of another commit, to replay the same with its package.",
)
@click.option("--workload", "names", multiple=True, type=click.Choice([*PUBLISHED, *GENERATED]))
@click.option("--state", type=click.Choice(list(GEOMETRIES)), default="token", show_default=True)
@click.option("--memory", default="0", show_default=True, help="KV memory, such as 1GiB.")
@JSON
def main(data: Path, before: Path | None, names: tuple[str, ...], state: str, memory: str, as_json: bool) -> None:
    """Replay workloads under `auto:30`, `full`, and an optimum that knows the future, with three sizes of the store."""
    with tempfile.TemporaryDirectory() as work:
        code = {"now": ROOT}
        if before is not None:
            other = Path(work)
            (other / "tools").symlink_to(ROOT / "tools")
            (other / "diskprefix").symlink_to(before.resolve() / "diskprefix")
            code[BEFORE] = other
        num_bytes = parse_size(memory, param="--memory") if memory != "0" else 0
        rows_by = partial(rows_of, data=data.resolve(), state=state, memory=num_bytes, code=code)
        with ThreadPoolExecutor(num_cpus()) as pool:
            rows = [row for own in pool.map(rows_by, named(names, data)) for row in own]
    print_report({"rows": rows}, as_json, show)
