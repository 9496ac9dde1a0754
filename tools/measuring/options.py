"""Command-line options that several tools have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

Command = TypeVar("Command", bound=Callable[..., Any])

FOLDER = click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where temporary stores are made, to measure another disk.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON with every sample instead of tables.")


def runs_option(default: int) -> Callable[[Command], Command]:
    return click.option(
        "--runs",
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        help="Runs; figures are their medians.",
    )
