"""Every variant of this CPU computes the bits of the best one.

Each has its own code for vectors of 4, 8 or 16 numbers, and for integers. `runtime/load/test_bits.py` compares all
operators with the bits that are kept.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from diskprefix.native.packing import TYPES
from diskprefix.prefixstore.kv.step import Run
from tests.closing import TESTED
from tests.native.one_operation import product
from tests.native.test_attention_operator import CASES, LENGTH, bits, layers
from tests.native.test_products import (
    ROWS,
    WIDE,
    cancelling,
    content_of,
    packed,
    repeated,
    weights_in,
    wide_rows,
)
from tests.native.variants import ROWS_OF_ALL, chosen, of_this_cpu

OTHERS = of_this_cpu()[1:] or of_this_cpu()


@pytest.fixture(params=OTHERS)
def other(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> str:
    record_property(TESTED, request.param)
    return str(request.param)


@pytest.mark.parametrize("rows", ROWS_OF_ALL)
def test_products_with_quants_have_the_same_bits(other: str, rows: str) -> None:
    for kind in TYPES:
        results = []
        for variant in (of_this_cpu()[0], other):
            operators = chosen(variant, rows)
            matrix, numbers = packed(operators, kind, content_of(kind, ROWS, WIDE)), wide_rows(37)
            shown = packed(operators, kind, repeated(kind))
            each = [product(operators, numbers[:count], matrix) for count in (1, 2, 3, 4, 5, 37)]
            results.append([*each, product(operators, cancelling(numbers), shown), weights_in(operators, matrix)])
        for expected, computed in zip(*results, strict=True):
            assert bits(computed) == bits(expected), kind


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_has_the_same_bits(other: str, dtype: torch.dtype) -> None:
    for name in CASES:
        results = []
        for variant in (of_this_cpu()[0], other):
            chosen(variant)
            layer, _ = layers(name, dtype)
            runs = Run(250, 40), Run(LENGTH - 3, 3), Run(LENGTH - 1, 1)
            results.append([layer.attended(run) for run in runs])
        for expected, computed in zip(*results, strict=True):
            assert bits(computed) == bits(expected), name
