"""Weights of a GGUF file are packed as the products take them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from diskprefix.model.quants.forms import unpacked
from diskprefix.model.quants.gguf_quants import form_of
from diskprefix.native.library import Operators
from diskprefix.native.packing import _TYPES, pack
from tests.model.quants.test_gguf_quants import content_of

ROWS, COLUMNS = 48, 512


def packed(operators: Operators, kind: str, content: np.ndarray, order: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the packed matrix, made in two pieces."""
    form = form_of(kind)
    assert form is not None
    out = torch.zeros(form.packed_shape(ROWS, COLUMNS), dtype=torch.uint8)
    bytes_of_file = torch.from_numpy(content)
    if order is None:
        pack(operators, kind, bytes_of_file[:16], None, out[:1])
        pack(operators, kind, bytes_of_file[16:], None, out[1:])
    else:
        pack(operators, kind, bytes_of_file, order[:32], out[:2])
        pack(operators, kind, bytes_of_file, order[32:], out[2:])
    return out


def weights_of(packed: torch.Tensor, kind: str) -> torch.Tensor:
    form = form_of(kind)
    assert form is not None
    return unpacked(packed, form).dequantised()


def expected_of(kind: str, content: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(content, gguf.GGMLQuantizationType[kind])).bfloat16()


@pytest.mark.parametrize("kind", _TYPES)
def test_packed_weights_are_those_of_the_gguf_library(operators: Operators, kind: str) -> None:
    content = content_of(kind, ROWS, COLUMNS)
    assert torch.equal(weights_of(packed(operators, kind, content), kind), expected_of(kind, content))


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K"])
def test_rows_are_put_into_an_order(operators: Operators, kind: str) -> None:
    content = content_of(kind, ROWS, COLUMNS)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    found = weights_of(packed(operators, kind, content, order), kind)
    assert torch.equal(found, expected_of(kind, content)[order.long()])


def test_threads_change_nothing(operators: Operators) -> None:
    content = content_of("Q5_K", ROWS, COLUMNS)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(packed(operators, "Q5_K", content))
    assert torch.equal(*found)


def test_other_halves_of_the_bytes_are_other_weights(operators: Operators) -> None:
    """The comparison would show a wrong order."""
    content = content_of("Q4_0", ROWS, COLUMNS)
    turned = content.reshape(ROWS, -1, 18).copy()
    turned[..., 2:] = turned[..., 2:] >> 4 | turned[..., 2:] << 4
    found = weights_of(packed(operators, "Q4_0", turned.reshape(ROWS, -1)), "Q4_0")
    assert not torch.equal(found, expected_of("Q4_0", content))
