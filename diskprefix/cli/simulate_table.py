"""The tables of `diskprefix simulate`: one for each trace, to be read at 80 columns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import click

from diskprefix.cli.tooling import counted, shortened, terminal_width
from diskprefix.printable import printable_only
from diskprefix.settings import format_size
from diskprefix.simulate.comparison import Row
from diskprefix.simulate.trace import RecordedDaemon, Trace

_GAP = "  "
_WIDEST = 120
"""Columns where no terminal says how many there are."""
_NARROWEST_NAME = 15


def show(traces: Sequence[Trace], rows: Sequence[Row]) -> None:
    """Print a table for each trace. The `rows` of a trace bear its name."""
    for index, trace in enumerate(traces):
        of_trace = [row for row in rows if row.trace == trace.name]
        requests, tokens = counted(of_trace[0].requests, "request"), counted(of_trace[0].prompt_tokens, "prompt token")
        if index:
            click.echo()
        click.echo(f"{printable_only(trace.name)}: {requests}, {tokens}")
        click.echo(_assumed(trace, of_trace))
        for line in _table(of_trace):
            click.echo(line)
        for line in _asked(trace):
            click.echo(line)


def _assumed(trace: Trace, rows: Sequence[Row]) -> str:
    """The assumptions behind the figures, and which of them the recording says."""
    daemon = trace.daemon or RecordedDaemon(block_size=0, min_tokens=0)
    first = next(row for row in rows if row.policy is None)
    is_recorded = (first.block_size, first.min_tokens) == (daemon.block_size, daemon.min_tokens)
    parts = [_marked(f"blocks of {first.block_size} tokens, {first.min_tokens} at least", is_recorded)]
    for row in {row.regime: row for row in rows}.values():
        checkpoint = f" and {format_size(row.state_bytes)} a checkpoint" if row.state_bytes else ""
        is_recorded = (row.bytes_per_token, row.state_bytes) == (daemon.bytes_per_token, daemon.state_bytes)
        parts.append(
            _marked(f"{row.regime} state of {format_size(row.bytes_per_token)} a token{checkpoint}", is_recorded)
        )
    is_recorded = math.isclose(first.tokens_per_s, daemon.tokens_per_s)
    parts.append(_marked(f"prefill of {first.tokens_per_s:,.0f} tokens/s", is_recorded))
    return f"assumed: {'; '.join(parts)}"


def _marked(text: str, is_recorded: bool) -> str:
    return f"{text} (recorded)" if is_recorded else text


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
    """A section for each regime and budget, under common columns. Names are cut to the terminal, figures never."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        budget = "unlimited" if row.budget_bytes is None else format_size(row.budget_bytes)
        sections.setdefault(f"{row.regime}, {budget}", []).append(row)
    figures = {row: _figures(row) for row in rows}
    widths = {title: max(len(title), *(len(figures[row][title]) for row in rows)) for title in figures[rows[0]]}
    room = terminal_width(_WIDEST) - sum(len(_GAP) + width for width in widths.values())
    longest = max(len(printable_only(row.label)) for row in rows)
    name_width = min(longest, max(room, _NARROWEST_NAME))

    def line(name: str, cells: Iterable[str]) -> str:
        padded = (_GAP + cell.rjust(width) for cell, width in zip(cells, widths.values(), strict=True))
        return shortened(name, name_width).ljust(name_width) + "".join(padded)

    yield ""
    yield click.style(line("scope", widths), bold=True)
    for title, section in sections.items():
        yield ""
        yield click.style(title, bold=True)
        for row in section:
            yield line(printable_only(row.label), figures[row].values())


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
