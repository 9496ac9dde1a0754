"""One frozen settings object. Precedence, lowest first: defaults, policy file (TOML), environment, flags.

The command line merges the sources (click does) and hands plain values to `Settings`; whoever embeds diskprefix builds
`Settings` directly. A value outside its range raises `SettingsError` that names the flag.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from diskprefix.errors import DiskPrefixError, SettingsError

MIN_BUDGET, MAX_BUDGET = 16 * 1024**2, 2**50
OnCorruption: TypeAlias = Literal["quarantine", "refuse"]

_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{u}b": n for u, n in _UNITS.items() if u not in ("", "b")}
_UNITS |= {f"{u}ib": 1024**i for i, u in enumerate("kmgt", start=1)}
_SIZE = re.compile(r"\s*(\d{1,20}(?:\.\d+)?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw]?)\s*", re.ASCII)


def parse_size(text: str | int, *, param: str) -> int:
    """`4GiB`, `500mb`, `1.5 GiB` or a plain number of bytes → bytes. Raises `SettingsError`."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = _SIZE.fullmatch(str(text))
    if not match or match[2].lower() not in _UNITS:
        raise SettingsError(
            f"{param}: {text!r} is not a size; write for example 4GiB, 500MB or 1073741824", param=param
        )
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])


def parse_duration(text: str | float, *, param: str) -> float:
    """`90s`, `15m`, `12h`, `7d`, `2w` or a plain number of seconds → seconds. Raises `SettingsError`.

    The unit is in lower case, as `M` is read as months by many.
    """
    match = _DURATION.fullmatch(str(text))
    if not match:
        raise SettingsError(
            f"{param}: {text!r} is not a duration; write for example 90s, 15m, 12h, 7d or 2w, in lower case",
            param=param,
        )
    return float(match[1]) * _SECONDS[match[2]]


def format_size(num_bytes: float) -> str:
    """Bytes in the largest binary unit that keeps the number at or above one: 4.0 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def cache_home() -> Path:
    """`$XDG_CACHE_HOME/diskprefix`, or `~/.cache/diskprefix`."""
    base = os.environ.get("XDG_CACHE_HOME", "").strip()
    return (Path(base) if base else Path.home() / ".cache") / "diskprefix"


def default_kv_cache_dir() -> Path:
    """systemd's CacheDirectory when the service runs under it, else the `kv` folder of `cache_home()`."""
    directory = os.environ.get("CACHE_DIRECTORY", "").split(":")[0]
    return (Path(directory) if directory else cache_home()) / "kv"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that `diskprefix serve` can be told. Flag `--kv-cache-dir` is field `kv_cache_dir`, and so on."""

    model: str | None = None
    """None: the embedded default model."""
    device: str = "auto"
    dtype: str = "auto"
    host: str = "127.0.0.1"
    port: int = 8642
    max_queue: int = 64
    max_body_bytes: int = 32 * 1024**2
    api_keys: Path | None = None
    """None: no key is asked for."""
    block_size: int = 256
    disk_prefix_cache: str = "auto:30"
    """A scope in its canonical form; the grammar lives in `policy.scope`."""
    reuse_generated: bool = False
    """Requests that do not say keep the state of their replies, and restore that of earlier ones."""
    kv_cache_dir: Path = field(default_factory=default_kv_cache_dir)
    kv_cache_budget: int = 4 * 1024**3
    kv_cache_min_free: int = 1024**3
    kv_cache_ttl: float = 0.0
    """Seconds; 0 keeps what is used seldom until the budget needs its room."""
    kv_cache_codec: str = "auto"
    kv_cache_on_corruption: OnCorruption = "quarantine"
    kv_cache_min_tokens: int = 512
    kv_cache_interval: int = 10240
    kv_cache_cold_max: int = 10240
    kv_cache_write_buffer: int = 1024**3
    kv_cache_gate: str = "auto"
    """`auto` neither saves nor restores what computing would be faster for, by measured times; `off` always does."""
    record: Path | None = None
    """File to which each request's shape is appended, for `diskprefix simulate`; None records nothing."""
    fingerprint: str = "strict"
    served_model_name: str | None = None
    chat_template: Path | None = None
    log_level: str = "info"

    def __post_init__(self) -> None:
        self._require("port", 0, 65535)
        self._require("max_queue", 1, 100_000)
        self._require("block_size", 16, 65536)
        self._require("kv_cache_budget", MIN_BUDGET, MAX_BUDGET)
        self._require("kv_cache_min_free", 0, 2**50)
        self._require("kv_cache_ttl", 0, 100 * 365 * 86400)
        self._require("kv_cache_write_buffer", 0, 2**50)
        self._require("kv_cache_min_tokens", 0, 2**31 - 1)
        self._require("kv_cache_interval", 1, 2**31 - 1)
        self._require("kv_cache_cold_max", 0, 2**31 - 1)
        self._require("max_body_bytes", 1024, 2**40)
        for name, allowed in (
            ("fingerprint", ("strict", "portable")),
            ("dtype", DTYPES),
            ("kv_cache_codec", CODECS),
            ("kv_cache_gate", GATES),
            ("kv_cache_on_corruption", get_args(OnCorruption)),
        ):
            if getattr(self, name) not in allowed:
                flag = flag_of(name)
                raise SettingsError(f"{flag}: {getattr(self, name)!r} is not one of {', '.join(allowed)}", param=flag)

    def _require(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            flag = flag_of(name)
            raise SettingsError(f"{flag}: {value} is out of range ({low} to {high})", param=flag)


DTYPES = ("auto", "bfloat16", "float16", "float32")
CODECS = ("auto", "raw", "zstd", "planes")
GATES = ("auto", "off")


def flag_of(name: str) -> str:
    """`kv_cache_dir` → `--kv-cache-dir`."""
    return "--" + name.replace("_", "-")


SETTING_NAMES = frozenset(f.name for f in fields(Settings))
_SWITCHES = frozenset(f.name for f in fields(Settings) if isinstance(f.default, bool))


def find_policy(name_or_path: str) -> Path:
    """A preset by its bare name (`agent`), or the path of a TOML file. Raises `SettingsError`."""
    package = Path(__file__).parent
    presets = next((d for d in (package / "presets", package.parent / "policies") if d.is_dir()), None)
    candidate = Path(name_or_path)
    if candidate.suffix == ".toml" or os.sep in name_or_path:
        if candidate.is_file():
            return candidate
        raise SettingsError(f"--policy: no such file: {name_or_path}", param="--policy")
    known = sorted(p.stem for p in presets.glob("*.toml")) if presets else []
    if presets and name_or_path in known:
        return presets / f"{name_or_path}.toml"
    raise SettingsError(
        f"--policy: no preset {name_or_path!r} (there are: {', '.join(known) or 'none'}); "
        "the name of a file must end in .toml",
        param="--policy",
    )


def read_policy(path: Path, convert: Callable[[str, Any], Any] | None = None) -> dict[str, Any]:
    """The settings that a policy file holds, keyed by field name. Raises `SettingsError` naming file, line and key.

    `convert` takes the name of a field and its value as TOML has it, and gives the value to go on with. An error of its
    own is said of that line.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"--policy: cannot read {path}: {error.strerror}", param="--policy") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"--policy: {path} is not valid TOML: {error}", param="--policy") from error
    settings: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        where = f"--policy: {path}:{_line_of(text, key)}"
        if name not in SETTING_NAMES:
            raise SettingsError(f"{where}: unknown key {key!r}", param="--policy")
        if name in settings:
            raise SettingsError(f"{where}: {key}: is there twice, with - and with _", param="--policy")
        is_fitting = isinstance(value, str | int | float) and isinstance(value, bool) == (name in _SWITCHES)
        if not is_fitting:
            expected = "true or false" if name in _SWITCHES else "a number or a text"
            raise SettingsError(f"{where}: {key}: must be {expected}", param="--policy")
        try:
            settings[name] = value if convert is None else convert(name, value)
        except DiskPrefixError as error:
            reason = error.message.removeprefix(f"{flag_of(name)}: ")
            raise SettingsError(f"{where}: {key}: {reason}", param="--policy") from error
    return settings


def _line_of(text: str, key: str) -> int:
    pattern = re.compile(rf"""\s*(\[+\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""")
    return next((n for n, line in enumerate(text.splitlines(), start=1) if pattern.match(line)), 1)
