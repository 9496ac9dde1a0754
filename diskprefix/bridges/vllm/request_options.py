"""The options of a request in its `kv_transfer_params`: scope, window, save, ttl and marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diskprefix.errors import DiskPrefixError
from diskprefix.prefixstore.store_options import StoreOptions
from diskprefix.scope import parse_scope
from diskprefix.units import parse_duration
from diskprefix.values import MAX_MARKS, CacheOptions, Mark


class BadParameters(ValueError):
    """The options of a request are invalid. The message names the field."""


def options_of(parameters: Mapping[str, Any] | None, settings: StoreOptions) -> tuple[CacheOptions, tuple[Mark, ...]]:
    """Returns the cache options in `kv_transfer_params`, and the positions to keep. Ignores unknown fields, which are
    for other connectors. Raises `BadParameters`."""
    given = {name: value for name, value in (parameters or {}).items() if value is not None}
    save, marks = given.get("save", True), given.get("marks", [])
    if not isinstance(save, bool):
        raise BadParameters("save: must be true or false")
    if not isinstance(marks, list):
        raise BadParameters("marks: must be a list of numbers of tokens")
    if len(marks) > MAX_MARKS:
        raise BadParameters(f"marks: must have at most {MAX_MARKS} numbers (got {len(marks)})")
    positions = sorted({_integer(mark, "marks", minimum=0) for mark in marks})
    try:
        scope = parse_scope(given.get("scope", settings.disk_prefix_cache), param="scope")
        if "window" in given:
            scope = scope.with_window(_integer(given["window"], "window", minimum=1))
        ttl_s = parse_duration(given["ttl"], param="ttl") if "ttl" in given else None
    except DiskPrefixError as error:
        raise BadParameters(error.message) from error
    return CacheOptions(scope=scope, save=save, ttl_s=ttl_s), tuple(map(Mark, positions))


def _integer(value: object, name: str, *, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise BadParameters(f"{name}: must be an integer of at least {minimum}")
    return value
