"""The output of `diskprefix inspect --stats`: the gain of the cache for each model and tenant, and the next victims."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
import msgspec

from diskprefix.cli.tooling import print_json, print_table, short_id, terminal_width
from diskprefix.extras.watch.browse.statistics import RootStatistics, Victim, next_victims, statistics
from diskprefix.printable import printable_only
from diskprefix.store.savings import read_savings
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import EntryInfo
from diskprefix.tenant_ids import short_tenant
from diskprefix.units import ago, counted, format_age, format_duration, format_size


def show_stats(snapshot: Snapshot, entries: list[EntryInfo], now: float, budget_bytes: int, *, as_json: bool) -> None:
    """Prints figures for each model and tenant. `entries` are those of `snapshot`, `now` is in seconds since 1970."""
    rows = statistics(snapshot, entries, read_savings(snapshot), now)
    victims = next_victims(snapshot, now)
    used = snapshot.used_bytes()
    if as_json:
        print_json(
            {
                "used_bytes": used,
                "budget_bytes": budget_bytes,
                "roots": [_as_dict(row) for row in rows],
                "next_victims": msgspec.to_builtins(victims),
            }
        )
        return
    for line in (line for row in rows for line in _lines(row)):
        click.echo(line)
    click.echo(f"{format_size(used)} of a budget of {format_size(budget_bytes)} are used ({used / budget_bytes:.0%})")
    if victims:
        click.echo("\nEvicted next, when the budget is reached:")
        _print_victims(victims, terminal_width(otherwise=120))


def _as_dict(row: RootStatistics) -> dict[str, Any]:
    figures: dict[str, Any] = msgspec.to_builtins(row)
    return figures | {
        "shared_bytes": row.shared_bytes,
        "compressed_bytes": row.compressed_bytes,
        "hit_rate": row.total.hit_rate,
    }


def _lines(row: RootStatistics) -> Iterator[str]:
    total, today = row.total, row.today
    yield f"{printable_only(row.model)}{f', tenant {short_tenant(row.tenant)}' if row.tenant else ''}"
    saved = f"sharing saves {format_size(row.shared_bytes)}, compression {format_size(row.compressed_bytes)}"
    prompts = counted(row.entries, "prompt")
    yield f"  {prompts}, {counted(row.blocks, 'block')} in {format_size(row.stored_bytes)}; {saved}"
    if row.since is None:
        yield "  no request was counted yet; a running daemon writes its counts once a minute"
        return
    share = total.restored_tokens / total.prompt_tokens if total.prompt_tokens else 0.0
    yield f"  {counted(total.requests, 'request')}, {total.hit_rate:.0%} hits; {share:.0%} of their tokens restored"
    saved_today, saved_in_all = format_duration(today.saved_s), format_duration(total.saved_s)
    yield f"  computing saved: {saved_today} today, {saved_in_all} since {ago(row.since)}"


def _print_victims(victims: list[Victim], width: int) -> None:
    from rich.table import Column

    titles = ("tokens", "size", "last used", "ends", "s/MiB", "why")
    columns = [
        Column(title, justify="right" if title in ("size", "s/MiB") else "left", no_wrap=True) for title in titles
    ]
    rows = [
        [
            f"{victim.start:,}–{victim.end:,}",
            format_size(victim.stored_bytes),
            f"{format_age(victim.age_s)} ago",
            short_id(victim.entries[0]) if victim.entries else "",
            f"{victim.prefill_s / max(victim.stored_bytes, 1) * 2**20:.3g}" if victim.prefill_s else "?",
            victim.reason,
        ]
        for victim in victims
    ]
    print_table(columns, rows, width=width)
