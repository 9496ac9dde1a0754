"""The output of `diskprefix inspect --stats`: the gain of the cache for each model and tenant, and the next victims."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import click
import msgspec

from diskprefix.cli.tooling import print_json, print_table, short_id
from diskprefix.extras.watch.browse.statistics import RootStatistics, Victim, next_victims, statistics
from diskprefix.printable import printable_only
from diskprefix.store.savings import read_savings
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.tree import EntryInfo
from diskprefix.store.written import read_written
from diskprefix.tenant_ids import short_tenant
from diskprefix.units import ago, counted, format_age, format_duration, format_size

_LISTED, _MOST_VICTIMS = 10, 1000
"""Runs of blocks that are listed of those that go next, and blocks that are looked at for that."""


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
    shown = {root.hex() for root in roots}
    rows = [row for row in statistics(snapshot, entries, read_savings(snapshot), now) if row.root in shown]
    victims = next_victims(snapshot, now, roots, most=_LISTED if as_json else _MOST_VICTIMS)
    used, written = snapshot.used_bytes(), read_written(snapshot)
    if as_json:
        print_json(
            {
                "used_bytes": used,
                "budget_bytes": budget_bytes,
                "disk_written_bytes": written.total,
                "disk_written_last_day_bytes": written.last_day(now),
                "write_budget_bytes": written.budget_bytes,
                "roots": [_as_dict(row) for row in rows],
                "next_victims": msgspec.to_builtins(victims),
            }
        )
        return
    for line in (line for row in rows for line in _lines(row)):
        click.echo(line)
    click.echo(f"{format_size(used)} of a budget of {format_size(budget_bytes)} are used ({used / budget_bytes:.0%})")
    limit = f" of {format_size(written.budget_bytes)} a day" if written.budget_bytes else ""
    last_day, in_all = format_size(written.last_day(now)), format_size(written.total)
    click.echo(f"{last_day}{limit} were written to the disk in 24 hours, {in_all} in all")
    if victims:
        click.echo("\nEvicted next, when the budget is reached:")
        _print_victims(victims)


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


def _print_victims(victims: list[Victim]) -> None:
    rows = []
    for run in islice(_runs(victims), _LISTED):
        stored_bytes, prefill_s = sum(one.stored_bytes for one in run), sum(one.prefill_s for one in run)
        ends = [short_id(entry) for one in run for entry in one.entries]
        cost = f"{prefill_s / max(stored_bytes, 1) * 2**20:.3g}" if prefill_s else "?"
        where, age = f"{run[-1].start:,}–{run[0].end:,}", f"{format_age(run[0].age_s)} ago"
        rows.append([where, format_size(stored_bytes), age, " ".join(ends), cost, run[0].reason])
    titles = ("tokens", "size", "last used", "ends", "s/MiB", "why")
    print_table(titles, rows, right=("size", "s/MiB"), wrapped=())


def _runs(victims: list[Victim]) -> Iterator[list[Victim]]:
    """Yields blocks that are evicted one after the other, and follow each other in a prompt, together."""
    run: list[Victim] = []
    for victim in victims:
        if run and (victim.root, victim.end, victim.reason) != (run[-1].root, run[-1].start, run[-1].reason):
            yield run
            run = []
        run.append(victim)
    if run:
        yield run
