"""Models in quants: they compute with the numbers of their files, have another identity, and need the operators."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diskprefix.daemon.settings import Settings
from diskprefix.runtime.choose_runtime import servable
from diskprefix.runtime.load.loader import LoadedModel, load_model
from diskprefix.runtime.plan.families.slot_names import SlotNames
from diskprefix.runtime.plan.quants.forms import weights_of as numbers_of
from tests.arrays import array_of, tensor_of
from tests.exactness.architectures import quantised_tiny_model
from tests.native.variants import of_this_cpu
from tests.runtime.plan import tiny
from tests.runtime.plan.plans import logits_of
from tests.runtime.plan.tensor_weights import TensorWeights, tensors_of


@pytest.fixture
def file(cache: Path, tmp_path: Path) -> Path:
    assert not cache.exists()
    return tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_1")


def loaded(model: Path, weights: str, **changes: Any) -> LoadedModel:
    return load_model(Settings(model=str(model), weights=weights, **changes), lambda _: None)


def root_of(file: Path, weights: str, kernels: str, *, rows: str = "8", mode: str = "portable") -> str:
    model = servable(loaded(file, weights, kernels=kernels, rows=rows), Settings(model=str(file), fingerprint=mode))
    return model.fingerprint.identity(16, 1, "layout")


def test_the_form_of_the_weights_and_the_kernels_are_part_of_the_identity(file: Path) -> None:
    root = partial(root_of, file)
    native, file_quants, torch = root("native", "auto"), root("auto", "auto"), root("native", "torch", mode="strict")
    strict = root("native", "auto", mode="strict")
    assert len({native, file_quants, torch, strict, root("auto", "auto", rows="15", mode="strict")}) == 5


def test_the_variant_is_no_part_of_the_identity(file: Path) -> None:
    """`test_bits.py` compares all of them."""
    assert len({root_of(file, "auto", kernels, mode="strict") for kernels in of_this_cpu()[:2]}) == 1


def test_auto_without_a_compiled_kernel_is_native(file: Path) -> None:
    assert loaded(file, "auto", kernels="torch").weights is None


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", "Q8_0"), ("mixtral", "Q4_1"), ("gpt_oss", "Q8_0"), ("nemotron_h", "Q4_1")]
)
def test_a_plan_computes_with_the_numbers_of_the_quants(name: str, kind: str) -> None:
    """All of the difference is rounding, of the weights too for some kernels, so that a router may choose others."""
    model = quantised_tiny_model(name, kind)
    weights, form = tensors_of(model), SlotNames.of(model.config).experts
    found = logits_of(weights, model.config)
    numbers = {name: tensor.clone() for name, tensor in weights._parameters.items()}
    for module, one in weights.made.items():
        owner, _, part = module.rpartition(".")
        if f"{module}.weight" in numbers:
            numbers[f"{module}.weight"] = tensor_of(numbers_of(one.packed, one.form))
        else:
            parameter = "down_proj" if part == "down" else form.first
            rows = numbers[f"{owner}.{parameter}"]
            half = form.halves(parameter, array_of(rows.mT if form.is_transposed else rows))[part]
            half[...] = np.stack([numbers_of(packed, one.form) for packed in one.packed])
    expected = logits_of(TensorWeights(numbers, model.dtype), model.config)
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert float(errors.quantile(0.2)) < 0.06


@pytest.mark.usefixtures("cache")
def test_experts_of_a_gguf_are_as_wide_as_it_says(tmp_path: Path) -> None:
    """transformers takes 768 for all of Qwen3's."""
    file = tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q8_0", experts=4, expert_width=96)
    weights = loaded(file, "native").weights
    assert weights is not None
    found = [weights.tensor(f"layers.0.mlp.experts.{name}").shape for name in ("gate_up_proj", "down_proj")]
    assert found == [(4, 192, 32), (4, 32, 96)]
