"""The output of `diskprefix inspect --stats`: the gain of the cache for each model and tenant."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import click
import msgspec

from diskprefix.desk.shared.tooling import print_json, tenant_names
from diskprefix.desk.watch.browse.outline import Outline, outline
from diskprefix.prefixstore.cache.other_settings import options_text
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics.savings import Savings, Tally, read_savings
from diskprefix.prefixstore.store.tree import EntryInfo
from diskprefix.prefixstore.store.write_counter import read_written
from diskprefix.printable import printable_only
from diskprefix.runtime.load.packed_weights import PackedFiles
from diskprefix.units import ago, counted, format_duration, format_size


def show_stats(
    snapshot: Snapshot,
    entries: list[EntryInfo],
    roots: Collection[bytes],
    now: float,
    budget_bytes: int,
    packed: PackedFiles | None,
    *,
    as_json: bool,
) -> None:
    """Prints figures for each model and tenant of `roots`. `entries` are the saved prompts of these roots. `now` is in
    seconds since 1970. `packed` are the packed weights, None if none are made."""
    rows = figures(outline(snapshot, entries, roots), read_savings(snapshot), now)
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
                "packed_weights": None if packed is None else packed.amounts,
                "roots": rows,
            }
        )
        return
    named = tenant_names()
    for line in (line for row in rows for line in _lines(row, named)):
        click.echo(line)
    click.echo(f"{format_size(used)} of a budget of {format_size(budget_bytes)} are used ({used / budget_bytes:.0%})")
    click.echo(f"{format_size(snapshot.seen_bytes())} of them hold prompts that were seen and are not saved")
    limit = f" of {format_size(written.budget_bytes)} a day" if written.budget_bytes else ""
    last_day, in_all = format_size(written.last_day(now)), format_size(written.total)
    click.echo(f"{last_day}{limit} were written to the disk in 24 hours, {in_all} in all")
    if packed is not None and packed.amounts["files"]:
        click.echo(printable_only(f"packed weights: {packed.line}"))


def figures(folded: Outline, savings: Mapping[bytes, Savings], now: float) -> list[dict[str, Any]]:
    """Returns JSON values for each model and tenant, the largest first. `savings` is the result of `read_savings`.

    The values are the counts of `FoldedTree`, the bytes that sharing and compression save (less the blocks outside of
    saved prompts), and the counts of requests in all and today, from `since` on (seconds since the epoch, or None).
    """
    rows = []
    for tree in folded.trees:
        used = savings.get(bytes.fromhex(tree.root))
        total, today = (used.total, used.today(now)) if used else (Tally(), Tally())
        names = ("root", "model", "tenant", "made_with", "blocks", "checkpoints", "images")
        sizes = ("listed_bytes", "raw_bytes", "stored_bytes", "checkpoint_bytes")
        row = {name: getattr(tree, name) for name in (*names, *sizes)} | {
            "entries": tree.num_entries,
            "shared_bytes": max(0, tree.listed_bytes - tree.raw_bytes),
            "compressed_bytes": max(0, tree.raw_bytes - tree.stored_bytes),
            "since": used.since if used else None,
            "total": msgspec.to_builtins(total),
            "today": msgspec.to_builtins(today),
            "restored_share": total.restored_share,
        }
        rows.append(row)
    return sorted(rows, key=lambda row: (-row["stored_bytes"], -row["total"]["requests"], row["root"]))


def _lines(row: dict[str, Any], named: Callable[[str], str]) -> Iterator[str]:
    tenant = f", tenant {named(row['tenant'])}" if row["tenant"] else ""
    made_with = f", made with {options_text(row['made_with'])}" if row["made_with"] else ""
    yield printable_only(f"{row['model']}{made_with}{tenant}")
    if row["images"]:
        blocks = counted(row["blocks"], "block")
        yield f"  images, encoded: {row['images']:,}, {blocks} in {format_size(row['stored_bytes'])}"
        return
    sharing, compression = (format_size(row[name]) for name in ("shared_bytes", "compressed_bytes"))
    prompts, blocks = counted(row["entries"], "prompt"), counted(row["blocks"], "block")
    if row["checkpoints"]:
        blocks += f" and {counted(row['checkpoints'], 'checkpoint')} ({format_size(row['checkpoint_bytes'])})"
    saved = f"sharing saves {sharing}, compression {compression}"
    yield f"  {prompts}, {blocks} in {format_size(row['stored_bytes'])}; {saved}"
    if row["since"] is None:
        yield "  no request was counted yet; a running daemon writes its counts once a minute"
        return
    requests = counted(row["total"]["requests"], "request")
    yield f"  {requests}; {row['restored_share']:.0%} of their prompt tokens restored"
    saved_today, saved_in_all = (format_duration(row[when]["saved_s"]) for when in ("today", "total"))
    yield f"  computing saved: {saved_today} today, {saved_in_all} since {ago(row['since'])}"
