"""Quantised models and mixtures: which matrices, made once, exact at every token with each kernel, another identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from diskprefix.errors import ModelError, SettingsError
from diskprefix.model.exact.mixtures import experts, is_mixture, matrices_of
from diskprefix.model.exact.self_check import make_exact
from diskprefix.model.load import loader
from diskprefix.model.load.checkpoint import tensors_in
from diskprefix.model.load.fingerprint import Fingerprint
from diskprefix.model.load.loader import LoadedModel, begin_packing, load_model
from diskprefix.model.load.parameters import load_parameters
from diskprefix.model.quants.quantised import QuantisedLinear, describe, prepare, read_forms
from diskprefix.model.quants.quantised_experts import QuantisedExperts, QuantisedMatrices
from diskprefix.model.quants.quantising import StreamedQuantising
from diskprefix.native import library
from diskprefix.native.experts_operator import RoutedExperts
from diskprefix.settings import Settings
from tests.exactness.architectures import quantised_tiny_model, tiny_model
from tests.model import tiny
from tests.model.quantising_in_place import quantise
from tests.native.variants import of_this_cpu
from tests.runner import tiny_llama


@pytest.fixture(params=of_this_cpu())
def kernels(request: pytest.FixtureRequest) -> str:
    library.choose(request.param)
    return str(request.param)


@pytest.fixture
def folder(cache: Path, tmp_path: Path) -> Path:
    assert not cache.exists()
    return tiny.write_folder(tmp_path / "tiny", dtype=torch.bfloat16, hidden_size=64, intermediate_size=96)


def loaded(model: Path, weights: str, **changes: Any) -> LoadedModel:
    return load_model(Settings(model=str(model), weights=weights, **changes), lambda _: None)


def quantised_model(weights: str, seed: int = 0) -> PreTrainedModel:
    model = tiny_llama(seed=seed)
    quantise(model, weights)
    prepare(model)
    return model


def forms_of(model: PreTrainedModel) -> dict[str, str]:
    return {name: str(module.form) for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.arange(40)[None], use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.usefixtures("kernels")
def test_what_is_loaded_again_computes_what_was_quantised(weights: str, folder: Path) -> None:
    native = loaded(folder, "native")
    found = loaded(folder, weights)
    forms = forms_of(found.model)
    assert len(forms) == 2 * 7
    assert {form.split()[0] for form in forms.values()} == {weights}
    assert "lm_head" not in forms, "its 263 rows do not fill whole blocks"
    expected, logits = logits_of(native.model).float(), logits_of(found.model).float()
    error = (logits - expected).norm() / expected.norm()
    assert 0 < float(error) < (0.02 if weights == "int8" else 0.15)
    assert found.model.generation_config.to_dict() == native.model.generation_config.to_dict()


def test_the_matrix_of_the_logits_has_8_bits_though_that_of_the_embeddings_is_the_same() -> None:
    model = tiny_model("gemma3", torch.bfloat16)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    before = model.get_input_embeddings().weight.clone()
    quantise(model, "int4")
    forms = forms_of(model)
    assert forms.pop("lm_head").startswith("int8"), forms
    assert all(form.startswith("int4") for form in forms.values())
    assert torch.equal(model.get_input_embeddings().weight, before)


@pytest.mark.parametrize(
    ("name", "part"), [("qwen3_next", "linear_attn"), ("mamba2", "mixer"), ("minicpm3", "kv_b_proj")]
)
def test_recurrent_projections_routers_and_expansions_stay_as_they_are(name: str, part: str) -> None:
    model = tiny_model(name, torch.bfloat16)
    quantise(model, "int8")
    forms = forms_of(model)
    assert not [found for found in forms if part in found or found.endswith(("gate", "router"))]


@pytest.mark.usefixtures("cache")
def test_a_product_that_depends_on_the_number_of_rows_means_the_grid() -> None:
    model = quantised_model("int4")
    module = model.get_submodule("model.layers.0.mlp.down_proj")
    product, module.matrix = module._product, None
    module._product = lambda rows: product(rows) * (1 + 2**-7 * (rows.shape[-2] == 1))
    layout, reason = make_exact(model)
    assert layout.exact_at == "grid"
    assert "depends on the steps" in reason


def test_the_form_of_the_weights_and_the_kernels_are_part_of_the_identity(folder: Path) -> None:
    def root(weights: str, kernels: str, mode: str = "portable") -> str:
        model = loaded(folder, weights, kernels=kernels)
        make_exact(model.model)
        return Fingerprint.of(model.model, model.weights_digest, mode).identity(16, 1, "layout")

    forms = [("native", "auto"), ("int8", "auto"), ("int4", "auto"), ("int4", of_this_cpu()[-1])]
    own = [("native", kernels, "strict") for kernels in ("torch", *of_this_cpu())]
    assert len({root(*one) for one in [*forms, *own]}) == len(forms) + len(own)
    assert root("int4", of_this_cpu()[0]) == root("int4", "auto")


def test_weights_are_quantised_once(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loaded(folder, "int4")
    made = [path.name for path in cache.iterdir() if not path.name.startswith(".")]
    assert made == [
        f"tiny-{loaded(folder, 'native').weights_digest[:12]}-int4{'-rows' if library.has_rows() else ''}.6"
    ]
    monkeypatch.setattr("diskprefix.model.quants.quantising.StreamedQuantising", None)
    assert loaded(folder, "int4").weights_digest == first.weights_digest


@pytest.mark.usefixtures("cache")
def test_a_gguf_keeps_its_quants_number_for_number(tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_1")
    model, native = tiny.read_file(file, "auto").model, tiny.read_file(file).model
    modules = dict(model.named_modules())
    linears = [name for name, module in native.named_modules() if type(module) is torch.nn.Linear]
    kept = [name for name in linears if isinstance(modules[name], QuantisedLinear)]
    assert len(kept) == 2 * 7
    assert all(torch.equal(modules[name].weight, native.get_submodule(name).weight) for name in kept)
    assert {str(modules[name].form) for name in kept} == {"int4 32 zeros float16"}


@pytest.mark.usefixtures("cache")
def test_auto_without_a_compiled_kernel_is_native(folder: Path, tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_1")
    assert begin_packing(Settings(model=str(file), kernels="torch")) is None
    assert not forms_of(loaded(file, "auto", kernels="torch").model)
    with pytest.raises(SettingsError, match="int4 needs the compiled operators; add --weights native"):
        loaded(folder, "int4", kernels="torch")


@pytest.mark.parametrize(
    ("weights", "changes", "message"),
    [
        ("int8", {"device": "mps"}, "--weights: int8 needs a CPU, and the device is mps; add --device cpu"),
        ("int4", {"dtype": "float32"}, "--weights: int4 computes in bfloat16, not in --dtype float32"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_what_does_not_fit_is_said_before_anything_slow(
    weights: str, changes: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_find", None)
    monkeypatch.setattr(loader, "pick_device", lambda name: torch.device("cpu" if name == "auto" else name))
    with pytest.raises(SettingsError) as raised:
        load_model(Settings(weights=weights, **changes), lambda _: None)  # type: ignore[arg-type]
    assert raised.value.message == message


@pytest.mark.usefixtures("cache")
def test_a_model_without_a_matrix_of_whole_blocks_is_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 3}
    folder = tiny.write_folder(tmp_path / "odd", dtype=torch.bfloat16, **sizes)
    with pytest.raises(ModelError, match="no matrix that can be quantised; add --weights native"):
        loaded(folder, "int4")


# Experts of mixtures.


def forms_of_experts(model: PreTrainedModel) -> dict[str, str]:
    return {name: str(module.form) for name, module in model.named_modules() if isinstance(module, QuantisedMatrices)}


def test_experts_are_quantised_and_routers_are_not() -> None:
    model = quantised_tiny_model("qwen3_moe", "int4")
    assert list(forms_of_experts(model)) == [
        f"model.layers.{layer}.mlp.experts.{part}" for layer in range(2) for part in ("gate", "up", "down")
    ]
    assert all(form.startswith("int4") for form in forms_of_experts(model).values())
    assert model.get_submodule("model.layers.0.mlp.gate").weight.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["step3p7", "beam", "inkling2_text"])
def test_experts_without_the_interface_or_without_curves_stay_as_they_are(name: str) -> None:
    model = tiny_model(name, torch.bfloat16)
    quantise(model, "int8")
    assert not forms_of_experts(model)


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
def test_experts_that_are_written_are_read(name: str, tmp_path: Path) -> None:
    model = quantised_tiny_model(name, "int4")
    source = tmp_path / "source"
    tiny_model(name, torch.bfloat16).save_pretrained(source)
    sources = {tensor.name: tensor.read for tensor in tensors_in(source / "model.safetensors")}
    config = type(model.config).from_pretrained(source)
    StreamedQuantising(sources, "int4", tmp_path, lambda _: None).run(type(model), config, 1 << 20)
    describe(config, read_forms(tmp_path), is_in_gguf=False)
    again = load_parameters(
        type(model), config, {one.name: one.read for one in tensors_in(tmp_path / "model.safetensors")}, None, "they"
    )
    prepare(again)
    assert forms_of_experts(again) == forms_of_experts(model)
    assert torch.equal(logits_of(again), logits_of(model))


def exactness(model: PreTrainedModel) -> tuple[str, str]:
    layout, reason = make_exact(model)
    return layout.exact_at, reason


@pytest.mark.usefixtures("cache")
def test_experts_that_depend_on_the_number_of_rows_mean_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = RoutedExperts.__call__

    def alone(self: RoutedExperts, operators: Any, rows: torch.Tensor, *others: Any) -> torch.Tensor:
        return compute(self, operators, rows, *others) * (1 + 2**-7 * (len(rows) == 1))

    monkeypatch.setattr(RoutedExperts, "__call__", alone)
    exact_at, reason = exactness(quantised_tiny_model("qwen3_moe", "int4"))
    assert exact_at == "grid"
    assert "on the steps" in reason


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_experts_of_a_gguf_keep_their_quants_number_for_number(kind: str, tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf", quantised=kind, experts=4)
    model, native = (loaded(file, weights).model for weights in ("auto", "native"))
    mixtures = [module for module in native.modules() if is_mixture(module)]
    found = [module for module in model.modules() if isinstance(module, QuantisedExperts)]
    assert len(found) == len(mixtures) == 2
    for one, plain in zip(found, mixtures, strict=True):
        assert all(torch.equal(one.parts()[part].weight, weight) for part, (weight, _) in matrices_of(plain).items())
    assert {form.split()[0] for form in forms_of_experts(model).values()} == {"int4" if kind == "Q4_1" else "int8"}


@pytest.mark.usefixtures("cache")
def test_experts_of_a_gguf_are_as_wide_as_it_says(tmp_path: Path) -> None:
    """transformers takes 768 for all of Qwen3's."""
    file = tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q8_0", experts=4, expert_width=96)
    model = loaded(file, "native").model
    found = next(module for module in model.modules() if is_mixture(module))
    assert [weight.shape for weight, _ in matrices_of(found).values()] == [(4, 96, 32), (4, 96, 32), (4, 32, 96)]
