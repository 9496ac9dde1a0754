"""The sources that the matrices compare with, each fetched on first use: packages of other projects.

Without them, a part of a matrix is not tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from diskprefix.progress import Report
from tests.daemon.chat.families.sources import SourcesMissing, sources
from tools.benchmarks.files import converter
from tools.benchmarks.template_sources import templates
from tools.benchmarks.token_ids import vocabularies
from tools.measuring.environments import NotInstalled, llama_cpp_libraries
from tools.models.real import print_report


def _tokenizers(_report: Report) -> Path:
    return sources()


SOURCES: Mapping[str, Callable[[Report], Any]] = {
    "tokenizers": _tokenizers,
    "converter": converter,
    "libraries-of-llama.cpp": llama_cpp_libraries,
    "vocabularies": vocabularies,
    "templates": templates,
}
"""The function that finds each of them. It raises `NotInstalled` or `SourcesMissing`."""


@click.command()
def main() -> None:
    """Fetch what the matrices compare with, 700 MB, and print the names of those that cannot be had."""
    for name, find in SOURCES.items():
        try:
            find(print_report)
        except (NotInstalled, SourcesMissing) as error:
            print_report(f"{name}: {error}")
            click.echo(name)
