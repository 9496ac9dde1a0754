"""The variants of the compiled operators that the tests run.

All variants compute the same bits, so one of them stands for all: its operators are tested in depth, and each other
variant is compared with it (`test_variants.py`, `runtime/load/test_bits.py`). Rows of bfloat16 have code and bits of
their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from diskprefix.native import build, library
from diskprefix.native.library import Operators

VARIANTS = library.VARIANTS
ROWS_OF_ALL = ("8", "15")
"""The rows that every variant has."""


def of_this_cpu(among: Sequence[str] = VARIANTS) -> list[Any]:
    """Returns those of the variants that this CPU has, the best one first; a skipped test's parameter if there are
    none."""
    there = [name for name in _of_this_cpu() if name in among]
    return there or [pytest.param("", marks=pytest.mark.skip(reason="no operators of this CPU"))]


def in_depth(*rows: str) -> list[Any]:
    """Returns parameters for `chosen`: the best variant with each kind of `rows`, `bf16` where this CPU has it."""
    best = dict.fromkeys(ROWS_OF_ALL, _of_this_cpu()[0]) | {"bf16": "amx"}
    there = [kind for kind in rows if kind != "bf16" or _has_bfloat16_rows()]
    return [pytest.param((best[kind], kind), id=f"{best[kind]}-{kind}") for kind in there]


def chosen(variant: str, rows: str = "8") -> Operators:
    """Returns operators, which are those of this process from now on."""
    library.choose(variant, rows)
    operators = library.operators()
    assert operators is not None
    return operators


def name_of(operators: Operators) -> str:
    """Returns the name of a variant, with rows that are not the usual ones."""
    return operators.variant if operators.rows == "8" else f"{operators.variant} with --rows {operators.rows}"


def _has_bfloat16_rows() -> bool:
    return bool(_of_this_cpu()) and library.has_bfloat16_rows()


@cache
def _of_this_cpu() -> tuple[str, ...]:
    """Compiles the operators if they are out of date; without a compiler the tests fail."""
    if not build.is_complete("runnable"):
        build.build("runnable")
        library._loaded.cache_clear()
    return library.variants()
