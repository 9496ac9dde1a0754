"""The types of a model's tensors, in its files and as they are served, with their sums."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import click

from diskprefix.cli.tooling import plain, print_table
from diskprefix.units import counted, format_size

if TYPE_CHECKING:
    from diskprefix.model.load.served_tensors import ServedTensor


def types(tensors: Iterable[ServedTensor]) -> list[dict[str, Any]]:
    """Returns the sums by type in the file and form in memory, the largest first."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for one in tensors:
        sums = found.setdefault((one.kind, one.form), {"tensors": 0, "stored_bytes": 0, "num_bytes": 0})
        sums["tensors"] += 1
        sums["stored_bytes"] += one.stored_bytes
        sums["num_bytes"] += one.num_bytes
    rows: list[dict[str, Any]] = [{"kind": kind, "form": form, **sums} for (kind, form), sums in found.items()]
    return sorted(rows, key=lambda row: -row["num_bytes"])


def show_types(tensors: Sequence[ServedTensor]) -> None:
    """Prints a table of the sums by type, and a line of all together."""
    rows = types(tensors)
    cells = [
        (
            plain(row["kind"]),
            plain(row["form"]),
            f"{row['tensors']:,}",
            format_size(row["stored_bytes"]),
            format_size(row["num_bytes"]),
        )
        for row in rows
    ]
    print_table(("in the file", "served as", "tensors", "bytes", "bytes"), cells)
    stored, served = (sum(row[name] for row in rows) for name in ("stored_bytes", "num_bytes"))
    weights = sum(prod(one.shape) for one in tensors if one.stored_bytes)
    click.echo(
        f"{counted(len(tensors), 'tensor')}, {weights:,} weights: {format_size(stored)} in the file, "
        f"{format_size(served)} in memory, {served * 8 / max(weights, 1):.3g} bits of a weight"
    )
