"""The runs of `diskprefix simulate --machines`, with their table and their plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from diskprefix.cli.tooling import plain, print_json, print_table, progress
from diskprefix.errors import SettingsError
from diskprefix.extras.simulate.comparison import Case, Regime
from diskprefix.extras.simulate.machines import MachinesRow, Setup, replay
from diskprefix.extras.simulate.object_store import READS_PER_S, WRITES_PER_S, most_swept, sweep_s
from diskprefix.extras.simulate.plot import saved_figure
from diskprefix.extras.simulate.simulator import simulate
from diskprefix.extras.simulate.trace import Trace
from diskprefix.printable import printable_only
from diskprefix.units import counted, format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"off": "tab:grey", "seen-twice": "tab:blue", "all": "tab:orange"}
_STYLES = {"random": ":", "conversation": "-", "tenant": "--"}
_HOUR_S = 3600.0


def check(regimes: Sequence[Regime], policies: Sequence[str]) -> None:
    """Raises `SettingsError` for options that cannot be given with `--machines`."""
    if policies:
        raise SettingsError("--policy cannot be given with --machines; give its settings as options instead")
    if "checkpoints" in regimes:
        raise SettingsError("--regime checkpoints is not simulated with --machines")


def run(
    planned: Sequence[tuple[Trace, Sequence[Case]]], chosen: Sequence[Setup], *, as_json: bool, plot: Path | None
) -> None:
    """Replays each trace under each of its cases with the chosen setups, and shows the figures."""
    policies = [(trace, case) for trace, cases in planned for case in cases if case.simulate is simulate]
    runs = [(trace, setup, case) for trace, case in policies for setup in chosen]
    with progress("simulating", sum(len(trace) for trace, _, _ in runs), in_bytes=False) as advance:
        rows = [replay(trace, setup, case.policy, case.geometry, advance) for trace, setup, case in runs]
    if plot is not None:
        draw(rows, plot)
    if as_json:
        print_json([row.as_dict() for row in rows])
    else:
        show(rows)


def show(rows: Sequence[MachinesRow]) -> None:
    """Prints a table for each trace and group of settings, then the limits of the object store."""
    for index, (title, group) in enumerate(_groups(rows)):
        if index:
            click.echo()
        click.echo(f"{title}\n")
        _print_table(group)
    asked = [row for row in rows if row.setup.write != "off" and row.store.sizes]
    if asked:
        click.echo()
        for line in _limits(asked):
            click.echo(line)


def _groups(rows: Sequence[MachinesRow]) -> Iterator[tuple[str, list[MachinesRow]]]:
    """Yields groups of rows that differ only in their setup, each with a title."""
    groups: dict[str, list[MachinesRow]] = {}
    for row in rows:
        budget = row.policy.budget_bytes
        limit = "without a limit" if budget is None else f"{format_size(budget)} a machine"
        requests = counted(row.totals.requests, "request")
        kind = f"{row.geometry.state_kind}, {row.policy.scope}, {limit}"
        groups.setdefault(f"{printable_only(row.trace)}: {requests}; {kind}", []).append(row)
    yield from groups.items()


def _print_table(rows: Sequence[MachinesRow]) -> None:
    figures = [_figures(row) for row in rows]
    cells: list[Sequence[Any]] = []
    for row, found in zip(rows, figures, strict=True):
        if cells and row.setup.write == rows[0].setup.write and row.setup.spread == rows[0].setup.spread:
            cells.append([""])
        cells.append([plain(str(part)) for part in (row.setup.machines, row.setup.spread, row.setup.write)])
        cells[-1] = [*cells[-1], *found.values()]
    print_table(("machines", "spread", "remote", *figures[0]), cells, right=("machines", *figures[0]))


def _figures(row: MachinesRow) -> dict[str, str]:
    shown, has_tier = row.as_dict(), row.setup.write != "off"
    of_tier = {
        "fetched": format_size(shown["fetched_bytes"]),
        "put": format_size(shown["put_bytes"]),
        "reads/s": f"{shown['most_reads_per_s']:,}",
        "writes/s": f"{shown['most_writes_per_s']:,}",
        "$": f"{shown['request_dollars']:.2f}",
        "$ a month": f"{shown['stored_dollars_per_month']:.2f}",
    }
    return {
        "hits": f"{shown['hit_rate']:.1%}",
        "restored": f"{shown['restored_share']:.1%}",
        **{name: value if has_tier else "" for name, value in of_tier.items()},
    }


def _limits(rows: Sequence[MachinesRow]) -> Iterator[str]:
    """Yields lines about the limits of an object store, and how far the rows are from them. Each row has sent it
    requests."""
    tightest = min(rows, key=lambda row: row.store.traffic.headroom)
    traffic, setup = tightest.store.traffic, tightest.setup
    of_row = f"{counted(setup.machines, 'machine')}, {setup.spread}, {setup.write}"
    yield f"one partition of a bucket takes {READS_PER_S:,} reads and {WRITES_PER_S:,} writes a second:"
    busiest = f"the busiest second ({of_row}: {traffic.reads_per_s:,} and {traffic.writes_per_s:,})"
    if traffic.headroom >= 1:
        yield f"  {traffic.headroom:.1f} times {busiest}"
    else:
        yield f"  {busiest} needs {-(-1 // traffic.headroom):.0f} partitions, or is throttled"
    largest = max(rows, key=lambda row: len(row.store.sizes))
    num_objects = len(largest.store.sizes)
    most = most_swept(_HOUR_S)
    yield f"one sweeper lists the {counted(num_objects, 'object')} in about {sweep_s(num_objects):.1f} s,"
    yield f"  and {most:,} in an hour ({format_size(most * largest.store.stored_bytes // num_objects)} of such objects)"


def draw(rows: Sequence[MachinesRow], path: Path) -> None:
    """Draws the restored share, and the bytes moved through the tier, against the number of machines. Raises `OSError`.

    There are two panels for each trace and group of settings.
    """
    groups = list(_groups(rows))
    with saved_figure(path, 12.0, 3.8 * len(groups)) as figure:
        panels = figure.subplots(len(groups), 2, squeeze=False)
        for (title, group), (share, moved) in zip(groups, panels, strict=True):
            _draw_panel(share, group, lambda row: 100 * row.totals.restored_share)
            share.set(ylabel="restored prompt tokens, %", ylim=(0, 100))
            share.set_title(title, parse_math=False, loc="left")
            _draw_panel(moved, [row for row in group if row.setup.write != "off"], _moved_gib)
            moved.set(ylabel="fetched and put, GiB")
            moved.set_ylim(bottom=0)
        lines, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(lines, labels, loc="outside right upper", frameon=False, title="spread, remote")


def _moved_gib(row: MachinesRow) -> float:
    return (row.store.traffic.got_bytes + row.store.traffic.put_bytes) / 2**30


def _draw_panel(panel: Axes, rows: Sequence[MachinesRow], value: Callable[[MachinesRow], float]) -> None:
    from matplotlib.ticker import NullLocator

    curves: dict[tuple[str, str], list[MachinesRow]] = {}
    for row in rows:
        curves.setdefault((row.setup.spread, row.setup.write), []).append(row)
    for (spread, write), curve in curves.items():
        curve.sort(key=lambda row: row.setup.machines)
        numbers = [row.setup.machines for row in curve]
        style: Any = {"color": _COLORS[write], "linestyle": _STYLES[spread], "label": f"{spread}, {write}"}
        panel.plot(numbers, [value(row) for row in curve], marker="o", markersize=4, **style)
    panel.set_xscale("log", base=2)
    numbers = sorted({row.setup.machines for row in rows})
    panel.set_xticks(numbers, [str(number) for number in numbers])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlabel("machines")
    panel.grid(alpha=0.3)
