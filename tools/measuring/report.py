"""The common parts of reports: facts of the machine, medians, tables, verdicts."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from diskprefix.control_groups import num_cpus


def machine() -> dict[str, Any]:
    """Returns what a figure depends on besides the code: processors, versions and the load of the last minute."""
    return {
        "platform": platform.platform(),
        "cpus": num_cpus(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def show_machine(facts: Mapping[str, Any], console: Console) -> None:
    say(
        console,
        f"{facts['cpus']} cpus, torch {facts['torch']}, Python {facts['python']}, {facts['platform']}; "
        f"load {facts['load_average_1min']}",
    )


def say(console: Console, line: str) -> None:
    """Prints one line as it is: rich does not break it and does not colour its numbers."""
    console.print(line, highlight=False, soft_wrap=True)


def new_table(title: str, *, left: Iterable[str] = (), right: Iterable[str] = ()) -> Table:
    """Returns a table with the columns `left`, aligned to the left, and then the columns `right`, of numbers."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0), title_justify="left", show_edge=False)
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def verdict(what: str, figure: str, goal: str, holds: bool) -> dict[str, Any]:
    """Returns a row of `verdict_table`: the name of the figure, the figure, its goal, and whether it meets the goal."""
    return {"what": what, "figure": figure, "goal": goal, "holds": holds}


def at_most(what: str, figure: float, goal: float) -> dict[str, Any]:
    return verdict(what, f"{figure:,.2f}", f"≤ {goal:,.2f}", figure <= goal)


def none_of(what: str, number: int) -> dict[str, Any]:
    return verdict(what, str(number), "0", number == 0)


def verdict_table(title: str, rows: Iterable[Mapping[str, Any]]) -> Table:
    table = new_table(title, left=("",), right=("measured", "goal", ""))
    for row in rows:
        table.add_row(row["what"], row["figure"], row["goal"], "✓" if row["holds"] else "✗")
    return table


def short(number: float) -> str:
    """Returns a number for a table: without decimals from 100 on, else with one."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def median(values: Iterable[float]) -> float:
    """Returns the median, rounded to three decimals. Raises `statistics.StatisticsError` if there are no values."""
    return round(statistics.median(values), 3)


def print_report(report: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any], Console], None]) -> None:
    """Prints a report to standard output: as JSON, or as the tables that `show` makes of it."""
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, Console())
