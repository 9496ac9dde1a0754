"""The tensors of a model's files as tables and as JSON, with their sums by type."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any

import click

from diskprefix.cli.tooling import plain, print_table
from diskprefix.units import counted, format_size

if TYPE_CHECKING:
    from diskprefix.model.load.served_tensors import ServedTensor


def described(tensors: Sequence[ServedTensor]) -> list[dict[str, Any]]:
    """Returns the tensors for JSON."""
    shown = ("name", "shape", "part", "kind", "stored_bytes", "form", "num_bytes")
    return [{key: value for key, value in asdict(one).items() if key in shown} | {"bits": one.bits} for one in tensors]


def types(tensors: Iterable[ServedTensor]) -> list[dict[str, Any]]:
    """Returns the sums by type and form for JSON: the largest first."""
    return [
        dict(zip(("kind", "form", "tensors", "stored_bytes", "num_bytes"), row, strict=True)) for row in _sums(tensors)
    ]


def show_tensors(tensors: Sequence[ServedTensor]) -> None:
    """Prints a table of the tensors."""
    titles = ("tensor", "shape", "in the file", "bytes", "served as", "bits", "bytes")
    cells = [
        (
            plain(one.name),
            " × ".join(map(str, one.shape)),
            plain(one.kind),
            format_size(one.stored_bytes),
            plain(one.form),
            f"{one.bits:.4g}",
            format_size(one.num_bytes),
        )
        for one in tensors
    ]
    print_table(titles, cells, wrapped=("tensor",))


def show_types(tensors: Sequence[ServedTensor]) -> None:
    """Prints a table of the sums by type, and a line of all together."""
    sums = [
        (plain(kind), plain(form), f"{number:,}", format_size(stored), format_size(served))
        for kind, form, number, stored, served in _sums(tensors)
    ]
    print_table(("in the file", "served as", "tensors", "bytes", "bytes"), sums)
    stored, served = (sum(getattr(one, name) for one in tensors) for name in ("stored_bytes", "num_bytes"))
    weights = sum(prod(one.shape) for one in tensors if one.stored_bytes)
    click.echo(
        f"{counted(len(tensors), 'tensor')}, {weights:,} weights: {format_size(stored)} in the file, "
        f"{format_size(served)} in memory, {served * 8 / max(weights, 1):.3g} bits of a weight"
    )


def _sums(tensors: Iterable[ServedTensor]) -> list[tuple[str, str, int, int, int]]:
    """Returns type in the file, form, number of tensors, bytes in the file and in memory: the largest first."""
    found: dict[tuple[str, str], list[int]] = {}
    for one in tensors:
        sums = found.setdefault((one.kind, one.form), [0, 0, 0])
        for place, number in enumerate((1, one.stored_bytes, one.num_bytes)):
            sums[place] += number
    rows = [(kind, form, sums[0], sums[1], sums[2]) for (kind, form), sums in found.items()]
    return sorted(rows, key=lambda row: -row[4])
