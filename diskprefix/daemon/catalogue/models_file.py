"""`models.toml`: models by name, each a table with its file or repository, its aliases and its own settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from diskprefix.daemon.cli.options import build_settings, policy_value
from diskprefix.daemon.cli.policy_file import checked_value, read_toml
from diskprefix.daemon.settings import PER_MODEL, Settings
from diskprefix.errors import SettingsError
from diskprefix.nearest import meant
from diskprefix.runtime.fetch.proposals import meant_name
from diskprefix.setting import flag_of
from diskprefix.units import parse_duration

_FLAG = "--models-file"
_OWN_KEYS = {
    "model": "a text: a file, a folder or a repository",
    "aliases": "a list of names",
    "pin": "true or false",
    "idle_unload": "a duration, such as 30m",
}


class ListedModel(Struct, frozen=True, kw_only=True):
    """A table of `models.toml`. `own` are its settings by field name; `model` is a path or a repository."""

    name: str
    model: str
    aliases: tuple[str, ...] = ()
    pin: bool = False
    idle_unload_s: float | None = None
    own: Mapping[str, Any]


def read_models_file(path: Path) -> list[ListedModel]:
    """Returns the tables of a file. Raises a `SettingsError` with the path of the key at fault."""
    _, values = read_toml(path, _FLAG)
    return [_listed(path, name, table) for name, table in values.items()]


def _listed(path: Path, name: str, table: object) -> ListedModel:
    where = f"{_FLAG}: {path}: {name}"
    if not isinstance(table, dict):
        raise SettingsError(f"{where}: must be a table: [{name}], with the model's keys below it")
    if not name.strip():
        raise SettingsError(f"{where}: a model needs a name")
    values: dict[str, Any] = {}
    for key, value in table.items():
        field = key.replace("-", "_")
        if field in values:
            raise SettingsError(f"{where}.{key}: is given twice, with - and with _")
        try:
            values[field] = _value(field, value)
        except SettingsError as error:
            reason = error.message.removeprefix(f"{field}: ").removeprefix(f"{flag_of(field)}: ")
            raise SettingsError(f"{where}.{key}: {reason}") from error
    if "model" not in values:
        raise SettingsError(f"{where}.model: is missing; give a file, a folder or a repository")
    own = {field: value for field, value in values.items() if field in PER_MODEL}
    for field in own.keys() & {"chat_template", "draft_model"}:
        own[field] = _beside(path, str(own[field]))
    try:
        parsed = build_settings(own)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error.message}") from error
    return ListedModel(
        name=name,
        model=_beside(path, values["model"]),
        aliases=values.get("aliases", ()),
        pin=values.get("pin", False),
        idle_unload_s=values.get("idle_unload"),
        own={field: getattr(parsed, field) for field in own},
    )


def _value(field: str, value: object) -> Any:
    """Returns the value of a key. Raises `SettingsError` with the reason alone."""
    match field, value:
        case "model" | "draft_model", str() if value.strip():
            return value
        case "draft_model", _:
            raise SettingsError("must be a file, a folder or a repository")
        case "aliases", list() if all(isinstance(alias, str) and alias.strip() for alias in value):
            return tuple(value)
        case "pin", bool():
            return value
        case "idle_unload", str() | int() | float() if not isinstance(value, bool):
            return Settings(idle_unload=parse_duration(value, param=field)).idle_unload
    if field in _OWN_KEYS:
        raise SettingsError(f"must be {_OWN_KEYS[field]}")
    if field not in PER_MODEL:
        keys = (*_OWN_KEYS, *sorted(PER_MODEL))
        raise SettingsError(f"unknown key{meant(field, keys)}; a model has {', '.join(keys)}")
    return checked_value(field, value, policy_value)


def _beside(file: Path, model: str) -> str:
    """Returns the path of a model beside the file, if there is one, since the working directory may be any."""
    path = Path(os.path.expanduser(model))
    beside = file.absolute().parent / path
    return str(beside) if os.path.exists(beside) else str(path) if path.is_absolute() else meant_name(model)
