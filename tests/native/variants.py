"""The variants of the compiled operators that the tests run: all that this CPU has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest

from diskprefix.native import build, library
from diskprefix.native.library import Operators

VARIANTS = library.VARIANTS
WITH_PAIRS = ("amx", "avx512_bf16")
"""Variants with products in bfloat16 of their own."""
OF_INTEGERS = tuple(name for name in VARIANTS if name not in WITH_PAIRS)
"""Variants with products of integers, which all give the same bits."""
SAME_BITS = tuple(name for name in OF_INTEGERS if name != "neon_bf16")
"""Variants that have the same bits in everything they compute."""


def of_this_cpu(among: Sequence[str] = VARIANTS) -> list[Any]:
    """Returns those of the variants that the tests run, the best one first; a skipped test's parameter if there are
    none."""
    found = [name for name in _of_this_cpu() if name in among]
    return found or [pytest.param("", marks=pytest.mark.skip(reason="no operators of this CPU"))]


def print_kept(measure: Callable[[Operators], Mapping[str, str]], variants: Sequence[str]) -> None:
    """Prints the lines of a table of bits that are kept, with a column for each variant."""
    columns = []
    for variant in variants:
        library.choose(variant)
        operators = library.operators()
        assert operators is not None
        columns.append(measure(operators))
    for name in columns[0]:
        print(f'    "{name}": "{" ".join(column[name] for column in columns)}",')


@cache
def _of_this_cpu() -> tuple[str, ...]:
    """Compiles the operators if they are out of date; without a compiler the tests fail."""
    if not build.is_complete():
        build.build()
        library._loaded.cache_clear()
    return library.variants()
