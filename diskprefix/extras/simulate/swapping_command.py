"""The runs of `diskprefix simulate --memory-limit`, with their table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from diskprefix.cli.tooling import plain, print_json, print_table
from diskprefix.errors import SettingsError
from diskprefix.extras.simulate.comparison import Case
from diskprefix.extras.simulate.simulator import Simulator
from diskprefix.extras.simulate.swapping import SwapReplay, SwapTotals
from diskprefix.extras.simulate.trace import RecordedDaemon, Trace, TraceRequest
from diskprefix.printable import printable_only
from diskprefix.units import counted, format_duration, format_size


def run(
    traces: Sequence[Trace],
    limits: Sequence[int],
    case_of: Callable[[RecordedDaemon], Case],
    *,
    as_json: bool,
) -> None:
    """Replays each trace under each limit, and shows what is swapped, waits and is restored. `case_of` returns the
    settings of a model's cache. Raises `SettingsError` for a trace without several models."""
    for trace in traces:
        if not trace.models:
            raise SettingsError(f"--memory-limit: {trace.name} is no recording of a daemon that has several models")
        if unknown := [name for name, model in trace.models.items() if not model.memory_bytes]:
            names = printable_only(", ".join(unknown))
            raise SettingsError(f"--memory-limit: {trace.name} does not say what memory {names} needs")
    rows = [SwapReplay(trace, limit, _restoring(trace, case_of)).run() for trace in traces for limit in limits]
    if as_json:
        print_json([row.as_dict() for row in rows])
        return
    for index, trace in enumerate(traces):
        if index:
            click.echo()
        needs = [f"{name} {format_size(one.memory_bytes)}, {one.load_s:.1f} s" for name, one in trace.models.items()]
        click.echo(f"{printable_only(trace.name)}: {counted(len(trace), 'request')}")
        click.echo(f"needs of memory, and times to load: {printable_only('; '.join(needs))}\n")
        _print_table([row for row in rows if row.trace == trace.name])


def _restoring(trace: Trace, case_of: Callable[[RecordedDaemon], Case]) -> Callable[[TraceRequest], int]:
    """Returns a function that simulates the cache of each model."""
    cases = {name: case_of(daemon) for name, daemon in trace.models.items()}
    simulators = {name: Simulator(case.policy, case.geometry) for name, case in cases.items()}
    return lambda request: simulators[request.model].step(request).restored


def _print_table(rows: Sequence[SwapTotals]) -> None:
    titles = ("limit", "loads", "swaps", "waits", "median", "p95", "longest", "refused", "restored", "after a wait")
    cells = [
        (
            plain(format_size(row.memory_limit)),
            f"{row.loads.total():,}",
            f"{row.swaps:,}",
            f"{len(row.waits_s):,}",
            *(format_duration(row.wait_s(part)) for part in (0.5, 0.95, 1.0)),
            f"{row.refused:,}",
            f"{row.restored_tokens / max(row.prompt_tokens, 1):.1%}",
            f"{row.waited_restored / max(row.waited_tokens, 1):.1%}",
        )
        for row in rows
    ]
    print_table(titles, cells, right=titles)
