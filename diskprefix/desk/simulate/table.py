"""The tables of `diskprefix simulate`, one for each trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import click

from diskprefix.daemon.settings import Settings
from diskprefix.desk.shared.tooling import plain, print_table
from diskprefix.prefixstore.simulate.comparison import OPTIMUM, Row
from diskprefix.prefixstore.simulate.simulator import Totals
from diskprefix.prefixstore.simulate.trace import Trace
from diskprefix.printable import printable_only
from diskprefix.units import counted, format_duration, format_size

_BASELINE = "optimum: a store of this size that knows all requests to come"
_A_POINT = 0.01
"""Shares of the prompt tokens that differ by less than this count as equal."""


def show(traces: Sequence[Trace], rows: Sequence[Row]) -> None:
    """Prints a table for each trace. The `rows` of a trace have its name."""
    for index, trace in enumerate(traces):
        own = [row for row in rows if row.trace == trace.name]
        totals = own[0].totals
        requests, tokens = counted(totals.requests, "request"), counted(totals.prompt_tokens, "prompt token")
        click.echo("\n" * bool(index) + f"{printable_only(trace.name)}: {requests}, {tokens}")
        click.echo(f"{_assumptions(own)}\n")
        _print_table(own)
        click.echo(f"\n{_BASELINE}\n{_verdict(own)}")
        if options := _request_options(trace):
            click.echo(f"of the requests, in every row but optimum: {options}")


def _assumptions(rows: Sequence[Row]) -> str:
    """Returns a line with the assumptions behind the figures: recorded, given or default values."""
    policy = next(row.case.policy for row in rows if row.case.preset is None)
    parts = [f"blocks of {policy.block_size} tokens, {policy.min_tokens} at least"]
    for regime, geometry in {row.case.regime: row.case.geometry for row in rows}.items():
        checkpoint = f" and {format_size(geometry.state_bytes)} a checkpoint" if geometry.state_bytes else ""
        parts.append(f"{regime} state of {format_size(geometry.bytes_per_token)} a token{checkpoint}")
    return f"assumed: {'; '.join(parts)}; prefill of {1 / policy.seconds_per_token:,.0f} tokens/s"


def _request_options(trace: Trace) -> str:
    """Returns how many requests set which options."""
    numbers: Counter[str] = Counter()
    for request in trace:
        numbers["have a scope of their own"] += request.scope is not None
        numbers["have marks (cache_control)"] += bool(request.prompt.marks)
        numbers["only read (save: false)"] += not request.save
    return ", ".join(f"{number:,} {label}" for label, number in numbers.items() if number)


def _print_table(rows: Sequence[Row]) -> None:
    """Prints a section for each regime and budget, with common columns."""
    sections: dict[str, list[Row]] = {}
    for row in rows:
        budget_bytes = row.case.policy.budget_bytes
        budget = "unlimited" if budget_bytes is None else format_size(budget_bytes)
        sections.setdefault(f"{row.case.regime}, {budget}", []).append(row)
    figures = _figures(rows[0].totals)
    cells: list[Sequence[Any]] = []
    for title, section in sections.items():
        cells += [[""], [f"[bold]{title}"]]
        cells += [[plain(row.case.label), *_figures(row.totals).values()] for row in section]
    print_table(("scope", *figures), cells, right=figures)


def _verdict(rows: Sequence[Row]) -> str:
    """Returns a sentence about the first regime under its smallest budget."""
    own = [row for row in rows if row.case.regime == rows[0].case.regime and row.case.preset is None]
    own = [row for row in own if row.case.policy.budget_bytes == own[-1].case.policy.budget_bytes]
    optimum = next(row.totals.restored_share for row in own if row.case.scope == OPTIMUM)
    scopes = [row for row in own if row.case.scope != OPTIMUM]
    highest = max(scopes, key=lambda row: row.totals.restored_share)
    if not highest.totals.restored_tokens:
        return f"verdict: no scope restores anything; the optimum restores {optimum:.1%} of the prompt tokens"
    enough = [row for row in scopes if row.totals.restored_share >= highest.totals.restored_share - _A_POINT]
    usual = Settings().disk_prefix_cache
    best = min(enough, key=lambda row: (round(row.totals.written_share, 3), row.case.scope != usual))
    figures = f"{best.totals.restored_share:.1%} of the prompt tokens and writes {best.totals.written_share:.1%}"
    verdict = f"verdict: --disk-prefix-cache {best.case.scope} restores {figures}; the optimum restores {optimum:.1%}"
    if highest.totals.restored_share - best.totals.restored_share < _A_POINT / 10:
        return verdict
    more = f"{highest.totals.restored_share:.1%} and writes {highest.totals.written_share:.1%}"
    return f"{verdict}, and {highest.case.scope} restores {more}"


def _figures(totals: Totals) -> dict[str, str]:
    return {
        "hits": f"{totals.hit_rate:.1%}",
        "restored": f"{totals.restored_share:.1%}",
        "written": f"{totals.written_share:.1%}",
        "bytes": format_size(totals.written_bytes),
        "evictions": f"{totals.evictions:,}",
        "saved": format_duration(totals.seconds_saved),
        "ahead": f"{totals.ahead_tokens:,}",
    }
