"""The options of a store and its cache."""

# ruff: noqa: RUF009 - option makes a field

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from diskprefix.errors import SettingsError
from diskprefix.folders import DEFAULT_DIR, default_kv_cache_dir
from diskprefix.scope import parse_scope
from diskprefix.setting import CACHE, SHARED_TIER, Options, option
from diskprefix.units import format_size, parse_size

MIN_BUDGET, MAX_BUDGET = 16 * 1024**2, 2**46
_MIN_WRITTEN = 1024**2

_cache, _shared = partial(option, CACHE), partial(option, SHARED_TIER)


@dataclass(frozen=True, kw_only=True)
class StoreOptions(Options):
    """The options of `PrefixCache` and `TieredStore`. The field `kv_cache_dir` is the flag `--kv-cache-dir`."""

    disk_prefix_cache: str = _cache(
        "auto:30",
        "How much of each prompt is kept: off, full (all of it), auto:N (what is likely to be sent again, judged by "
        "the N most recent prompts) or N (the first N tokens). A request may choose its own scope.",
        is_common=True,
        metavar="SCOPE",
        read=lambda value, flag: str(parse_scope(value, param=flag)),
    )
    kv_cache_dir: Path = _cache(
        default_kv_cache_dir,
        "The folder of the store. It is created if it is missing.",
        is_common=True,
        kind="folder",
        metavar="DIR",
        unset=DEFAULT_DIR,
    )
    kv_cache_budget: int | None = _cache(
        None,
        "Set the maximum size of the store's file, for all daemons of the folder.",
        is_common=True,
        kind="size",
        unset="it stays; 16GiB for a new folder",
        bounds=(MIN_BUDGET, MAX_BUDGET),
    )
    kv_cache_new_budget: int = _cache(
        16 * 1024**3,
        "The budget of a folder that has none yet. Presets have their own.",
        kind="size",
        bounds=(MIN_BUDGET, MAX_BUDGET),
    )
    kv_cache_write_budget: str = _cache(
        "off",
        "The maximum written to the store's disk in 24 hours, such as 20GiB/day. As it is used up, fewer prefixes are "
        "saved that may not be needed again.",
        metavar="off|SIZE/day",
    )
    kv_cache_ttl: float = _cache(
        0.0,
        "Remove state that was not used for this long: 90s, 15m, 12h, 7d, 2w.",
        is_common=True,
        kind="duration",
        unset="nothing expires",
        bounds=(0, 100 * 365 * 86400),
    )
    kv_cache_min_tokens: int = _cache(64, "Do not save prefixes with fewer tokens than this.", bounds=(0, 2**31 - 1))
    record: Path | None = _cache(
        None,
        "Append hashes and lengths of each request, but no text, to this file, for diskprefix simulate.",
        is_common=True,
        kind="file",
        unset="nothing is recorded",
    )
    kv_cache_gate: str = _cache(
        "auto",
        "auto: do not save or restore where computing is faster, as measured on this machine. off: always save and "
        "restore.",
        choices=("auto", "off"),
    )
    block_size: int = _cache(
        256,
        "The number of tokens in a block and in a prefill step.",
        bounds=(16, 65536),
        parts_cache=True,
    )
    namespace_key_file: Path | None = _shared(
        None,
        "A file with a secret (at least 16 bytes), the same on all machines that share the cache. It names blocks and "
        "signs uploads.",
        is_common=True,
        kind="file",
        unset="each store has its own secret",
    )
    remote_tier: str | None = _shared(
        None,
        "A bucket that machines share: s3://bucket/prefix, gs://…, az://…, file:///path. It needs --namespace-key-file "
        "and the extra remote. Credentials come from the provider's usual variables.",
        is_common=True,
        metavar="URL",
        unset="none",
    )
    remote_write: str = _shared(
        "seen-twice",
        "What to upload: prefixes seen at least twice, every saved prefix, or nothing.",
        choices=("seen-twice", "all", "off"),
    )
    kv_cache_write_buffer: int = 1024**3
    """Bytes for state that waits to be written, at most half of the memory left beside `kv_memory`."""
    kv_cache_min_free: int = 256 * 1024**2
    """Bytes of the disk that the store leaves free."""
    kv_cache_interval: int = 10240
    """Tokens between two checkpoints of a model with state that cannot be cut."""
    kv_cache_cold_max: int = 10240
    """Such a model has one more checkpoint, at the last message boundary within this many tokens."""
    remote_deadline: float = 10.0
    """The most seconds that a request waits for the bucket before it computes missing blocks."""

    @property
    def write_budget_bytes(self) -> int:
        """The bytes of `kv_cache_write_budget` for 24 hours; 0 for no limit. Raises `SettingsError`."""
        text, flag = self.kv_cache_write_budget, "--kv-cache-write-budget"
        if text == "off":
            return 0
        size, slash, unit = (part.strip() for part in text.partition("/"))
        try:
            if not slash or unit != "day":
                raise SettingsError(flag)
            num_bytes = parse_size(size, param=flag)
        except SettingsError:
            raise SettingsError(f"{flag}: {text!r} is not off or a size a day; write for example 20GiB/day") from None
        if not _MIN_WRITTEN <= num_bytes <= MAX_BUDGET:
            bounds = f"{format_size(_MIN_WRITTEN)}/day to {format_size(MAX_BUDGET)}/day"
            raise SettingsError(f"{flag}: {text} is out of range ({bounds})")
        return num_bytes

    def require_readable(self) -> None:
        super().require_readable()
        _ = self.write_budget_bytes

    def require_together(self) -> None:
        super().require_together()
        if self.remote_tier is not None and self.namespace_key_file is None:
            reason = "machines that share a bucket need one key to name and sign its objects"
            raise SettingsError(f"--remote-tier needs --namespace-key-file: {reason}")
