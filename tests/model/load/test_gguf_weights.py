"""The weights of a `.gguf` file are those that its tensors give transformers' modules, without such modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import LlamaConfig

from diskprefix.errors import ModelError
from diskprefix.model.families.slot_names import SlotNames
from diskprefix.model.load.gguf import GgufModel
from diskprefix.model.load.loader import load_model
from diskprefix.model.quants.file_matrix import MatrixPacking
from diskprefix.model.quants.forms import compiled
from diskprefix.model.slots import Slots
from diskprefix.settings import Settings
from tests.model import tiny
from tests.model.load.test_gguf_models import FAMILIES, made, tensors_of, written
from tests.model.plans import logits_of
from tests.model.tensor_weights import TensorWeights, require_numbers, weights_of

types = GGMLQuantizationType
pytestmark = pytest.mark.usefixtures("cache")


LARGE = ("Gemma 2 27B", "Gemma 3 27B")


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=[pytest.mark.slow] if one in LARGE else []) for one in FAMILIES]
)
def test_a_file_gives_a_plan_the_weights_that_it_gives_to_modules(family: str, tmp_path: Path) -> None:
    architecture, model_type, sizes, values = FAMILIES[family]
    model = made(model_type, sizes)
    tensors = tensors_of(model, architecture)
    file = written(tmp_path / "tiny.gguf", architecture, model.config, values, tensors, types.Q8_0)
    read, modules = GgufModel.read(file, print), load_model(Settings(model=str(file)), print).read_modules()
    plain = read.decoder_weights("bfloat16")
    assert torch.equal(logits_of(plain, read.config), logits_of(weights_of(modules), modules.config))
    packed = read.decoder_weights("bfloat16", MatrixPacking(compiled()))
    logits_of(packed, read.config)
    assert packed._quants
    require_numbers(packed._quants, plain.tensor, SlotNames.of(read.config).experts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": "blk.1.ffn_up.weight"}, r"the file lacks the tensor blk\.1\.ffn_up\.weight"),
        (
            {"more": lambda writer: writer.add_tensor("blk.1.of_tomorrow.weight", np.ones(4, np.float32))},
            r"nothing in the model takes these tensors of the file: blk\.1\.of_tomorrow\.weight",
        ),
    ],
)
def test_a_tensor_that_is_missing_or_that_nothing_takes_is_named(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    read = GgufModel.read(tiny.write_gguf(tmp_path / "tiny.gguf", **changes), print)
    with pytest.raises(ModelError, match=message):
        logits_of(read.decoder_weights("float32"), read.config)


def test_weights_that_are_not_read_have_the_shapes_of_those_that_are(tmp_path: Path) -> None:
    read = GgufModel.read(tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q8_0"), print)
    shapes = []
    for is_unread in (False, True):
        weights = read.decoder_weights("bfloat16", MatrixPacking(compiled()), is_unread=is_unread)
        logits_of(weights, read.config)
        shapes.append({name: (tensor.shape, tensor.dtype) for name, tensor in weights.named()})
    assert shapes[0] == shapes[1]


def test_the_norm_of_a_state_space_may_lie_by_groups() -> None:
    weights = TensorWeights({"norm.weight": torch.ones(2, 8)}, torch.bfloat16)
    norm = Slots(weights, "rms", 1e-5, SlotNames.of(LlamaConfig())).float_norm("norm")
    assert norm is not None
    assert norm.weight.shape == (16,)
