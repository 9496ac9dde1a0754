"""How well the policies choose, by simulation: `tools/bench policy COMMAND --data DIR`.

Workloads are those of `workloads.py`, whose data lie in folders below DIR, and those of the project's own generators,
which need none. Tables are Markdown; shares are of all prompt tokens, in percent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import click
from rich import box
from rich.console import Console
from rich.table import Table

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.extras.simulate.comparison import REGIMES, Regime
from diskprefix.extras.simulate.plot import check_plot
from diskprefix.extras.simulate.trace import Trace
from tools.measuring.options import DATA, JSON
from tools.research.disturbed import robustness
from tools.research.policy_runs import (
    OWN,
    PRESETS,
    REAL,
    SHAPES,
    Row,
    goals,
    open_workload,
    presets,
    sharing,
    sweep,
    windows,
)
from tools.research.window_plot import draw_windows


class Report:
    """The rows of a table, which is printed when it is complete; each row is also a line of progress."""

    def __init__(self, title: str, as_json: bool) -> None:
        self.rows: list[Row] = []
        self._title = title
        self._as_json = as_json

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            print(" ".join(str(value) for value in row.values()), file=sys.stderr, flush=True)

    def show(self) -> None:
        if self._as_json:
            click.echo(json.dumps(self.rows, indent=2))
            return
        table = Table(box=box.MARKDOWN, title=self._title)
        for key in self.rows[0] if self.rows else ():
            table.add_column(key.strip(), justify="left" if isinstance(self.rows[0][key], str) else "right")
        for row in self.rows:
            table.add_row(*(str(value) for value in row.values()))
        Console(width=400, highlight=False).print(table)


def _options(names: Sequence[str], requests: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in (
            JSON,
            click.option(
                "--requests",
                type=click.IntRange(min=1),
                default=requests,
                show_default=True,
                help="Length of a made-up workload; of a published one no more than this are replayed.",
            ),
            click.option(
                "--workload",
                "names",
                multiple=True,
                type=click.Choice(names),
                metavar="NAME",
                default=names,
                help=f"May be given several times. [default: all of {', '.join(names)}]",
            ),
            DATA,
        ):
            command = option(command)
        return command

    return add


_ALL = 1_000_000


def _opened(names: Sequence[str], data: Path, requests: int) -> Iterator[Trace]:
    for name in names:
        yield open_workload(name, data, min(requests, 1000)).head(requests)


@click.group()
def main() -> None:
    """Simulate how well the scopes choose, on published workloads and on made-up ones.

    Published workloads lie in folders below --data; without them, name made-up ones with --workload. The tables are
    Markdown.
    """


@main.command(name="goals")
@_options((*REAL, *OWN), _ALL)
def goals_command(data: Path, names: Sequence[str], requests: int, as_json: bool) -> None:
    """What auto:30 restores and writes, beside full, the upper bound and whole snapshots."""
    report = Report("restored and written, % of all prompt tokens, no budget (cp: checkpoints)", as_json)
    for trace in _opened(names, data, requests):
        report.add([goals(trace)])
    report.show()


@main.command(name="sharing")
@_options((*REAL, *OWN), _ALL)
def sharing_command(data: Path, names: Sequence[str], requests: int, as_json: bool) -> None:
    """How much smaller the store is than a file with the whole state for each prompt."""
    report = Report("state of the embedded model, without compression", as_json)
    for trace in _opened(names, data, requests):
        report.add(sharing(trace))
    report.show()


@main.command(name="sweep")
@_options((*REAL, *OWN), 1500)
@click.option("--regime", "regimes", multiple=True, type=click.Choice(REGIMES), default=REGIMES)
@click.option("--scope", "scopes", multiple=True, default=("full", "auto:30"), show_default=True)
def sweep_command(
    data: Path, names: Sequence[str], requests: int, as_json: bool, regimes: Sequence[Regime], scopes: Sequence[str]
) -> None:
    """What small budgets restore, by the score that eviction goes by.

    Budgets are 1 %, 5 %, 20 % and all of what the workload takes without one.
    """
    report = Report("restored, % of all prompt tokens, by the score that eviction goes by", as_json)
    for trace in _opened(names, data, requests):
        for regime in regimes:
            for scope in scopes:
                report.add(sweep(trace, regime, parse_scope(scope, param="--scope")))
    report.show()


@main.command(name="windows")
@_options(SHAPES, 400)
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the curves to a .svg or .png.")
def windows_command(data: Path, names: Sequence[str], requests: int, as_json: bool, plot: Path | None) -> None:
    """What N of auto:N does: hits, selected tokens, restored and written share."""
    del data
    if plot is not None:
        check_plot(plot)
    report = Report("hits % of requests, selected tokens of the average prompt, restored and written %", as_json)
    for name in names:
        report.add(windows(name, requests))
    if plot is not None:
        draw_windows(report.rows, plot)
    report.show()


@main.command(name="robustness")
@_options((*OWN, *REAL), 500)
def robustness_command(data: Path, names: Sequence[str], requests: int, as_json: bool) -> None:
    """What a disturbed window of recent prompts costs, beside full with the same budget."""
    report = Report("restored, % of all prompt tokens, with windows disturbed", as_json)
    for trace in _opened(names, data, requests):
        report.add(robustness(trace, regime, share) for regime in REGIMES for share in (1.0, 0.2))
    report.show()


@main.command(name="presets")
@_options(tuple(PRESETS), 1500)
def presets_command(data: Path, names: Sequence[str], requests: int, as_json: bool) -> None:
    """Each preset on the workloads that it is for, beside the defaults and other settings.

    --workload takes the names of presets here.
    """
    report = Report("presets", as_json)
    for name in names:
        for trace in _opened(PRESETS[name], data, requests):
            report.add(presets(name, trace))
    report.show()
