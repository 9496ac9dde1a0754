"""The tables of `diskprefix simulate`: one for each trace, to be read at 80 columns."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click

from diskprefix.cli.tooling import counted, shortened
from diskprefix.printable import printable_only
from diskprefix.settings import format_size
from diskprefix.simulate.comparison import Row
from diskprefix.simulate.trace import RecordedDaemon, Trace

_GAP = "  "
_WIDEST_SCOPE = 60
_NARROWEST_SCOPE = 15


@dataclass(frozen=True)
class _Column:
    title: str
    values: list[str]

    @property
    def width(self) -> int:
        return max(map(len, (self.title, *self.values)))


def show(traces: Sequence[Trace], rows: Sequence[Row]) -> None:
    """Print what was done to each trace. `rows` of a trace bear its name."""
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
    """What the figures rest on, and which of it the recording says."""
    daemon = trace.daemon or RecordedDaemon(block_size=0, min_tokens=0)
    first = next(row for row in rows if row.policy is None)
    is_recorded = (first.block_size, first.min_tokens) == (daemon.block_size, daemon.min_tokens)
    parts = [_said(f"blocks of {first.block_size} tokens, {first.min_tokens} at least", is_recorded)]
    for row in {row.regime: row for row in rows}.values():
        checkpoint = f" and {format_size(row.state_bytes)} a checkpoint" if row.state_bytes else ""
        is_recorded = (row.bytes_per_token, row.state_bytes) == (daemon.bytes_per_token, daemon.state_bytes)
        parts.append(
            _said(f"{row.regime} state of {format_size(row.bytes_per_token)} a token{checkpoint}", is_recorded)
        )
    is_recorded = math.isclose(first.tokens_per_s, daemon.tokens_per_s)
    parts.append(_said(f"prefill of {first.tokens_per_s:,.0f} tokens/s", is_recorded))
    return f"assumed: {'; '.join(parts)}"


def _said(text: str, is_recorded: bool) -> str:
    return f"{text} (recorded)" if is_recorded else text


def _asked(trace: Trace) -> Iterator[str]:
    """What single requests asked for themselves: it holds in every row."""
    num_scopes = num_marked = num_read_only = 0
    for request in trace:
        num_scopes += request.scope is not None
        num_marked += bool(request.prompt.marks)
        num_read_only += not request.save
    asked = {
        "have a scope of their own": num_scopes,
        "have marks (cache_control)": num_marked,
        "only read (save: false)": num_read_only,
    }
    found = [f"{number:,} {what}" for what, number in asked.items() if number]
    if found:
        yield f"of the requests, in every row but upper-bound: {', '.join(found)}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Sections of one regime and budget each, under common columns. Figures are never cut: where they do not fit, those
    that matter least are left out, and then names are shortened."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        sections.setdefault(f"{row.regime}, {_told_budget(row.budget_bytes)}", []).append(row)
    ordered = [row for section in sections.values() for row in section]
    names = _Column("scope", [shortened(printable_only(row.label), _WIDEST_SCOPE) for row in ordered])
    room = _room()
    figures = _fitting(_figures(ordered), room, min(names.width, _NARROWEST_SCOPE))
    taken = sum(len(_GAP) + column.width for column in figures)
    name_width = names.width if room is None else min(names.width, max(room - taken, _NARROWEST_SCOPE))
    header = names.title.ljust(name_width) + "".join(_GAP + column.title.rjust(column.width) for column in figures)
    yield ""
    yield click.style(header, bold=True)
    number = 0
    for title, section in sections.items():
        yield ""
        yield click.style(title, bold=True)
        for _ in section:
            name = shortened(names.values[number], name_width).ljust(name_width)
            yield name + "".join(_GAP + column.values[number].rjust(column.width) for column in figures)
            number += 1


def _room() -> int | None:
    """Columns of the terminal; None where there is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _figures(rows: Sequence[Row]) -> list[_Column]:
    return [
        _Column("hits", [f"{row.hit_rate:.1%}" for row in rows]),
        _Column("restored", [f"{row.restored_share:.1%}" for row in rows]),
        _Column("written", [f"{row.written_share:.1%}" for row in rows]),
        _Column("selected", [f"{row.selected_tokens / max(row.requests, 1):,.0f}" for row in rows]),
        _Column("bytes", [format_size(row.written_bytes) for row in rows]),
        _Column("amplif.", [f"{row.write_amplification:.2f}" for row in rows]),
        _Column("evictions", [f"{row.evictions:,}" for row in rows]),
        _Column("saved", [_duration(row.seconds_saved) for row in rows]),
    ]


_DROPPED_FIRST = "selected", "amplif.", "evictions", "bytes"


def _fitting(figures: list[_Column], room: int | None, name_width: int) -> list[_Column]:
    """Those for which there is room beside the names."""
    for title in _DROPPED_FIRST:
        if room is None or name_width + sum(len(_GAP) + column.width for column in figures) <= room:
            break
        figures = [column for column in figures if column.title != title]
    return figures


def _told_budget(budget_bytes: int | None) -> str:
    return "unlimited" if budget_bytes is None else format_size(budget_bytes)


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s"
