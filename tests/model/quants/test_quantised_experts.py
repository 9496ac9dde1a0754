"""Quantised experts: which, written and read, near those of bfloat16, and exact at every token with each kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.model.exact.mixtures import experts, is_mixture, matrices_of
from diskprefix.model.exact.self_check import make_exact
from diskprefix.model.load.loader import load_model
from diskprefix.model.load.stored_tensors import stored_tensors
from diskprefix.model.quants.quantised import describe, prepare, save_configurations
from diskprefix.model.quants.quantised_experts import QuantisedExperts, QuantisedMatrices
from diskprefix.model.quants.streamed import StreamedQuantising
from diskprefix.native import library
from diskprefix.native.experts_operator import RoutedExperts
from diskprefix.settings import Settings
from tests.exactness.architectures import quantised_tiny_model, tiny_model
from tests.model import tiny
from tests.model.quantising_in_place import quantise
from tests.native.variants import of_this_cpu


@pytest.fixture(params=of_this_cpu())
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(library, "_chosen", request.param)
    return str(request.param)


def forms_of(model: PreTrainedModel) -> dict[str, str]:
    return {name: str(module.form) for name, module in model.named_modules() if isinstance(module, QuantisedMatrices)}


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.arange(40)[None], use_cache=False).logits[0]
    return logits


def test_experts_are_quantised_and_routers_are_not() -> None:
    model = quantised_tiny_model("qwen3_moe", "int4")
    assert list(forms_of(model)) == [
        f"model.layers.{layer}.mlp.experts.{part}" for layer in range(2) for part in ("gate", "up", "down")
    ]
    assert all(form.startswith("int4") for form in forms_of(model).values())
    assert model.get_submodule("model.layers.0.mlp.gate").weight.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["step3p7", "beam", "inkling2_text"])
def test_experts_without_the_interface_or_without_curves_stay_as_they_are(name: str) -> None:
    model = tiny_model(name, torch.bfloat16)
    quantise(model, "int8")
    assert not forms_of(model)


@pytest.mark.parametrize(("name", "weights"), [("mixtral", "int4"), ("gpt_oss", "int8"), ("nemotron_h", "int4")])
@pytest.mark.usefixtures("kernels")
def test_they_compute_with_the_dequantised_weights(name: str, weights: str) -> None:
    """The module of transformers with these weights gives the same but for rounding, which is that of the weights too
    for some kernels."""
    plain = next(module for module in tiny_model(name, torch.bfloat16).modules() if is_mixture(module))
    model = quantised_tiny_model(name, weights)
    module = next(module for module in model.modules() if isinstance(module, QuantisedExperts))
    for part, (weight, _) in matrices_of(plain).items():
        weight.copy_(module.parts()[part].weight)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(20, 64, generator=generator).bfloat16()
    chosen = torch.rand(20, module.num_experts, generator=generator).argsort(1)[:, :2]
    given = rows, chosen, torch.rand(20, 2, generator=generator)
    with torch.inference_mode():
        found, expected = module(*given).float(), experts(plain, *given).float()
    assert float((found - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    model = quantised_tiny_model(name, "int4")
    source = tmp_path / "source"
    tiny_model(name, torch.bfloat16).save_pretrained(source)
    stored = stored_tensors(source, [source / "model.safetensors"])
    sources = {name: tensor.read for name, tensor in stored.items()}
    made = StreamedQuantising(sources, "int4", tmp_path, lambda _: None).run(type(model), model.config)
    save_configurations(made, tmp_path)
    config = type(model.config).from_pretrained(tmp_path)
    describe(config, [tmp_path / "model.safetensors"])
    again, info = type(model).from_pretrained(tmp_path, config=config, dtype=torch.bfloat16, output_loading_info=True)
    prepare(again)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert forms_of(again) == forms_of(model)
    assert torch.equal(logits_of(again), logits_of(model))


def exactness(model: PreTrainedModel) -> tuple[str, str]:
    layout, reason = make_exact(model)
    return layout.exact_at, reason


@pytest.mark.usefixtures("cache", "kernels")
def test_a_quantised_mixture_is_exact_at_every_token() -> None:
    assert exactness(quantised_tiny_model("qwen3_moe", "int4")) == ("token", "")


@pytest.mark.usefixtures("cache")
def test_experts_that_depend_on_the_number_of_rows_mean_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = RoutedExperts.__call__

    def alone(self: RoutedExperts, operators: Any, rows: torch.Tensor, *others: Any) -> torch.Tensor:
        return compute(self, operators, rows, *others) * (1 + 2**-7 * (len(rows) == 1))

    monkeypatch.setattr(RoutedExperts, "__call__", alone)
    exact_at, reason = exactness(quantised_tiny_model("qwen3_moe", "int4"))
    assert exact_at == "grid"
    assert "depends on the steps" in reason


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_experts_of_a_gguf_keep_their_quants_number_for_number(kind: str, tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf", quantised=kind, experts=4)
    model, native = (
        load_model(Settings(model=str(file), weights=weights), lambda _: None).model for weights in ("auto", "native")
    )
    mixtures = [module for module in native.modules() if is_mixture(module)]
    found = [module for module in model.modules() if isinstance(module, QuantisedExperts)]
    assert len(found) == len(mixtures) == 2
    for one, plain in zip(found, mixtures, strict=True):
        assert all(torch.equal(one.parts()[part].weight, weight) for part, (weight, _) in matrices_of(plain).items())
    assert {form.split()[0] for form in forms_of(model).values()} == {"int4" if kind == "Q4_1" else "int8"}


@pytest.mark.usefixtures("cache")
def test_experts_of_a_gguf_are_as_wide_as_it_says(tmp_path: Path) -> None:
    """transformers takes 768 for all of Qwen3's."""
    file = tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q8_0", experts=4, expert_width=96)
    model = load_model(Settings(model=str(file), weights="native"), lambda _: None).model
    found = next(module for module in model.modules() if is_mixture(module))
    assert [weight.shape for weight, _ in matrices_of(found).values()] == [(4, 96, 32), (4, 96, 32), (4, 32, 96)]
