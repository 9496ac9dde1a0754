"""Matrices that are made of several tensors of a file, whose types may differ: each type keeps its own quants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.gguf_types import GGUF_TYPES
from diskprefix.runtime.files.file_matrix import MatrixPacking
from diskprefix.runtime.files.gguf.architecture import Architecture, _several
from diskprefix.runtime.files.gguf.gguf_file import read_tensors
from diskprefix.runtime.files.gguf.gguf_header import FileTensor
from diskprefix.runtime.files.gguf.gguf_weights import GgufWeights
from diskprefix.runtime.files.gguf.known_families import _BY_NAME
from diskprefix.runtime.files.gguf.mixture_families import MIXTRAL, deepseek
from diskprefix.runtime.files.gguf.names import NAMES
from diskprefix.runtime.files.gguf.sources import TensorSource
from diskprefix.runtime.plan.operands import RowRuns
from diskprefix.runtime.plan.part_options import ExpertsForm
from diskprefix.runtime.plan.quants.forms import compiled, weights_of
from diskprefix.runtime.plan.quants.quant_form import FILE_FORMS
from diskprefix.runtime.plan.weights import Quants
from tests.arrays import tensor_of
from tests.runtime.plan.gguf_bytes import write_tensors
from tests.runtime.plan.quants import reference

COLUMNS, EXPERTS = 256, 2
KEY_HEADS, KEY_DIM, VALUES = 2, 16, 64
"""Heads of keys and their size, and the rows of values, in layers with the delta rule."""
ROWS = {"attn_qkv": 2 * KEY_HEADS * KEY_DIM + VALUES, "attn_gate": VALUES, "attn_q": 64}
"""Rows of tensors; others have 32."""
NUMBERS = {kind.name: kind.number for kind in GGUF_TYPES}
KINDS = sorted(FILE_FORMS)


def joins() -> Iterator[tuple[str, TensorSource]]:
    """Yields each parameter of any architecture that is made of the rows of several tensors, and its source."""
    architectures = [*_BY_NAME.values(), MIXTRAL, deepseek(SimpleNamespace(get=lambda *_: None, has=lambda _: False))]  # type: ignore[arg-type]
    for architecture in architectures:
        for parameter, found in {**NAMES, **architecture.sources}.items():
            yield from ((parameter, one) for one in _several(found) if len(one.tensors) > 1 and one.values is None)


JOINS = {
    f"{parameter} of {' and '.join(one.tensors)}, {one.rows.__name__.strip('_<>')}": (parameter, one)
    for parameter, one in joins()
}


def content_of(kind: str, rows: int, seed: int) -> np.ndarray:
    """Returns rows of a type with scales that are numbers. BF16 has any normal numbers."""
    weights, num_bytes = reference.SIZES[kind]
    return np.random.default_rng(seed).integers(1, 60, (rows, COLUMNS // weights * num_bytes), dtype=np.uint8)


def write(path: Path, source: TensorSource, kinds: tuple[str, ...]) -> list[FileTensor]:
    """Writes the tensors of a source with these types; those of experts with their last matrices beside them."""
    tensors = dict(zip(source.tensors, kinds, strict=True))
    is_of_experts = source.tensors[0].endswith("_exps")
    if is_of_experts:
        tensors["ffn_down_exps"] = kinds[0]
    made = {}
    for seed, (name, kind) in enumerate(tensors.items()):
        rows = COLUMNS if name == "ffn_down_exps" else ROWS.get(name, COLUMNS if is_of_experts else 32)
        shape = (EXPERTS, rows, COLUMNS) if is_of_experts else (rows, COLUMNS)
        content = content_of(kind, int(np.prod(shape[:-1])), seed)
        made[f"blk.0.{name}.weight"] = (NUMBERS[kind], shape, content.tobytes())
    return read_tensors([write_tensors(path, made)])[1]


def weights_from(tensors: list[FileTensor], parameter: str, source: TensorSource) -> GgufWeights:
    config: Any = SimpleNamespace(
        model_type="llama",
        tie_word_embeddings=True,
        linear_num_key_heads=KEY_HEADS,
        linear_key_head_dim=KEY_DIM,
        get_text_config=lambda **_: config,
    )
    owner = parameter.rpartition(".")[0]
    architecture = Architecture(model_type="llama", sources={parameter: source, f"{owner}.down_proj": "ffn_down_exps"})
    return GgufWeights(architecture, config, tensors, "bfloat16", MatrixPacking(compiled()))


def numbers_of(tensor: FileTensor) -> np.ndarray:
    rows = reference.dequantised(tensor.kind, tensor.content().reshape(tensor.num_rows, -1))
    return rows.reshape(tensor.shape)


def assembled(weights: GgufWeights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the rows of a matrix's parts, each of which is in quants."""
    parts = weights.parts(name)
    assert {type(part.weights) for part in parts} == {Quants}
    weights.finish_reading()
    found, taken = torch.zeros(shape, dtype=torch.bfloat16), np.zeros(shape[0], int)
    for part in parts:
        assert isinstance(part.weights, Quants)
        found[torch.from_numpy(part.places)] = tensor_of(weights_of(part.weights.packed, part.weights.form))
        taken[part.places] += 1
    assert (taken == 1).all()
    return found


@pytest.mark.cases(73)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("join", JOINS)
def test_no_join_of_two_types_becomes_bfloat16(join: str, kind: str, tmp_path: Path) -> None:
    parameter, source = JOINS[join]
    # Another type, and with three tensors one of them twice, around the other.
    other = KINDS[(KINDS.index(kind) + 7) % len(KINDS)]
    kinds = tuple((kind, other)[place % 2] for place in range(len(source.tensors)))
    tensors = write(tmp_path / "a.gguf", source, kinds)
    weights, own = weights_from(tensors, parameter, source), tensors[: len(source.tensors)]
    name = f"layers.0.{parameter}"
    expected = source.rows(weights._config, *(numbers_of(tensor) for tensor in own))
    if "experts" not in parameter:
        assert weights.quants(f"{name}.weight") is None
        found = assembled(weights, f"{name}.weight", expected.shape)
        assert torch.equal(found, torch.from_numpy(np.ascontiguousarray(expected)).bfloat16())
        return
    form = ExpertsForm(is_interleaved="interleaved" in source.rows.__name__)
    experts = weights.expert_quants(name.rpartition(".")[0], form)
    assert experts.keys() == {"gate", "up", "down"}
    weights.finish_reading()
    for half, rows in form.halves("gate_up_proj", expected).items():
        packed = np.stack([weights_of(one, experts[half].form) for one in experts[half].packed])
        assert torch.equal(tensor_of(packed), torch.from_numpy(np.ascontiguousarray(rows)).bfloat16())


@pytest.mark.parametrize("kind", ["Q4_K", "NVFP4"])
def test_only_the_rows_without_quants_become_bfloat16(kind: str, tmp_path: Path) -> None:
    parameter, source = next(one for one in JOINS.values() if one[1].tensors == ("ffn_gate", "ffn_up"))
    weights = weights_from(write(tmp_path / "a.gguf", source, (kind, "BF16")), parameter, source)
    quants, plain = weights.parts(f"layers.0.{parameter}.weight")
    assert isinstance(quants.weights, Quants)
    assert isinstance(plain.weights, np.ndarray)
    assert [part.shape for part in (quants, plain)] == [(32, COLUMNS)] * 2
    assert torch.equal(tensor_of(plain.weights), torch.from_numpy(content_of("BF16", 32, 1)).view(torch.bfloat16))
    weights.finish_reading()
    assert {name.rpartition(".")[2] for name, _ in weights.named()} == {"ffn_gate", "ffn_up"}


def test_two_types_without_quants_are_one_matrix(tmp_path: Path) -> None:
    parameter, source = next(one for one in JOINS.values() if one[1].tensors == ("ffn_gate", "ffn_up"))
    weights = weights_from(write(tmp_path / "a.gguf", source, ("F16", "BF16")), parameter, source)
    assert weights.parts(f"layers.0.{parameter}.weight") == ()
    assert weights.tensor(f"layers.0.{parameter}.weight").shape == (64, COLUMNS)


@pytest.mark.parametrize(
    ("places", "runs"),
    [
        ([4, 5, 6], RowRuns(4, 1, 3, 3)),
        ([0, 1, 8, 9, 16, 17], RowRuns(0, 3, 2, 8)),
        ([3, 5, 7], RowRuns(3, 3, 1, 2)),
        ([0, 1, 8, 9, 17, 18], None),
        ([0, 1, 8], None),
        ([0, 1, 8, 10], None),
    ],
)
def test_row_numbers_become_equal_runs(places: list[int], runs: RowRuns | None) -> None:
    assert RowRuns.of(np.array(places)) == runs
