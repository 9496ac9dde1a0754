"""The output of `diskprefix inspect --lost`: the tokens that were computed again in the last day."""

from __future__ import annotations

from collections.abc import Container, Iterable

import click
from msgspec.structs import asdict, replace

from diskprefix.cli.tooling import plain, print_json, print_table
from diskprefix.extras.watch.inspect.daemons import settings_in_effect
from diskprefix.extras.watch.inspect.lost_lines import lines_in_clear
from diskprefix.extras.watch.lost_advice import advised, may_be_solved
from diskprefix.store.snapshot import Snapshot
from diskprefix.store.statistics.lost_tokens import LostTokens, hour_of, of_last_day
from diskprefix.store.statistics.savings import read_savings
from diskprefix.units import counted


def show_lost(snapshot: Snapshot, store_id: bytes, roots: Container[bytes], now: float, *, as_json: bool) -> None:
    """Prints the tokens of `roots`, by cause, client, tool and line, which is in clear as long
    as its prompt is stored. `now` is in seconds since 1970."""
    kept = {root: savings.lost for root, savings in read_savings(snapshot).items() if root in roots}
    texts: dict[str, str] = {}
    for root, of_root in kept.items():
        shapes = {row.line for row in of_last_day(of_root, now) if row.line}
        texts |= lines_in_clear(snapshot, root, shapes - texts.keys(), now)
    rows = [asdict(row) for row in _with_last_hours([row for of_root in kept.values() for row in of_root], now)]
    daemons = settings_in_effect(store_id) if any(map(may_be_solved, rows)) else []
    lost = advised(rows, texts, daemons)
    total = sum(row["tokens"] for row in lost)
    solved = sum(row["tokens"] for row in lost if row["solved_since"] is not None)
    if as_json:
        print_json({"tokens": total, "solved_tokens": solved, "lost": lost})
        return
    if lost:
        cells = [
            [
                f"{row['tokens']:,}",
                f"{row['requests']:,}",
                _hours_ago(hour_of(now) - row["hour"]),
                plain(row["what"]),
                plain(row["advice"]),
            ]
            for row in lost
        ]
        print_table(["tokens", "requests", "last", "lost", "what to do"], cells, right=("tokens", "requests"))
    of_them = f", {solved:,} of them for a reason that is solved" if solved else ""
    click.echo(f"{counted(total, 'token')} of the last 24 hours were computed again{of_them}")


def _with_last_hours(rows: list[LostTokens], now: float) -> Iterable[LostTokens]:
    """Yields the rows of the last 24 hours, added up over the hours, each with the last of its hours."""
    last: dict[LostTokens, int] = {}
    for row in rows:
        last[_kind(row)] = max(row.hour, last.get(_kind(row), 0))
    for row in of_last_day(rows, now):
        yield replace(row, hour=last[_kind(row)])


def _kind(row: LostTokens) -> LostTokens:
    return replace(row, hour=0, requests=0, tokens=0, canonicalisers=())


def _hours_ago(hours: int) -> str:
    return f"{hours} h ago" if hours > 0 else "this hour"
