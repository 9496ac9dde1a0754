"""Quantised models and mixtures: number for number what files have, another identity, the grid where it is due."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.engine.measured_model import layout_of
from diskprefix.model.load.fingerprint import Fingerprint
from diskprefix.model.load.loader import LoadedModel, begin_packing, load_model
from diskprefix.model.quants.expert_matrices import is_mixture, matrices_of
from diskprefix.model.quants.quantised import QuantisedLinear
from diskprefix.model.quants.quantised_experts import QuantisedExperts, may_be_quantised
from diskprefix.native import library
from diskprefix.settings import Settings
from tests.exactness.architectures import quantised_tiny_model, tiny_model
from tests.model import tiny
from tests.native.variants import of_this_cpu


@pytest.fixture(params=of_this_cpu())
def kernels(request: pytest.FixtureRequest) -> str:
    library.choose(request.param)
    return str(request.param)


@pytest.fixture
def file(cache: Path, tmp_path: Path) -> Path:
    assert not cache.exists()
    return tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_1")


def loaded(model: Path, weights: str, **changes: Any) -> LoadedModel:
    return load_model(Settings(model=str(model), weights=weights, **changes), lambda _: None)


def forms_of(model: PreTrainedModel) -> dict[str, str]:
    return {name: str(module.form) for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


def test_the_form_of_the_weights_and_the_kernels_are_part_of_the_identity(file: Path) -> None:
    def root(weights: str, kernels: str, mode: str = "portable") -> str:
        model = loaded(file, weights, kernels=kernels)
        found = Fingerprint.of(model.model, model.weights_digest, mode)
        return (found if layout_of(model.model)[1] else found.by_plan()).identity(16, 1, "layout")

    forms = [("native", "auto"), ("auto", "auto"), ("auto", of_this_cpu()[-1])]
    own = [("native", kernels, "strict") for kernels in ("torch", *of_this_cpu())]
    assert len({root(*one) for one in [*forms, *own]}) == len(forms) + len(own)
    assert root("auto", of_this_cpu()[0]) == root("auto", "auto")


def test_auto_without_a_compiled_kernel_is_native(file: Path) -> None:
    assert begin_packing(Settings(model=str(file), kernels="torch")) is None
    assert not forms_of(loaded(file, "auto", kernels="torch").model)


# Experts of mixtures.


@pytest.mark.parametrize("name", ["step3p7", "beam", "inkling2_text"])
def test_experts_without_the_interface_or_without_curves_stay_as_they_are(name: str) -> None:
    assert not any(map(may_be_quantised, tiny_model(name, torch.bfloat16).modules()))


@pytest.mark.parametrize(("name", "kind"), [("mixtral", "Q4_1"), ("gpt_oss", "Q8_0"), ("nemotron_h", "Q4_1")])
@pytest.mark.usefixtures("kernels")
def test_they_compute_with_the_dequantised_weights(name: str, kind: str) -> None:
    """The module of transformers with these weights gives the same but for rounding, which is that of the weights too
    for some kernels."""
    plain = next(module for module in tiny_model(name, torch.bfloat16).modules() if is_mixture(module))
    model = quantised_tiny_model(name, kind)
    module = next(module for module in model.modules() if isinstance(module, QuantisedExperts))
    for part, (weight, _) in matrices_of(plain).items():
        weight.copy_(module.parts()[part].weight)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(20, 64, generator=generator).bfloat16()
    chosen = torch.rand(20, module.num_experts, generator=generator).argsort(1)[:, :2]
    given = rows, chosen, torch.rand(20, 2, generator=generator)
    with torch.inference_mode():
        found, expected = module(*given).float(), plain(*given).float()
    assert float((found - expected).norm() / expected.norm()) < 0.01


@pytest.mark.usefixtures("cache")
def test_experts_of_a_gguf_are_as_wide_as_it_says(tmp_path: Path) -> None:
    """transformers takes 768 for all of Qwen3's."""
    file = tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q8_0", experts=4, expert_width=96)
    model = loaded(file, "native").model
    found = next(module for module in model.modules() if is_mixture(module))
    assert [weight.shape for weight, _ in matrices_of(found).values()] == [(4, 96, 32), (4, 96, 32), (4, 32, 96)]
