"""The types of tensors in `.gguf` files: each is read as llama.cpp reads it, or refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diskprefix.errors import ModelError
from diskprefix.gguf_types import GGUF_TYPES
from diskprefix.native.library import operators
from diskprefix.runtime.files.file_matrix import FileMatrix, MatrixPacking
from diskprefix.runtime.files.gguf.gguf_file import read_tensors
from diskprefix.runtime.files.gguf.gguf_header import FileTensor
from diskprefix.runtime.plan.quants.forms import weights_of
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from tests.arrays import tensor_of
from tests.runtime.plan.gguf_bytes import write_tensors
from tests.runtime.plan.quants import reference

OF_LLAMA_CPP = {
    "NVFP4": "f90d28a9c0189fd9",
    "Q1_0": "fe2a2882496789ba",
    "Q2_0": "7838d0186a53324f",
}
"""Digests of what llama.cpp's library (ggml of llama.cpp 0.5.0) gives for the made-up content of `reference`."""
NO_WEIGHTS = {"Q8_1", "Q8_K"}
"""Types that llama.cpp makes while it computes, and no file has."""
PLAIN = {"F64", "F32", "F16", "I8", "I16", "I32", "I64"}
ROWS, COLUMNS = 32, 256


@pytest.mark.parametrize("kind", reference.COMPARED)
def test_numbers_are_those_of_llama_cpp(kind: str) -> None:
    content = reference.made_up(kind)
    assert reference.digest(reference.dequantised(kind, content)) == OF_LLAMA_CPP[kind]
    shape = len(content), content.shape[1] // reference.SIZES[kind][1] * reference.SIZES[kind][0]
    tensor = FileTensor("x", kind, shape, Path("none"), 0, np.dtype("u1"), content.shape)
    assert reference.digest(tensor.numbers(content)) == OF_LLAMA_CPP[kind]
    of_library = reference.of_llama_cpp(kind, content)
    assert of_library is None or reference.digest(of_library) == OF_LLAMA_CPP[kind]


def content_of(kind: str, rows: int) -> np.ndarray:
    weights, num_bytes = reference.SIZES[kind]
    return np.random.default_rng(1).integers(0, 64, (rows, COLUMNS // weights * num_bytes), dtype=np.uint8)


@pytest.mark.parametrize("kind", sorted(kind.name for kind in GGUF_TYPES))
def test_a_tensor_of_each_type_becomes_numbers_or_is_refused(kind: str, tmp_path: Path) -> None:
    number = next(known.number for known in GGUF_TYPES if known.name == kind)
    file = write_tensors(tmp_path / "a.gguf", {"x.weight": (number, (ROWS, COLUMNS), content_of(kind, ROWS).tobytes())})
    (tensor,) = read_tensors([file])[1]
    matrix = FileMatrix.whole(tensor)
    if kind in NO_WEIGHTS:
        with pytest.raises(ModelError, match=rf"a\.gguf: the tensor x\.weight has the type {kind}, which is none"):
            matrix.dequantised()
        return
    content = tensor.content()
    exact = content if kind in PLAIN else reference.dequantised(kind, content)
    assert torch.equal(tensor_of(matrix.dequantised()), torch.from_numpy(exact.astype(np.float32)).bfloat16())
    assert matrix.is_packable == (kind in FILE_FORMS)


def test_a_type_that_is_not_known_is_refused_with_the_name_of_the_tensor(tmp_path: Path) -> None:
    file = write_tensors(tmp_path / "a.gguf", {"blk.0.odd.weight": (43, (ROWS, COLUMNS), bytes(64))})
    with pytest.raises(ModelError) as raised:
        read_tensors([file])
    assert str(raised.value) == f"cannot read {file}: the tensor 'blk.0.odd.weight' has the type 43, which is not known"


# NVFP4 has a factor beside each matrix.

NVFP4, F32, F16 = 40, 0, 1


def written(path: Path, shape: tuple[int, ...], factors: np.ndarray | None, name: str = "blk.0.ffn_up") -> FileTensor:
    content = content_of("NVFP4", int(np.prod(shape[:-1])))
    tensors = {f"{name}.weight": (NVFP4, shape, content.tobytes())}
    if factors is not None:
        for end in (".scale", ".input_scale"):
            kind = F16 if factors.dtype == np.float16 else F32
            tensors[name + end] = (kind, factors.shape, factors.tobytes())
    (found,) = read_tensors([write_tensors(path, tensors)])[1]
    return found


@pytest.mark.parametrize("count", [None, 1, 3])
def test_factors_of_a_matrix_or_of_each_expert_are_in_its_numbers(count: int | None, tmp_path: Path) -> None:
    """Powers of 2, so that nothing is rounded but to bfloat16."""
    factors = None if count is None else 2.0 ** np.arange(-3, count - 3, dtype=np.float32)
    tensor = written(tmp_path / "a.gguf", (3, ROWS, COLUMNS), factors)
    numbers = reference.dequantised("NVFP4", content_of("NVFP4", 3 * ROWS)).reshape(3, ROWS, COLUMNS)
    expected = numbers if factors is None else numbers * factors[:, None, None]
    assert np.array_equal(tensor.numbers(tensor.content()), expected)
    rows = np.arange(3 * ROWS).reshape(3, ROWS)[:, ::-1]
    for matrix, wanted in ((FileMatrix.whole(tensor), expected), (FileMatrix.of(rows, [tensor]), expected[:, ::-1])):
        assert np.array_equal(tensor_of(matrix.dequantised()).float().numpy(), wanted)
        compiled = operators()
        if compiled is None:
            continue
        work = MatrixPacking(compiled)
        packed = work.take(matrix)
        work.finish_packing()
        found = np.stack([weights_of(one, matrix.form) for one in packed])
        assert np.array_equal(tensor_of(found).float().numpy(), wanted)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.ones(2, np.float32), "has 2 numbers of type F32; blk.0.ffn_up.weight needs 1 or 3 of type F32"),
        (np.ones(3, np.float16), "has 3 numbers of type F16; blk.0.ffn_up.weight needs 1 or 3 of type F32"),
    ],
)
def test_other_factors_are_refused(factors: np.ndarray, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"the tensor blk.0.ffn_up.scale {message}"):
        written(tmp_path / "a.gguf", (3, ROWS, COLUMNS), factors)


def test_factors_of_other_types_stay_tensors_that_nothing_takes(tmp_path: Path) -> None:
    tensors = {"a.weight": (8, (ROWS, 32), bytes(34 * ROWS)), "a.scale": (F32, (1,), bytes(4))}
    assert {one.name for one in read_tensors([write_tensors(tmp_path / "a.gguf", tensors)])[1]} == {*tensors}
