"""The quantised types of GGUF files are read number for number."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from diskprefix.model.quants import forms
from diskprefix.model.quants import gguf_quants as gguf_quants_module
from diskprefix.model.quants.forms import Quants, unpacked
from diskprefix.model.quants.gguf_quants import _READERS, gguf_quants

HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""At which bytes of a block there are float16 numbers, where not at the first one alone."""


def content_of(kind: str, rows: int = 16, columns: int = 512) -> np.ndarray[Any, Any]:
    """Random blocks with random finite scales."""
    rng = np.random.default_rng(len(kind))
    weights, num_bytes, _ = _READERS[kind]
    blocks = rng.integers(0, 256, (rows, columns // weights, num_bytes), dtype=np.uint8)
    for at in HALVES.get(kind, (0,)):
        numbers = rng.normal(0, 0.01, blocks[..., :1].shape).astype(np.float16)
        blocks[..., at : at + 2] = numbers.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", _READERS)
def test_a_type_gives_the_numbers_that_the_gguf_library_gives(kind: str) -> None:
    content = content_of(kind)
    expected = gguf.quants.dequantize(content, gguf.GGMLQuantizationType[kind])
    quants = gguf_quants(kind, torch.from_numpy(content), 16, 512)
    assert quants is not None
    assert torch.equal(quants.dequantised(), torch.from_numpy(expected).bfloat16())
    assert torch.equal(unpacked(quants.packed(), quants.form).dequantised(), quants.dequantised())


def test_the_size_of_the_codes_is_that_of_the_file_or_the_next_one() -> None:
    bits = {}
    for kind in _READERS:
        quants = gguf_quants(kind, torch.from_numpy(content_of(kind)), 16, 512)
        assert quants is not None
        bits[kind] = quants.bits
    assert bits == {kind: 8 if kind == "Q6_K" else int(kind[1]) for kind in _READERS}


def test_other_types_have_no_such_form() -> None:
    assert gguf_quants("Q2_K", torch.zeros(16, 84, dtype=torch.uint8), 16, 256) is None


def read(kind: str) -> Quants:
    found = gguf_quants(kind, torch.from_numpy(content_of(kind)), 16, 512)
    assert found is not None
    return found


def test_a_matrix_is_the_same_when_it_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read("Q5_K")
    monkeypatch.setattr(gguf_quants_module, "_AT_ONCE", 3 * 512)
    monkeypatch.setattr(forms, "_AT_ONCE", 5 * 512)
    pieces = read("Q5_K")
    assert torch.equal(pieces.packed(), whole.packed())
    assert torch.equal(pieces.dequantised(), unpacked(whole.packed(), whole.form).dequantised())
