"""The settings of a connector or a tier: the daemon's settings for the store, under shorter names."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.errors import SettingsError
from diskprefix.settings import SETTINGS, Settings, expanded, flag_of
from diskprefix.units import parse_duration, parse_size

NAMES = {
    "path": "kv_cache_dir",
    "budget": "kv_cache_budget",
    "scope": "disk_prefix_cache",
    "ttl": "kv_cache_ttl",
    "min_tokens": "kv_cache_min_tokens",
    "block_size": "block_size",
    "namespace_key_file": "namespace_key_file",
    "record": "record",
}
"""A key of the connector's configuration → the field of `Settings`."""
TIER_NAMES = ("path", "budget", "ttl", "namespace_key_file")
"""The keys of the tier's configuration. vLLM chooses what a tier gets."""

_WRITE_BUFFER = 256 * 1024**2
_MIN_BLOCK_TOKENS = 128
"""Smaller blocks are not restored faster, and each needs a record of its own."""


def connector_settings(config: Mapping[str, Any], page_tokens: int) -> Settings:
    """Returns the settings of a connector. A block of the store holds whole pages of `page_tokens` tokens. Raises
    `SettingsError` or `InvalidScope`, which names the key."""
    settings = _settings(config, NAMES, block_size=page_tokens * math.ceil(_MIN_BLOCK_TOKENS / page_tokens))
    if settings.block_size % page_tokens:
        raise SettingsError(f"block_size: {settings.block_size} tokens are not whole pages of {page_tokens} tokens")
    return settings


def tier_settings(config: Mapping[str, Any]) -> Settings:
    """Returns the settings of a tier. Raises `SettingsError`, which names the key."""
    return _settings(config, TIER_NAMES)


def _settings(config: Mapping[str, Any], names: Collection[str], **defaults: Any) -> Settings:
    if unknown := sorted(config.keys() - set(names)):
        raise SettingsError(f"{unknown[0]}: unknown key; there are: {', '.join(names)}")
    if not config.get("path"):
        raise SettingsError("path: must name the folder of the store")
    given = {NAMES[key]: _converted(key, value) for key, value in config.items() if value is not None}
    with own_names():
        return Settings(**defaults | given, kv_cache_write_buffer=_WRITE_BUFFER)


def _converted(key: str, value: object) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise SettingsError(f"{key}: must be a number or a text")
    kind = SETTINGS[NAMES[key]].kind
    if key == "scope":
        return str(parse_scope(value, param=key))
    if kind == "size" and not isinstance(value, float):
        return parse_size(value, param=key)
    if kind == "duration":
        return parse_duration(value, param=key)
    if kind in ("file", "folder"):
        return expanded(str(value))
    if isinstance(value, str) != (kind == "text"):
        raise SettingsError(f"{key}: {value!r} is not {'a text' if kind == 'text' else 'a number'}")
    return value


@contextmanager
def own_names() -> Iterator[None]:
    """Replaces the daemon's flags by keys in a `SettingsError` that is raised in the block."""
    try:
        yield
    except SettingsError as error:
        message = error.message
        for key, name in NAMES.items():
            message = message.replace(flag_of(name), key)
        raise SettingsError(message) from error
