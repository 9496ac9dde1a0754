"""The output of `diskprefix inspect --stats`: the gain of the cache for each model and tenant."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import click
import msgspec

from diskprefix.cli.tooling import print_json
from diskprefix.extras.watch.browse.statistics import RootStatistics, statistics
from diskprefix.printable import printable_only
from diskprefix.store.savings import read_savings
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import EntryInfo
from diskprefix.store.written import read_written
from diskprefix.tenant_ids import short_tenant
from diskprefix.units import ago, counted, format_duration, format_size


def show_stats(
    snapshot: Snapshot,
    entries: list[EntryInfo],
    roots: Collection[bytes],
    now: float,
    budget_bytes: int,
    *,
    as_json: bool,
) -> None:
    """Prints figures for each model and tenant of `roots`. `entries` are those of `snapshot` that they have, `now` is
    in seconds since 1970."""
    rows = statistics(snapshot, entries, read_savings(snapshot), now, roots)
    used, written = snapshot.used_bytes(), read_written(snapshot)
    if as_json:
        print_json(
            {
                "used_bytes": used,
                "ghost_bytes": snapshot.seen_bytes(),
                "budget_bytes": budget_bytes,
                "disk_written_bytes": written.total,
                "disk_written_last_day_bytes": written.last_day(now),
                "write_budget_bytes": written.budget_bytes,
                "roots": [_as_dict(row) for row in rows],
            }
        )
        return
    for line in (line for row in rows for line in _lines(row)):
        click.echo(line)
    click.echo(f"{format_size(used)} of a budget of {format_size(budget_bytes)} are used ({used / budget_bytes:.0%})")
    click.echo(f"{format_size(snapshot.seen_bytes())} of them hold prompts that were seen, whether stored or not")
    limit = f" of {format_size(written.budget_bytes)} a day" if written.budget_bytes else ""
    last_day, in_all = format_size(written.last_day(now)), format_size(written.total)
    click.echo(f"{last_day}{limit} were written to the disk in 24 hours, {in_all} in all")


def _as_dict(row: RootStatistics) -> dict[str, Any]:
    figures: dict[str, Any] = msgspec.to_builtins(row)
    return figures | {
        "shared_bytes": row.shared_bytes,
        "compressed_bytes": row.compressed_bytes,
        "restored_share": row.total.restored_share,
    }


def _lines(row: RootStatistics) -> Iterator[str]:
    total, today = row.total, row.today
    yield f"{printable_only(row.model)}{f', tenant {short_tenant(row.tenant)}' if row.tenant else ''}"
    saved = f"sharing saves {format_size(row.shared_bytes)}, compression {format_size(row.compressed_bytes)}"
    prompts, blocks = counted(row.entries, "prompt"), counted(row.blocks, "block")
    if row.checkpoints:
        blocks += f" and {counted(row.checkpoints, 'checkpoint')} ({format_size(row.checkpoint_bytes)})"
    yield f"  {prompts}, {blocks} in {format_size(row.stored_bytes)}; {saved}"
    if row.since is None:
        yield "  no request was counted yet; a running daemon writes its counts once a minute"
        return
    yield f"  {counted(total.requests, 'request')}; {total.restored_share:.0%} of their prompt tokens restored"
    saved_today, saved_in_all = format_duration(today.saved_s), format_duration(total.saved_s)
    yield f"  computing saved: {saved_today} today, {saved_in_all} since {ago(row.since)}"
