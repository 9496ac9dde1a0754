"""The settings of a connector or a tier: some of the daemon's, under the names of policy files."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from diskprefix.errors import DiskPrefixError, SettingsError
from diskprefix.nearest import meant
from diskprefix.prefixstore.store_options import StoreOptions
from diskprefix.setting import flag_of, parsed, require_kind, settings_of

TIER_NAMES = ("kv_cache_dir", "kv_cache_budget", "kv_cache_ttl", "namespace_key_file")
"""The keys of the tier's configuration. vLLM chooses what a tier gets."""
NAMES = (
    *(*TIER_NAMES, "disk_prefix_cache", "kv_cache_min_tokens", "block_size", "record"),
    *("remote_tier", "remote_write"),
)
"""The keys of the connector's configuration."""

_WRITE_BUFFER = 256 * 1024**2
_MIN_BLOCK_TOKENS = 128
"""Smaller blocks are not restored faster, and each needs a record of its own."""


def connector_settings(config: Mapping[str, Any], page_tokens: int) -> StoreOptions:
    """Returns the settings of a connector. A block of the store holds whole pages of `page_tokens` tokens. Raises
    `SettingsError`, which names the key."""
    settings = _settings(config, NAMES, block_size=page_tokens * math.ceil(_MIN_BLOCK_TOKENS / page_tokens))
    if settings.block_size % page_tokens:
        raise SettingsError(f"block_size: {settings.block_size} tokens are not whole pages of {page_tokens} tokens")
    return settings


def tier_settings(config: Mapping[str, Any]) -> StoreOptions:
    """Returns the settings of a tier. Raises `SettingsError`, which names the key."""
    return _settings(config, TIER_NAMES)


def _settings(config: Mapping[str, Any], names: Collection[str], **defaults: Any) -> StoreOptions:
    if unknown := sorted(config.keys() - set(names)):
        raise SettingsError(f"{unknown[0]}: unknown key{meant(unknown[0], names)}; there are: {', '.join(names)}")
    if not config.get("kv_cache_dir"):
        raise SettingsError("kv_cache_dir: must name the folder of the store")
    if config.get("remote_tier") and not config.get("namespace_key_file"):
        raise SettingsError("remote_tier: needs namespace_key_file, the key that names and signs the bucket's objects")
    values = {key: _read(key, value) for key, value in config.items() if value is not None}
    try:
        return StoreOptions(**defaults | values, kv_cache_write_buffer=_WRITE_BUFFER)
    except SettingsError as error:
        keys = {flag_of(name): name for name in names}
        raise SettingsError(re.sub(r"^--[a-z-]+", lambda flag: keys.get(flag[0], flag[0]), error.message)) from error


def _read(key: str, value: object) -> Any:
    setting = settings_of(StoreOptions)[key]
    try:
        require_kind(setting, value)
        return parsed(key, setting, value)
    except DiskPrefixError as error:
        raise SettingsError(f"{key}: {error.message.removeprefix(f'{flag_of(key)}: ')}") from error
