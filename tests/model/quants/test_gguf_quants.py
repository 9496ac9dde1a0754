"""The quantised types of GGUF files are read number for number."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch

from diskprefix.model.quants.forms import unpacked
from diskprefix.model.quants.gguf_quants import _READERS, gguf_quants, quants_of

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


class Reader:
    """What is read of a file's tensors."""

    class Tensor:
        def __init__(self, kind: str) -> None:
            self.tensor_type, self.shape, self.data = gguf.GGMLQuantizationType[kind], (512, 16), content_of(kind)

    def __init__(self, *kinds: str) -> None:
        self.tensors = [self.Tensor(kind) for kind in kinds]


def test_a_matrix_keeps_the_quants_of_its_rows_wherever_they_stand() -> None:
    own = quants_of(Reader("Q4_1", "Q6_K"))
    found = gguf_quants("Q6_K", torch.from_numpy(content_of("Q6_K")), 16, 512)
    assert found is not None
    turned = found.dequantised().flip(0)
    kept = own(turned)
    assert kept is not None
    assert torch.equal(kept.dequantised(), turned)
    assert torch.equal(kept.codes, found.codes.flip(0))


def test_a_matrix_that_a_file_does_not_have_keeps_nothing() -> None:
    own = quants_of(Reader("Q8_0"))
    found = gguf_quants("Q8_0", torch.from_numpy(content_of("Q8_0")), 16, 512)
    assert found is not None
    weight = found.dequantised()
    weight[3, 5] += 1
    assert own(weight) is None
