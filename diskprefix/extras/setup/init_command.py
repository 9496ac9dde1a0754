"""`diskprefix init`: three questions, and a settings file; on request also a systemd unit for the user."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from diskprefix.cli.options import PathType, policy_values
from diskprefix.cli.policy_file import find_policy, packaged, toml_value
from diskprefix.cli.tooling import existing_folder, json_option, print_json
from diskprefix.errors import SettingsError
from diskprefix.settings import MAX_BUDGET, MIN_BUDGET, Settings, config_home, default_kv_cache_dir, expanded
from diskprefix.units import format_size, parse_size, whole_size

PRESETS = ("agent", "chat", "rag", "batch", "none")
_SHARE, _MOST_BYTES = 10, 64 * 2**30
"""The part of the free disk that is proposed for the cache, and the most that is."""


@click.command(short_help="Write a settings file, and a unit if you like.")
@click.option("--yes", is_flag=True, help="Ask nothing: take the proposed answers, and those that options give.")
@click.option("--model", metavar="ID|PATH", help="The model. Without it, the embedded SmolLM2-135M-Instruct.")
@click.option("--preset", type=click.Choice(PRESETS), help="What the server is for.")
@click.option("--budget", metavar="SIZE", help="How large the cache on disk may become.")
@click.option(
    "--file",
    metavar="FILE",
    type=PathType(dir_okay=False),
    default=lambda: config_home() / "settings.toml",
    show_default="$XDG_CONFIG_HOME/diskprefix/settings.toml",
    help="Where the settings go.",
)
@click.option("--unit", is_flag=True, help="Also write a systemd unit of the user, which serves with these settings.")
@click.option("--force", is_flag=True, help="Replace files that are there.")
@json_option
def init(
    yes: bool,
    model: str | None,
    preset: str | None,
    budget: str | None,
    file: Path,
    unit: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Ask which model, what for, and how much disk; then write the answers to a settings file.

    The file has the keys of `diskprefix serve --policy FILE`, which reads it. Nothing is fetched or started. With
    --unit and no answers, a file that is there stays, and the unit serves with it.

    \b
    diskprefix init
    diskprefix init --yes --preset agent --budget 40GiB
    diskprefix init --yes --unit

    \b
    Exit codes: 0 done; 2 wrong usage, or a file is there already.
    """
    file = expanded(file).absolute()
    unit_file = config_home().parent / "systemd" / "user" / "diskprefix.service"
    keeps = unit and not force and file.is_file() and (model, preset, budget) == (None, None, None)
    for target in (*([] if keeps else [file]), *([unit_file] if unit else [])):
        if os.path.lexists(target) and not force:
            raise SettingsError(f"{target} is there already; replace it with --force, or give another --file")
    written = [] if keeps else [_write(file, _answered(model, preset, budget, asks=not yes))]
    if unit:
        written.append(_write(unit_file, _unit_text(_command(file))))
    if as_json:
        print_json({"files": [str(path) for path in written], "command": _command(file)})
        return
    if keeps:
        click.echo(f"kept  {file}")
    for path in written:
        click.echo(f"wrote {path}")
    click.echo(f"check it   diskprefix doctor --policy {shlex.quote(str(file))}")
    click.echo(f"serve      diskprefix serve --policy {shlex.quote(str(file))}")
    if unit:
        click.echo("or         systemctl --user daemon-reload && systemctl --user enable --now diskprefix")


def _answered(model: str | None, preset: str | None, budget: str | None, *, asks: bool) -> str:
    """Returns the settings file, with the answers to what no option says. Raises `SettingsError`."""
    if asks and not sys.stdin.isatty():
        raise SettingsError("standard input is no terminal to ask questions at; add --yes to take the proposed answers")
    proposed = _proposed_budget()
    if asks:
        model = model or click.prompt(
            "Which model (a hub id, a folder, a .gguf file; empty for the embedded one)", default="", err=True
        )
        preset = preset or click.prompt(
            "What for", type=click.Choice(PRESETS), default="agent", err=True, show_choices=True
        )
        budget = budget or click.prompt("How much disk for the cache", default=whole_size(proposed), err=True)
    return _settings_text(model or None, preset or "agent", budget or whole_size(proposed))


def _settings_text(model: str | None, preset: str, budget: str) -> str:
    """Returns the file. Raises `SettingsError` for a budget or a preset that cannot be."""
    size = parse_size(budget, param="--budget")
    if not MIN_BUDGET <= size <= MAX_BUDGET:
        bounds = f"{format_size(MIN_BUDGET)} to {format_size(MAX_BUDGET)}"
        raise SettingsError(f"--budget: {budget} is out of range ({bounds})")
    lines = ["# Settings of diskprefix, for `diskprefix serve --policy FILE`. A flag or a variable overrides them.", ""]
    if model is not None:
        lines.append(f"model = {toml_value(model if not expanded(model).exists() else _absolute(model))}")
    values: dict[str, Any] = {} if preset == "none" else policy_values(preset)
    if values:
        lines.append(f"# From the preset {preset}; {find_policy(preset).name} says why.")
    for name, value in values.items():
        if name != "kv_cache_budget":
            lines.append(f"{name} = {toml_value(value)}")
    lines += ["# The largest size of the store's file.", f"kv_cache_budget = {toml_value(budget)}"]
    return "\n".join(lines) + "\n"


def _absolute(model: str) -> str:
    return str(expanded(model).absolute())


def _proposed_budget() -> int:
    """Returns a tenth of the free disk, whole GiB, at least the default."""
    disk = os.statvfs(existing_folder(default_kv_cache_dir()))
    share = disk.f_bavail * disk.f_frsize // _SHARE // 2**30 * 2**30
    return max(Settings.kv_cache_budget, min(share, _MOST_BYTES))


def _command(file: Path) -> str:
    """Returns the command line that serves with the settings, by the Python that runs now."""
    return shlex.join([sys.executable, "-P", "-m", "diskprefix", "serve", "--policy", str(file)])


def _unit_text(command: str) -> str:
    """Returns the packaged unit of a user with another command line, and without the comment on how to install it."""
    text = (packaged("units", checkout="systemd/user") / "diskprefix.service").read_text(encoding="utf-8")
    lines = text[text.index("[Unit]") :].splitlines()
    # systemd reads a % as the beginning of a specifier.
    served = [f"ExecStart={command.replace('%', '%%')}" if line.startswith("ExecStart=") else line for line in lines]
    return "\n".join(["# diskprefix for one user. Written by `diskprefix init`.", "", *served]) + "\n"


def _write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file
