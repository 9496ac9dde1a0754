"""The functions behind samples and log probabilities have the same bits on every CPU."""

from __future__ import annotations

import ast
import hashlib
import math
from pathlib import Path

import numpy as np

import diskprefix.daemon.engine
from diskprefix.daemon.engine.exponential import exponential, natural_logarithm

NUMBERS = -np.random.default_rng(0).integers(0, 90 << 16, 100_000).astype(np.float32) / np.float32(1 << 16)
"""Multiples of 2^-16."""
OF_LIBRARIES = {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "power", "pow", "sin", "cos", "tanh", "erf"}


def test_it_is_e_to_the_power_of_each_number_within_two_units_in_the_last_place() -> None:
    inside = NUMBERS[NUMBERS >= -87]
    expected = np.exp(inside.astype(np.float64))
    units = np.abs(exponential(inside) - expected) / np.spacing(expected.astype(np.float32))
    assert units.max() <= 2
    ends = np.array([0, -0.0, -87, np.nextafter(np.float32(-87), np.float32(-88)), -1e30, -np.inf], np.float32)
    assert (exponential(ends) > 0).tolist() == [True, True, True, False, False, False]
    assert exponential(ends)[:2].tolist() == [1.0, 1.0]


def test_all_cpus_have_these_bits() -> None:
    """`tools/arm64` and each CPU of CI compute them."""
    assert hashlib.sha256(exponential(NUMBERS).tobytes()).hexdigest()[:16] == "2550791ce828e688"


def test_a_logarithm_is_rounded_once() -> None:
    for number in (1.0, 1.0000000000000002, 151_936.0, 3.5e5, 1e-300):
        assert abs(natural_logarithm(number) - math.log(number)) <= math.ulp(math.log(number))
    assert natural_logarithm(1.0) == 0.0


def test_the_engine_computes_with_no_function_of_a_library_that_differs_by_cpu() -> None:
    for path in Path(diskprefix.daemon.engine.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("np", "math"):
                assert node.attr not in OF_LIBRARIES, f"{path}:{node.lineno}"
