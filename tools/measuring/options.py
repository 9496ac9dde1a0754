"""The common parts of the command lines of several tools."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Collection
from pathlib import Path

import click

from diskprefix.errors import DiskPrefixError
from tests.faults.seeds import seeds_of

FOLDER = click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The folder for temporary stores, to measure another disk.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON with every sample instead of tables.")


def seed_option(name: str, about: str, flag: str = "--seed") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns the option of a simulator's seed: without one, every run outside CI tries another, and prints it."""

    def told(_context: click.Context, _option: click.Parameter, value: int | None) -> int:
        if value is None:
            value = seeds_of(name, 1)[0]
            click.echo(f"{flag} {value}", err=True)
        return value

    shown = "drawn from the clock, in CI from the commit"
    return click.option(flag, type=click.IntRange(min=0), callback=told, help=f"{about} [default: {shown}]")


Values = tuple[str, ...]


def known_engines(names: Collection[str]) -> Callable[[click.Context, click.Parameter, Values], Values]:
    """Returns the callback of an option whose values are engines: one of `names`, with more arguments of its own."""

    def known(_context: click.Context, _option: click.Parameter, value: Values) -> Values:
        for wanted in value:
            if not wanted.strip() or shlex.split(wanted)[0] not in names:
                raise click.BadParameter(f"{wanted!r} does not begin with one of {', '.join(names)}")
        return value

    return known


def run_tool(command: click.Command, name: str) -> None:
    """Runs what the command line asks for. A user's error is one line and exit code 1."""
    try:
        command(prog_name=name)
    except (OSError, DiskPrefixError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(1)
