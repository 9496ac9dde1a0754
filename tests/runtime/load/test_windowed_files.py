"""Files of Apertus and of models with windows in some layers say something that no model has: they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.runtime.files.gguf.gguf import GgufModel
from diskprefix.runtime.load.loader import load_model
from tests.runtime.files.gguf.test_gguf_models import FAMILIES, TOKENS, logits_of, require_equal
from tests.runtime.plan import plans
from tests.runtime.plan.gguf_files import made, tensors_of, written

pytestmark = pytest.mark.usefixtures("cache")


def file_of(family: str, path: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    """Writes the file of a row of `FAMILIES`, with other metadata or tensors; __ stands for a dot."""
    architecture, model_type, sizes, values = FAMILIES[family]
    model = made(model_type, sizes)
    given = values | {key.replace("__", "."): value for key, value in changes.items()}
    kept = {name: each for name, each in (tensors_of(model, architecture) | (tensors or {})).items() if each.numel()}
    return written(path / "tiny.gguf", architecture, model.config, given, kept)


@pytest.mark.parametrize(
    "numbers", [[], [0.5], [0.5] * 3, [0.5, float("nan")]], ids=["none", "one", "of three blocks", "no number"]
)
def test_a_file_without_a_number_for_each_block_is_refused_by_its_key(numbers: list[float], tmp_path: Path) -> None:
    file = file_of("Apertus", tmp_path, {"xielu.alpha_p": torch.tensor(numbers)})
    with pytest.raises(ModelError, match=r"the file's xielu\.alpha_p is no array of 2 float32 numbers"):
        GgufModel.read(file, print)


def test_each_layer_has_its_own_numbers_in_the_order_of_the_file(tmp_path: Path) -> None:
    architecture, model_type, sizes, values = FAMILIES["Apertus"]
    model = made(model_type, sizes | {"num_hidden_layers": 5})
    tensors = tensors_of(model, architecture)
    file = written(tmp_path / "tiny.gguf", architecture, model.config, values, tensors)
    read = GgufModel.read(file, print)
    layers = model.model.layers
    for name in ("alpha_p", "alpha_n", "beta"):
        of_layers = np.array([getattr(layer.mlp.act_fn, name).item() for layer in layers])
        assert len(set(of_layers)) == 5
        weights = read.decoder_weights("float32")
        assert [weights.tensor(f"layers.{i}.mlp.act_fn.{name}").item() for i in range(5)] == list(of_layers)
    require_equal(plans.logits_of(read.decoder_weights("float32"), read.config, TOKENS), logits_of(model))


def test_another_bound_of_the_activation_is_refused(tmp_path: Path) -> None:
    file = file_of("Apertus", tmp_path, {"xielu.eps": torch.tensor([-0.5, -0.5])})
    with pytest.raises(ModelError, match=r"act_fn\.eps is -0\.5, -1e-06 expected") as raised:
        load_model(Settings(model=str(file)), lambda _: None)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Trinity", {"expert_weights_norm": False}, "experts that are weighted so are not served"),
        ("Trinity", {"attention__sliding_window": None}, "the file lacks afmoe.attention.sliding_window"),
        ("Trinity", {"attention__sliding_window_pattern": 2}, "a window in all layers but each fourth"),
        ("Trinity", {"expert_gating_func": 1}, "experts that are weighted so are not served: expert_gating_func 1"),
        ("K-EXAONE", {"attention__sliding_window": 0}, "exaone-moe.attention.sliding_window is 0, which is not"),
        ("K-EXAONE", {"rope__freq_base_swa": 5.0}, "exaone-moe.rope.freq_base_swa is 5, and nothing here reads it"),
        ("Command with experts", {"attention__sliding_window_pattern": 4}, "which is not an array"),
        ("Command with experts", {"expert_gating_func": 1}, "experts that are weighted so are not served"),
        ("Granite with windows", {"attention__sliding_window_pattern": None}, "the file lacks granite_swa.attention"),
        ("Pythia", {"use_parallel_residual": None}, "the file lacks gptneox.use_parallel_residual"),
        ("MiniCPM 3", {"attention__key_length": None}, "the file lacks minicpm3.attention.key_length"),
    ],
)
def test_what_no_model_computes_is_refused(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = file_of(family, tmp_path, **changes)
    with pytest.raises(ModelError, match=message) as raised:
        GgufModel.read(file, print)
    assert "\n" not in str(raised.value)
