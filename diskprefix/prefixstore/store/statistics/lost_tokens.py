"""Tokens of the last day that were computed again although an earlier prompt had them, by cause. They are part of the
`Savings` of a root."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

HOURS = 24
_MAX_ROWS = 128
"""The maximum number of rows of a root. The rows with the fewest tokens are dropped first."""


class LostTokens(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Tokens that requests of one hour (since 1970) computed again, with their cause, which is a `MissReason`.

    `client` is the name of the API key, and the program that the client says it is. `line` is the masked line of the
    prompt that differed from an earlier prompt, `tool` the tool that wrote the line, and `canonicalisers` names the
    canonicalisers that would have changed the line. `options` are those that the stored prefix was made with, for
    `other_settings`. Each is empty if unknown.
    """

    hour: int
    cause: str
    client: str = ""
    tool: str = ""
    line: str = ""
    canonicalisers: tuple[str, ...] = ()
    options: str = ""
    requests: int = 1
    tokens: int


def hour_of(now: float) -> int:
    """Returns the hour of a time in seconds since 1970."""
    return int(now // 3600)


def joined(rows: Iterable[LostTokens]) -> list[LostTokens]:
    """Returns the rows of the last 24 hours, counted back from the newest row. Adds up equal rows, and returns at most
    `_MAX_ROWS`."""
    rows = [*rows]
    newest = max((row.hour for row in rows), default=0)
    return _added((row for row in rows if row.hour > newest - HOURS), by_hour=True)[:_MAX_ROWS]


def of_last_day(rows: Iterable[LostTokens], now: float) -> list[LostTokens]:
    """Returns the rows of the last 24 hours, added up over the hours, each with the last of its hours. The most tokens
    come first."""
    hour = hour_of(now)
    return _added((row for row in rows if hour - HOURS < row.hour <= hour), by_hour=False)


def _added(rows: Iterable[LostTokens], *, by_hour: bool) -> list[LostTokens]:
    sums: dict[tuple[object, ...], LostTokens] = {}
    for row in rows:
        key = (row.hour if by_hour else None, row.cause, row.client, row.tool, row.line, row.options)
        if (other := sums.get(key)) is not None:
            row = msgspec.structs.replace(
                row,
                hour=max(row.hour, other.hour),
                requests=row.requests + other.requests,
                tokens=row.tokens + other.tokens,
            )
        sums[key] = row
    return sorted(sums.values(), key=lambda row: -row.tokens)
