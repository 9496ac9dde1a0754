"""`diskprefix serve --print-config`: every setting, its value, and where that came from, as a policy file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from diskprefix.cli.options import policy_of, variable_of
from diskprefix.settings import SETTINGS, Settings, flag_of

_COLUMN = 44


def config_text(context: click.Context, settings: Settings) -> str:
    """Returns the settings in TOML, which `--policy` reads again. A setting that has no value is commented out.

    `context` is that of the command whose flags became `settings`.
    """
    lines = [_line(context, name, getattr(settings, name)) for name in SETTINGS]
    return "\n".join(lines)


def _line(context: click.Context, name: str, value: Any) -> str:
    shown = _size(value) if SETTINGS[name].kind == "size" and value is not None else _toml(value)
    said = f"# {name} =" if value is None else f"{name} = {shown}"
    return f"{said:<{_COLUMN}} # {_source(context, name)}"


def _source(context: click.Context, name: str) -> str:
    flag = flag_of(name)
    match context.get_parameter_source(name):
        case ParameterSource.COMMANDLINE:
            return f"the flag {flag}"
        case ParameterSource.ENVIRONMENT:
            return f"the variable {variable_of(flag)}"
        case ParameterSource.DEFAULT_MAP:
            return f"the policy {policy_of(context)}"
    unset = SETTINGS[name].unset
    return f"default: {unset}" if unset else "default"


def _size(num_bytes: int) -> str:
    """Returns bytes in the largest unit that they are a whole number of."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes and num_bytes % factor == 0:
            return f'"{num_bytes // factor}{unit}"'
    return str(num_bytes)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # JSON's texts are TOML's, as far as paths and names go.
    return json.dumps(str(value), ensure_ascii=False) if isinstance(value, str | Path) else str(value)
