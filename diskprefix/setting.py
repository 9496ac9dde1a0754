"""Options with their help, kind and range. Each house has a class of them, and takes those of the houses below."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msgspec import Struct

from diskprefix.errors import SettingsError
from diskprefix.folders import expanded, require_text
from diskprefix.units import format_size, parse_duration, parse_size

Kind: TypeAlias = Literal["text", "integer", "size", "duration", "switch", "file", "folder"]
"""`size` is in bytes and `duration` in seconds. People write both with a unit."""


class Setting(Struct, frozen=True, kw_only=True):
    """Describes one field of `Options`: its help, its kind and its range."""

    group: str
    """The heading in the help."""
    help: str
    kind: Kind
    is_common: bool = False
    """Shown by `--help`, not by `--help-all` only."""
    parts_cache: bool = False
    """It changes the identity of what is computed (`identity.Fingerprint`), for some models at least: prefixes saved
    with one value are not found with another."""
    metavar: str | None = None
    unset: str | None = None
    """The default as the help shows it, if the value is None or depends on the machine."""
    choices: tuple[str, ...] = ()
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """The smallest and the largest value."""
    read: Callable[[Any, str], Any] | None = None
    """Takes what somebody wrote, and the flag, and returns the value of the field. Raises a `DiskPrefixError`."""


MODEL, SERVER, CACHE, SHARED_TIER = "Model", "Server", "Disk cache", "Shared tier"
"""The headings of the help, in its order."""


def option(group: str, default: Any, help: str, **attributes: Any) -> Any:
    """Returns a dataclass field with its `Setting`. A callable `default` is called for each object."""
    plain_kind: Kind = "switch" if isinstance(default, bool) else "integer" if isinstance(default, int) else "text"
    metadata = {"setting": Setting(group=group, help=help, **{"kind": plain_kind} | attributes)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def flag_of(name: str) -> str:
    """Returns `--kv-cache-dir` for `kv_cache_dir`."""
    return "--" + name.replace("_", "-")


def settings_of(options: type[Options]) -> dict[str, Setting]:
    """Returns the `Setting` of each field by its name."""
    return {each.name: each.metadata["setting"] for each in fields(options) if each.metadata}


def require_kind(setting: Setting, value: object) -> None:
    """Raises `SettingsError` for a value of a TOML or JSON file that is of another type than its option."""
    is_switch = setting.kind == "switch"
    if not isinstance(value, str | int | float) or isinstance(value, bool) != is_switch:
        wanted = f"one of {', '.join(setting.choices)}, in quotes" if setting.choices else "a number or a text"
        raise SettingsError("must be true or false" if is_switch else f"must be {wanted}")


def parsed(name: str, setting: Setting, value: Any) -> Any:
    """Returns what somebody wrote as the option `name` has it: sizes and durations have units, paths may begin with
    `~`. Raises `SettingsError`."""
    flag = flag_of(name)
    if setting.read is not None:
        return setting.read(value, flag)
    if setting.choices:
        return str(value).lower()
    if setting.kind == "integer":
        try:
            return int(str(value))
        except ValueError:
            raise SettingsError(f"{flag}: {value!r} is not a valid integer") from None
    if setting.kind == "size":
        return parse_size(value, param=flag)
    if setting.kind == "duration":
        return parse_duration(value, param=flag)
    return expanded(value) if setting.kind in ("file", "folder") else value


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options that are checked when they are made. Raises `SettingsError` for a value outside its range."""

    def __post_init__(self) -> None:
        self._require_in_range()
        self.require_readable()
        self.require_together()

    def require_readable(self) -> None:
        """Raises `SettingsError` for a text that is not in the form of its option."""

    def require_together(self) -> None:
        """Raises `SettingsError` for a value that needs another one, or has no effect beside it."""

    def _require_in_range(self) -> None:
        for name, setting in settings_of(type(self)).items():
            value = getattr(self, name)
            flag, (minimum, maximum) = flag_of(name), setting.bounds
            if isinstance(value, str | Path):
                require_text(str(value), flag)
            if setting.choices and value not in setting.choices:
                raise SettingsError(f"{flag}: {value!r} is not one of {', '.join(setting.choices)}")
            is_number = setting.kind in ("integer", "size", "duration") and value is not None
            if is_number and not minimum <= value <= maximum:
                shown = format_size if setting.kind == "size" else str
                raise SettingsError(f"{flag}: {value} is out of range ({shown(minimum)} to {shown(maximum)})")
