"""The tables of `diskprefix simulate`: one for each trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import click

from diskprefix.cli.tooling import counted
from diskprefix.printable import printable_only
from diskprefix.settings import format_size
from diskprefix.simulate.comparison import Row
from diskprefix.simulate.trace import Trace


def show(traces: Sequence[Trace], rows: Sequence[Row]) -> None:
    """Print a table for each trace. The `rows` of a trace bear its name."""
    for index, trace in enumerate(traces):
        of_trace = [row for row in rows if row.trace == trace.name]
        requests, tokens = counted(of_trace[0].requests, "request"), counted(of_trace[0].prompt_tokens, "prompt token")
        if index:
            click.echo()
        click.echo(f"{printable_only(trace.name)}: {requests}, {tokens}")
        click.echo(_assumed(of_trace))
        for line in _table(of_trace):
            click.echo(line)
        for line in _asked(trace):
            click.echo(line)


def _assumed(rows: Sequence[Row]) -> str:
    """The assumptions behind the figures, whether they are recorded, given or the defaults."""
    first = next(row for row in rows if row.policy is None)
    parts = [f"blocks of {first.block_size} tokens, {first.min_tokens} at least"]
    for row in {row.regime: row for row in rows}.values():
        checkpoint = f" and {format_size(row.state_bytes)} a checkpoint" if row.state_bytes else ""
        parts.append(f"{row.regime} state of {format_size(row.bytes_per_token)} a token{checkpoint}")
    return f"assumed: {'; '.join(parts)}; prefill of {first.tokens_per_s:,.0f} tokens/s"


def _asked(trace: Trace) -> Iterator[str]:
    """What single requests asked for themselves. It holds in every row."""
    asked: Counter[str] = Counter()
    for request in trace:
        asked["have a scope of their own"] += request.scope is not None
        asked["have marks (cache_control)"] += bool(request.prompt.marks)
        asked["only read (save: false)"] += not request.save
    found = [f"{number:,} {what}" for what, number in asked.items() if number]
    if found:
        yield f"of the requests, in every row but upper-bound: {', '.join(found)}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """A section for each regime and budget, under common columns."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        budget = "unlimited" if row.budget_bytes is None else format_size(row.budget_bytes)
        sections.setdefault(f"{row.regime}, {budget}", []).append(row)
    figures = {row: _figures(row) for row in rows}
    widths = {title: max(len(title), *(len(figures[row][title]) for row in rows)) for title in figures[rows[0]]}
    name_width = max(len(printable_only(row.label)) for row in rows)

    def line(name: str, cells: Iterable[str]) -> str:
        padded = ("  " + cell.rjust(width) for cell, width in zip(cells, widths.values(), strict=True))
        return printable_only(name).ljust(name_width) + "".join(padded)

    yield ""
    yield click.style(line("scope", widths), bold=True)
    for title, section in sections.items():
        yield ""
        yield click.style(title, bold=True)
        yield from (line(row.label, figures[row].values()) for row in section)


def _figures(row: Row) -> dict[str, str]:
    return {
        "hits": f"{row.hit_rate:.1%}",
        "restored": f"{row.restored_share:.1%}",
        "written": f"{row.written_share:.1%}",
        "bytes": format_size(row.written_bytes),
        "evictions": f"{row.evictions:,}",
        "saved": _duration(row.seconds_saved),
    }


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
