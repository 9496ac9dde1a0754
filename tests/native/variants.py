"""The variants of the compiled operators that the tests run: all that this CPU has."""

from __future__ import annotations

from functools import cache

from diskprefix.native import build, library

VARIANTS = library.VARIANTS
TESTED = "operators"
"""The property of a test that names the variant it tested. The closing lines count them."""

WITH_PAIRS = ("amx", "avx512_bf16")
"""Variants with products in bfloat16 of their own, which take matrices in bfloat16 too."""


@cache
def of_this_cpu() -> tuple[str, ...]:
    """Returns the variants, the best one first. Compiles the operators if they are out of date; without a compiler the
    tests fail."""
    if not build.is_current():
        build.build()
        library._loaded.cache_clear()
    return tuple(name for name in VARIANTS if library._loaded(name)[0])
