"""Command-line options that several tools have."""

from __future__ import annotations

from pathlib import Path

import click

FOLDER = click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Where temporary stores are made, to measure another disk.",
)
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON with every sample instead of tables.")
