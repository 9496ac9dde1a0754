"""Matrices stay in a .gguf file: which rows make them is found without their weights, and they are packed early."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.native.library import Operators, operators
from diskprefix.runtime.files import file_matrix as module
from diskprefix.runtime.files.file_matrix import FileMatrix, MatrixPacking, in_order
from diskprefix.runtime.files.gguf.gguf import GgufModel
from diskprefix.runtime.files.gguf.gguf_file import read_tensors
from diskprefix.runtime.files.gguf.gguf_header import FileTensor
from diskprefix.runtime.load import loader
from diskprefix.runtime.load.loader import load_model
from diskprefix.runtime.plan.quants.forms import weights_of as weights_of_packed
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from tests.arrays import tensor_of
from tests.runtime.plan import plans, tiny

pytestmark = pytest.mark.usefixtures("cache")
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


def rows_of(change: Any, tensors: list[FileTensor]) -> np.ndarray[Any, Any]:
    firsts = zip(firsts_of(tensors), tensors, strict=True)
    shown = [torch.arange(first, first + one.num_rows).view(*one.shape[:-1], 1) for first, one in firsts]
    found: np.ndarray[Any, Any] = change(shown)[..., 0].numpy()
    return found


def weights_of(tensors: list[FileTensor]) -> list[torch.Tensor]:
    return [torch.from_numpy(tensor.numbers(tensor.content())).bfloat16() for tensor in tensors]


def permuted(weights: list[torch.Tensor]) -> torch.Tensor:
    return weights[0].view(2, 8, 2, -1).swapaxes(1, 2).reshape(32, -1)


def joined(weights: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[1][16:], weights[0].flip(0)])


def merged(weights: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([weights[2], weights[1].view(3, 16, -1)], dim=1)


@pytest.mark.parametrize("change", [permuted, joined, merged])
def test_a_matrix_is_made_of_the_rows_that_its_numbers_name(
    change: object, tensors: list[FileTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 700)
    monkeypatch.setattr(module, "_TASK_BYTES", 700)
    assert callable(change)
    matrix = FileMatrix.of(rows_of(change, tensors), tensors)
    expected = change(weights_of(tensors))
    assert matrix.shape == expected.shape
    assert torch.equal(tensor_of(matrix.dequantised()), expected)
    form, found = FILE_FORMS["Q4_1"], operators()
    assert form is not None
    if found is None:
        pytest.skip("no compiled operators")
    packed = np.empty(form.packed_shape(matrix.num_rows, COLUMNS), np.uint8)
    for task in matrix.tasks(found, packed):
        task()
    assert torch.equal(tensor_of(weights_of_packed(packed, form)), expected.view(-1, COLUMNS))


def test_columns_in_another_order_keep_their_quants(tensors: list[FileTensor], compiled: Operators) -> None:
    columns, weights = (2, 4, 8), weights_of(tensors)[0]
    matrix = FileMatrix.of(np.arange(32), tensors[:1], columns)
    expected = weights.view(32, 4, 2, 8).transpose(1, 2).flatten(1)
    assert torch.equal(tensor_of(matrix.dequantised()), expected)
    packed = packed_alone(compiled, matrix)
    assert torch.equal(tensor_of(in_order(weights_of_packed(packed, matrix.form), columns)), expected)


def test_a_file_that_was_cut_short_is_refused(tensors: list[FileTensor]) -> None:
    rows = rows_of(lambda numbers: numbers[2], tensors)
    matrix, compiled = FileMatrix.of(rows, tensors), operators()
    with tensors[0].file.open("r+b") as content:
        content.truncate(tensors[2].offset + 20)
    readings: list[Callable[[], object]] = [matrix.dequantised]
    if compiled is not None:
        packing = MatrixPacking(compiled)
        packing.take(matrix)
        readings.append(packing.finish_packing)
    for read in readings:
        with pytest.raises(ModelError, match="is cut short: it does not hold all of experts"):
            read()


# Packing, which goes on beside the rest of a start.


@pytest.fixture
def compiled() -> Operators:
    found = operators()
    if found is None:
        pytest.skip("no compiled operators")
    return found


@pytest.fixture
def file(compiled: Operators, tmp_path: Path) -> Path:
    assert compiled
    return tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_1")


def packed_alone(compiled: Operators, matrix: FileMatrix) -> np.ndarray:
    out = np.zeros(matrix.packed_shape, np.uint8)
    for task in matrix.tasks(compiled, out.reshape(-1, *out.shape[-2:])):
        task()
    return out


@pytest.mark.parametrize("num_helpers", [0, 1, 5])
def test_matrices_packed_together_equal_those_packed_alone(
    num_helpers: int, file: Path, compiled: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "num_threads", lambda: 1 + num_helpers)
    wanted, own = list[FileMatrix](), MatrixPacking.take

    def take(self: MatrixPacking, matrix: FileMatrix) -> np.ndarray:
        wanted.append(matrix)
        return own(self, matrix)

    monkeypatch.setattr(MatrixPacking, "take", take)
    packing = MatrixPacking(compiled)
    read = GgufModel.read(file, print)
    plans.logits_of(read.decoder_weights("bfloat16", packing), read.config)
    assert {matrix.order is None for matrix in wanted} == {True, False}
    packing.finish_packing()
    found = packing.matrices
    assert found.keys() == {matrix.content_digest for matrix in wanted}
    for matrix in wanted:
        assert np.array_equal(found[matrix.content_digest].packed, packed_alone(compiled, matrix))


def test_matrices_that_are_taken_later_are_packed_too(
    file: Path, compiled: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the threads have ended meanwhile, and if the work ended twice."""
    monkeypatch.setattr(module, "num_threads", lambda: 3)
    monkeypatch.setattr(module, "_IDLE_S", 0.001)
    matrices = [FileMatrix.whole(tensor) for tensor in read_tensors([file])[1] if tensor.kind == "Q4_1"]
    packing = MatrixPacking(compiled)
    for matrix in matrices:
        packing.take(matrix)
        for thread in packing._threads:
            thread.join()
        packing.finish_packing()
        assert np.array_equal(packing.matrices[matrix.content_digest].packed, packed_alone(compiled, matrix))
        packing.finish_packing()


def test_a_load_that_fails_leaves_no_thread(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, own = list[Thread](), Thread.start

    def start(self: Thread) -> None:
        if self.name == "weights":
            started.append(self)
        own(self)

    monkeypatch.setattr(Thread, "start", start)
    monkeypatch.setattr(module, "num_threads", lambda: 4)
    monkeypatch.setattr(loader, "read_tokenizer", Mock(side_effect=ModelError("no tokenizer")))
    with pytest.raises(ModelError, match="no tokenizer"):
        load_model(Settings(model=str(file)), print)
    assert started
    assert not [one for one in started if one.is_alive()]


def test_a_file_that_changes_after_packing_began_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(*_: object) -> str:
        os.utime(file, (1, 1))
        return ""

    monkeypatch.setattr(loader, "weights_digest", digest)
    with pytest.raises(ModelError, match="was changed while it was read; start again"):
        load_model(Settings(model=str(file)), print)
