"""The policy files: TOML with the field names of `Settings`. Presets are policy files too."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diskprefix.daemon.settings import SETTINGS
from diskprefix.errors import DiskPrefixError, SettingsError
from diskprefix.folders import policies_folder
from diskprefix.nearest import meant
from diskprefix.setting import flag_of, require_kind


def find_policy(name_or_path: str) -> Path:
    """Returns the file of a preset by its name (`agent`), or a TOML file by its path. Raises `SettingsError`."""
    if name_or_path.endswith(".toml") or os.sep in name_or_path:
        if Path(name_or_path).is_file():
            return Path(name_or_path)
        raise SettingsError(f"--policy: no such file: {name_or_path}")
    presets = {path.stem: path for path in sorted(policies_folder().glob("*.toml")) if path.stem != "canonicalisers"}
    if name_or_path in presets:
        return presets[name_or_path]
    raise SettingsError(
        f"--policy: no preset {name_or_path!r} (there are: {', '.join(presets)}); a file name must end in .toml"
    )


def read_policy(path: Path, convert: Callable[[str, Any], Any] | None = None) -> dict[str, Any]:
    """Returns the values in a policy file by field name. Raises a `SettingsError` that names file, line and key.

    `convert` takes a field name and its TOML value and returns the value to use. Its errors get the line too.
    """
    text, values = read_toml(path, "--policy")
    settings: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        where = f"--policy: {path}:{_line_of(text, key)}"
        if name not in SETTINGS:
            raise SettingsError(f"{where}: unknown key {key!r}{meant(name, SETTINGS)}")
        if name in settings:
            raise SettingsError(f"{where}: {key}: is given twice, with - and with _")
        try:
            settings[name] = checked_value(name, value, convert)
        except SettingsError as error:
            raise SettingsError(f"{where}: {key}: {error.message}") from error
    return settings


def read_toml(path: Path, flag: str) -> tuple[str, dict[str, Any]]:
    """Returns the text of a TOML file and its values. Raises a `SettingsError` that names the flag and the file."""
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"{flag}: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"{flag}: {path} is not valid TOML: {error}") from error


def checked_value(name: str, value: object, convert: Callable[[str, Any], Any] | None = None) -> Any:
    """Returns the value of a field in a TOML file, after `convert`. Raises `SettingsError` with the reason alone."""
    require_kind(SETTINGS[name], value)
    try:
        return value if convert is None else convert(name, value)
    except DiskPrefixError as error:
        raise SettingsError(error.message.removeprefix(f"{flag_of(name)}: ")) from error


def _line_of(text: str, key: str) -> int:
    pattern = re.compile(rf"""\s*(\[+\s*)?["']?{re.escape(key)}["']?\s*[=.\]]""")
    return next((n for n, line in enumerate(text.splitlines(), start=1) if pattern.match(line)), 1)


def toml_value(value: Any) -> str:
    """Returns a value in the syntax of a policy file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    # JSON's texts are TOML's, as far as paths and names go.
    return json.dumps(str(value), ensure_ascii=False) if isinstance(value, str | Path) else str(value)
