"""The weights of a `.gguf` file are those that its tensors give transformers' modules, without such modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType

from diskprefix.model.load.gguf import GgufModel
from diskprefix.model.module_weights import weights_of_model
from diskprefix.model.quants.file_matrix import MatrixPacking
from diskprefix.model.quants.forms import compiled
from tests.model.load.test_gguf_models import FAMILIES, loaded, made, tensors_of, written
from tests.model.plans import logits_of

types = GGMLQuantizationType
pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_a_plan_the_weights_that_it_gives_to_modules(family: str, tmp_path: Path) -> None:
    architecture, model_type, sizes, values = FAMILIES[family]
    model = made(model_type, sizes)
    tensors = tensors_of(model, architecture)
    for weights, kind in (("native", types.F32), ("auto", types.Q8_0)):
        file = written(tmp_path / f"{weights}.gguf", architecture, model.config, values, tensors, kind)
        read, packing = GgufModel.read(file, print), MatrixPacking(compiled()) if weights == "auto" else None
        modules = loaded(file, weights)
        found = logits_of(read.decoder_weights(torch.bfloat16, packing), read.config)
        assert torch.equal(found, logits_of(weights_of_model(modules), modules.config))
