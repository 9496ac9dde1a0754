"""Command-line options that several tools have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from diskprefix.settings import CODECS
from tools.models import real

Command = TypeVar("Command", bound=Callable[..., Any])

FOLDER = click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where temporary stores are made, to measure another disk.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON with every sample instead of tables.")
MODEL = click.option(
    "--model", default=real.DEFAULT, show_default=True, help="A real model's name or a model's folder."
)
MODELS = click.option(
    "--model",
    "models",
    multiple=True,
    default=(real.DEFAULT, "qwen2.5-coder-0.5b"),
    type=click.Choice(real.NAMES),
    show_default=True,
    help="Repeatable.",
)
DATA = click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("../shared/data"),
    show_default=True,
    help="The folder with the folders of the published data.",
)


def codec_option(default: str) -> Callable[[Command], Command]:
    return click.option(
        "--codec", type=click.Choice(CODECS), default=default, show_default=True, help="How the state is stored."
    )


def runs_option(default: int) -> Callable[[Command], Command]:
    return click.option(
        "--runs",
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        help="Runs; figures are their medians.",
    )
