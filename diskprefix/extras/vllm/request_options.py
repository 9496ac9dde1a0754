"""The options of a request in its `kv_transfer_params`: scope, window, save, ttl and marks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.errors import DiskPrefixError
from diskprefix.nouns import MAX_MARKS, CacheOptions, Mark
from diskprefix.settings import Settings
from diskprefix.units import parse_duration

_KNOWN = ("scope", "window", "save", "ttl", "marks")


class BadParameters(ValueError):
    """The options of a request are not valid."""


@dataclass(frozen=True)
class RequestOptions:
    """The cache's options, and the positions that the client wants kept."""

    cache: CacheOptions
    marks: tuple[Mark, ...] = ()


def options_of(parameters: Mapping[str, Any] | None, settings: Settings) -> RequestOptions:
    """Returns the options in `kv_transfer_params`. Ignores unknown fields, which are for other connectors.

    Raises `BadParameters`, which names the field.
    """
    given = {name: (parameters or {}).get(name) for name in _KNOWN}
    try:
        scope = parse_scope(settings.disk_prefix_cache if given["scope"] is None else given["scope"], param="scope")
        if given["window"] is not None:
            scope = scope.with_window(_whole(given["window"], "window", least=1))
        save = True if given["save"] is None else given["save"]
        if not isinstance(save, bool):
            raise BadParameters("save: must be true or false")
        ttl_s = None if given["ttl"] is None else parse_duration(given["ttl"], param="ttl")
        marks = given["marks"] or []
        if not isinstance(marks, list):
            raise BadParameters("marks: must be a list of positions in tokens")
        if len(marks) > MAX_MARKS:
            raise BadParameters(f"marks: must have at most {MAX_MARKS} positions (got {len(marks)})")
        positions = sorted({_whole(mark, "marks", least=0) for mark in marks})
    except DiskPrefixError as error:
        raise BadParameters(error.message) from error
    return RequestOptions(
        CacheOptions(scope=scope, save=save, ttl_s=ttl_s), tuple(Mark(position) for position in positions)
    )


def _whole(value: object, name: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise BadParameters(f"{name}: must be an integer of at least {least}")
    return value
