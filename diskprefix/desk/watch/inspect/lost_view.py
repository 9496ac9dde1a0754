"""The output of `diskprefix inspect --lost`: the tokens that were computed again in the last day."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path

import click
from msgspec.structs import asdict

from diskprefix.desk.shared.tooling import plain, print_json, print_table
from diskprefix.desk.watch.inspect.lost_lines import lines_in_clear
from diskprefix.desk.watch.lost_advice import advised, settings_in_effect
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.statistics.lost_tokens import of_last_day
from diskprefix.prefixstore.store.statistics.savings import read_savings
from diskprefix.units import counted


def show_lost(snapshot: Snapshot, folder: Path, roots: Container[bytes], now: float, *, as_json: bool) -> None:
    """Prints the tokens of `roots`, by cause, client, tool and line, which is in clear as long as its prompt is stored.
    `folder` is that of the store. `now` is in seconds since 1970."""
    kept = {root: savings.lost for root, savings in read_savings(snapshot).items() if root in roots}
    texts: dict[str, str] = {}
    for root, of_root in kept.items():
        shapes = {row.line for row in of_last_day(of_root, now) if row.line}
        texts |= lines_in_clear(snapshot, root, shapes - texts.keys(), now)
    rows = of_last_day((row for of_root in kept.values() for row in of_root), now)
    lost = advised(map(asdict, rows), texts, settings_in_effect(folder))
    total = sum(row["tokens"] for row in lost)
    solved = sum(row["tokens"] for row in lost if row["solved_since"] is not None)
    if as_json:
        print_json({"tokens": total, "solved_tokens": solved, "lost": lost})
        return
    if lost:
        cells = [
            [f"{row['tokens']:,}", f"{row['requests']:,}", row["last"], plain(row["what"]), plain(row["advice"])]
            for row in lost
        ]
        print_table(["tokens", "requests", "last", "lost", "what to do"], cells, right=("tokens", "requests"))
    of_them = f", {solved:,} of them for a reason that is solved" if solved else ""
    click.echo(f"{counted(total, 'token')} of the last 24 hours were computed again{of_them}")
