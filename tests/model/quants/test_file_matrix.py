"""Matrices stay in a .gguf file: the rows that make them are found without their weights, and packed when read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from diskprefix.errors import ModelError
from diskprefix.model.load.gguf_file import read_tensors
from diskprefix.model.load.gguf_header import FileTensor
from diskprefix.model.quants import file_matrix as module
from diskprefix.model.quants.file_matrix import FileMatrix, load_matrices, numbered, numbers_in, save_matrices
from diskprefix.model.quants.matrix_packing import MatrixPacking
from diskprefix.model.quants.products import weights_of as weights_of_packed
from diskprefix.model.quants.quant_form import form_of
from diskprefix.native.library import operators

COLUMNS = 64
NAMES = {"first": (32, COLUMNS), "second": (48, COLUMNS), "experts": (3, 16, COLUMNS)}


@pytest.fixture
def tensors(tmp_path: Path) -> list[FileTensor]:
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "tensors.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q4_1
    for name, shape in NAMES.items():
        weights = generator.standard_normal(shape, dtype=np.float32)
        writer.add_tensor(name, gguf.quantize(weights, kind), raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return read_tensors([tmp_path / "tensors.gguf"])[1]


def firsts_of(tensors: list[FileTensor]) -> list[int]:
    return [sum(tensor.num_rows for tensor in tensors[:count]) for count in range(len(tensors))]


def shown(tensors: list[FileTensor]) -> list[torch.Tensor]:
    return [numbered(first, tensor.shape) for first, tensor in zip(firsts_of(tensors), tensors, strict=True)]


def weights_of(tensors: list[FileTensor]) -> list[torch.Tensor]:
    return [torch.from_numpy(gguf.dequantize(tensor.content(), tensor.type)).bfloat16() for tensor in tensors]


def permuted(weights: list[torch.Tensor]) -> torch.Tensor:
    return weights[0].view(2, 8, 2, -1).swapaxes(1, 2).reshape(32, -1)


def joined(weights: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[1][16:], weights[0].flip(0)])


def merged(weights: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[2], weights[1].view(3, 16, -1)], dim=1)


@pytest.mark.parametrize("change", [permuted, joined, merged])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_is_made_of_the_rows_that_its_numbers_name(
    change: object, dtype: torch.dtype, tensors: list[FileTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 700)
    monkeypatch.setattr(module, "_TASK_BYTES", 700)
    assert callable(change)
    rows = numbers_in(change([one.to(dtype) for one in shown(tensors)]))
    assert rows is not None
    matrix = FileMatrix.of(rows, tensors, firsts_of(tensors))
    assert matrix is not None
    expected = change(weights_of(tensors))
    assert matrix.shape == expected.shape
    assert torch.equal(matrix.dequantised(), expected)
    form, found = form_of("Q4_1"), operators()
    assert form is not None
    if found is None:
        pytest.skip("no compiled operators")
    packed = torch.empty(form.packed_shape(matrix.num_rows, COLUMNS), dtype=torch.uint8)
    for task in matrix.tasks(found, packed):
        task()
    assert torch.equal(weights_of_packed(packed, form), expected.view(-1, COLUMNS))


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one - 1,
        lambda one: -one,
        lambda one: one.t(),
        lambda one: one[:, [1, 0, 2, 3, 4]],
        lambda one: one + 0.5,
    ],
)
def test_numbers_that_were_computed_with_are_none(change: object, tensors: list[FileTensor]) -> None:
    assert callable(change)
    assert numbers_in(change(shown(tensors)[0])) is None


def test_a_folder_says_which_rows_make_which_matrices(tensors: list[FileTensor], tmp_path: Path) -> None:
    numbers = shown(tensors)
    made = [numbers_in(one) for one in (numbers[1], permuted(numbers))]
    matrices = [FileMatrix.of(rows, tensors, firsts_of(tensors)) for rows in made if rows is not None]
    named = {name: matrix for name, matrix in zip("ab", matrices, strict=True) if matrix is not None}
    assert named["a"].order is None
    save_matrices(named, [tensors[0].file], tmp_path)
    moved = tensors[0].file.rename(tmp_path / "moved.gguf")
    found = load_matrices(tmp_path, [moved])
    expected = weights_of([replace(tensor, file=moved) for tensor in tensors])
    assert torch.equal(found["a"].dequantised(), expected[1])
    assert torch.equal(found["b"].dequantised(), permuted(expected))
    assert not load_matrices(tmp_path / "other")


def test_a_file_that_was_cut_short_is_refused(tensors: list[FileTensor]) -> None:
    file = tensors[0].file
    rows = numbers_in(shown(tensors)[2])
    assert rows is not None
    matrix = FileMatrix.of(rows, tensors, firsts_of(tensors))
    assert matrix is not None
    with file.open("r+b") as content:
        content.truncate(tensors[2].offset + 20)
    with pytest.raises(ModelError, match="is cut short: it does not hold all of experts"):
        matrix.dequantised()
    found = operators()
    if found is not None:
        with pytest.raises(ModelError, match="is cut short: it does not hold all of experts"):
            MatrixPacking(found, [matrix]).finish()
