"""Checkpoints that were published quantised are computed with number for number, and what is not served says why.

The checkpoints are made up here, and each layout is written and read by its own definition: codes of some bits in words
of 32, lowest first, and a weight is (code - zero) × scale.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from diskprefix.errors import ModelError
from diskprefix.model.exact.invariance import make_exact
from diskprefix.model.exact.mixtures import is_mixture, matrices_of
from diskprefix.model.load.fit import needs_of_folder
from diskprefix.model.load.gguf import suffix_of
from diskprefix.model.load.loader import load_model
from diskprefix.model.quants.exact_quants import JoinedQuants, exact_quants
from diskprefix.model.quants.quantised import QuantisedLinear
from diskprefix.model.quants.quantised_experts import QuantisedExperts
from diskprefix.native.library import operators
from diskprefix.settings import Settings
from tests.exactness.architectures import shrink
from tests.model import tiny

Made: TypeAlias = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of a matrix, and the weights float64 [rows, columns] that they stand for."""
Write: TypeAlias = Callable[[torch.Generator, int, int], Made]

HIDDEN, INNER = 128, 256
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def in_words(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Packs the last dimension. `order` names the codes of a word from its lowest bits up."""
    in_word = 32 // bits
    words = torch.zeros(*codes.shape[:-1], codes.shape[-1] // in_word, dtype=torch.int64)
    for place, code in enumerate(order or range(in_word)):
        words |= (codes[..., code::in_word].long() & ((1 << bits) - 1)) << (bits * place)
    return words.to(torch.uint32).view(torch.int32) if words.is_contiguous() else words.contiguous().int()


def numbers(random: torch.Generator, least: int, most: int, *size: int) -> torch.Tensor:
    return torch.randint(least, most + 1, size, generator=random)


def scales_of(random: torch.Generator, *size: int) -> torch.Tensor:
    return (torch.rand(size, generator=random) * 0.01 + 0.001).half()


def weights_of(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the weights [rows, columns] of codes [rows, columns], zeros and scales [rows, groups]."""
    group = codes.shape[1] // scales.shape[1]
    wide = [part.double().repeat_interleave(group, dim=1) for part in (zeros, scales)]
    return (codes.double() - wide[0]) * wide[1]


def gptq(bits: int, group: int, *, is_symmetric: bool, less: int = 1) -> Write:
    def write(random: torch.Generator, rows: int, columns: int) -> Made:
        groups = columns // (columns if group == -1 else group)
        codes, half = numbers(random, 0, (1 << bits) - 1, rows, columns), 1 << (bits - 1)
        zeros = torch.full((rows, groups), half) if is_symmetric else numbers(random, 1, 15, rows, groups)
        scales = scales_of(random, rows, groups)
        index = torch.arange(columns, dtype=torch.int32) // (columns // groups)
        parts = {
            "qweight": in_words(codes, bits).t().contiguous(),
            "qzeros": in_words(zeros.t() - less, bits),
            "scales": scales.t().contiguous(),
            "g_idx": index,
        }
        return parts, weights_of(codes, zeros, scales)

    return write


def awq(random: torch.Generator, rows: int, columns: int) -> Made:
    groups = columns // 64
    codes, zeros = numbers(random, 0, 15, rows, columns), numbers(random, 0, 15, rows, groups)
    scales = scales_of(random, rows, groups)
    packed = [in_words(part.t(), 4, AWQ_ORDER) for part in (codes, zeros)]
    parts = {"qweight": packed[0], "qzeros": packed[1], "scales": scales.t().contiguous()}
    return parts, weights_of(codes, zeros, scales)


def compressed(bits: int, group: int | None, *, is_symmetric: bool) -> Write:
    def write(random: torch.Generator, rows: int, columns: int) -> Made:
        groups, half = columns // (group or columns), 1 << (bits - 1)
        codes = numbers(random, -half, half - 1, rows, columns)
        zeros = torch.zeros(rows, groups) if is_symmetric else numbers(random, -half, half - 1, rows, groups)
        scales = scales_of(random, rows, groups).bfloat16()
        parts = {
            "weight_packed": in_words(codes + half, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not is_symmetric:
            parts["weight_zero_point"] = in_words((zeros + half).t(), bits).t().contiguous()
        return parts, weights_of(codes, zeros, scales)

    return write


def whole_bytes(random: torch.Generator, rows: int, columns: int) -> Made:
    codes, scales = numbers(random, -127, 127, rows, columns), scales_of(random, rows, 1).bfloat16()
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, weights_of(codes, torch.zeros(rows, 1), scales)


def fp8(height: int, width: int, name: str = "weight_scale_inv") -> Write:
    """With a scale for blocks of so many rows and columns, 0 for all of them."""

    def write(random: torch.Generator, rows: int, columns: int) -> Made:
        weight = torch.randn(rows, columns, generator=random).to(torch.float8_e4m3fn)
        of_rows, of_columns = height or rows, width or columns
        blocks = torch.rand(-(-rows // of_rows), -(-columns // of_columns), generator=random) * 0.01
        wide = blocks.repeat_interleave(of_rows, dim=0)[:rows].repeat_interleave(of_columns, dim=1)[:, :columns]
        scales = blocks if height or width else blocks.view(1)
        return {"weight": weight, name: scales}, weight.double() * wide.double()

    return write


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [96, 96]}
FP8_OF_128 = FP8 | {"weight_block_size": [128, 128]}


def compressed_settings(kind: str, bits: int, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", **more}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": {"weights": weights}}}


CHECKPOINTS: dict[str, tuple[dict[str, Any], Write, str]] = {
    "GPTQ int4 symmetric": (GPTQ, gptq(4, 128, is_symmetric=True), "int4"),
    "GPTQ int4 in one group": (GPTQ | {"group_size": -1}, gptq(4, -1, is_symmetric=True), "int4"),
    "GPTQ int4 with zeros": (GPTQ | {"sym": False}, gptq(4, 64, is_symmetric=False), "int5"),
    "GPTQ int4 of the second format": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        gptq(4, 32, is_symmetric=True, less=0),
        "int4",
    ),
    "GPTQ int8": (GPTQ | {"bits": 8}, gptq(8, 128, is_symmetric=True), "int8"),
    "AWQ": (AWQ, awq, "int5"),
    "compressed-tensors int4": (
        compressed_settings("pack-quantized", 4),
        compressed(4, 128, is_symmetric=True),
        "int4",
    ),
    "compressed-tensors int4 with zeros": (
        compressed_settings("pack-quantized", 4),
        compressed(4, 32, is_symmetric=False),
        "int5",
    ),
    "compressed-tensors int8": (
        compressed_settings("pack-quantized", 8),
        compressed(8, None, is_symmetric=True),
        "int8",
    ),
    "compressed-tensors bytes": (compressed_settings("int-quantized", 8), whole_bytes, "int8"),
}


FLOAT8: dict[str, tuple[dict[str, Any], Write, int]] = {
    "blocks of 128": (FP8_OF_128, fp8(128, 128), 128),
    "blocks that are cut off": (FP8, fp8(96, 96), 32),
    "rows": ({"quant_method": "fbgemm_fp8"}, fp8(1, 0, "weight_scale"), 128),
    "matrices": (compressed_settings("float-quantized", 8, type="float"), fp8(0, 0, "weight_scale"), 128),
}
"""Checkpoints in FP8 by what a scale is for, and the columns that share one where they are computed with."""


def published(folder: Path, settings: dict[str, Any], write: Write) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tiny Llama as such a checkpoint, and its weights by the names of the modules. Its last matrix is left as it is,
    and its type is float16."""
    tiny.write_folder(folder, dtype=torch.float16, hidden_size=HIDDEN, intermediate_size=INNER)
    random = torch.Generator().manual_seed(0)
    tensors, weights = load_file(folder / "model.safetensors"), {}
    for name in [
        name for name in tensors if name.endswith("_proj.weight") and name != "model.layers.1.mlp.down_proj.weight"
    ]:
        module = name.removesuffix(".weight")
        parts, weights[module] = write(random, *tensors.pop(name).shape)
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, settings)
    return folder, weights


def edit(folder: Path, settings: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


def loaded(folder: Path, weights: str = "auto") -> PreTrainedModel:
    return load_model(Settings(model=str(folder), weights=weights), lambda _: None).model


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.arange(40)[None], use_cache=False).logits[0]
    return logits.float()


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.usefixtures("cache")
def test_a_published_checkpoint_has_the_numbers_of_its_format(name: str, tmp_path: Path) -> None:
    settings, write, kind = CHECKPOINTS[name]
    folder, weights = published(tmp_path / "made", settings, write)
    model = loaded(folder)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, QuantisedLinear)}
    assert set(modules) == set(weights)
    for module, weight in weights.items():
        assert torch.equal(modules[module].weight, weight.bfloat16()), module
        assert str(modules[module].form).startswith(kind)
    assert model.dtype is torch.bfloat16


@pytest.mark.usefixtures("cache")
def test_a_published_checkpoint_computes_what_its_weights_compute(tmp_path: Path) -> None:
    folder, weights = published(tmp_path / "made", AWQ, awq)
    found = logits_of(loaded(folder))
    plain = tiny.llama(hidden_size=HIDDEN, intermediate_size=INNER).half().bfloat16()
    for module, weight in weights.items():
        plain.get_submodule(module).weight.data = weight.bfloat16()
    expected = logits_of(plain)
    assert float((found - expected).norm() / expected.norm()) < 0.02


def test_a_published_checkpoint_is_packed_once(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = published(tmp_path / "made", AWQ, awq)
    loaded(folder)
    (made,) = [path.name for path in cache.iterdir() if not path.name.startswith(".")]
    assert made.endswith(suffix_of("auto"))
    monkeypatch.setattr("diskprefix.model.quants.quantising.StreamedQuantising", None)
    loaded(folder)


@pytest.mark.usefixtures("cache")
def test_fewer_bits_than_the_checkpoint_has_are_made_anew(tmp_path: Path) -> None:
    folder, weights = published(tmp_path / "made", GPTQ | {"bits": 8}, gptq(8, 128, is_symmetric=True))
    kept, made = loaded(folder, "int8"), loaded(folder, "int4")
    for module, weight in weights.items():
        assert torch.equal(kept.get_submodule(module).weight, weight.bfloat16())
        assert str(made.get_submodule(module).form).startswith("int4")


@pytest.mark.parametrize("name", FLOAT8)
@pytest.mark.usefixtures("cache")
def test_fp8_is_quantised_anew_if_asked(name: str, tmp_path: Path) -> None:
    settings, write, _ = FLOAT8[name]
    folder, weights = published(tmp_path / "made", settings, write)
    with pytest.raises(ModelError) as raised:
        loaded(folder)
    assert raised.value.message == (
        "no operator of a CPU computes with FP8 weights; add --weights int8 to quantise them anew"
    )
    model = loaded(folder, "int8")
    for module, weight in weights.items():
        error = (model.get_submodule(module).weight.double() - weight).norm() / weight.norm()
        assert 0 < float(error) < 0.01


def gpt_oss(folder: Path) -> tuple[Path, PreTrainedModel]:
    """A tiny gpt-oss as OpenAI publishes it, and the model with the weights that transformers reads in it."""
    torch.manual_seed(0)
    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=len(tiny.tokens()),
    )
    model = GptOssForCausalLM(config).bfloat16().eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "sinks")):
            parameter.data.normal_()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    random = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensors.pop(name).shape
            blocks = numbers(random, 0, 255, experts, rows, columns // 32, 16).to(torch.uint8)
            scales = numbers(random, 110, 124, experts, rows, columns // 32).to(torch.uint8)
            # The ends of the exponents too.
            scales[0, 0, 0], scales[1, 1, 1] = 1, 140
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.data = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
    config.architectures = ["GptOssForCausalLM"]
    config.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]})
    return folder, model


@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
@pytest.mark.usefixtures("cache")
def test_gpt_oss_is_served_in_the_quants_that_it_was_published_with(weights: str, tmp_path: Path) -> None:
    if operators() is None:
        pytest.skip("no compiled operators")
    folder, plain = gpt_oss(tmp_path / "made")
    model = loaded(folder, weights)
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        found = model.get_submodule(name)
        assert isinstance(found, QuantisedExperts)
        for part, (weight, bias) in matrices_of(plain.get_submodule(name)).items():
            of_part = found.parts()[part]
            assert str(of_part.form) == "int4 32 symmetric exponents mxfp4"
            assert torch.equal(of_part.weight, weight), (name, part)
            assert of_part.bias is not None
            assert bias is not None
            assert torch.equal(of_part.bias, bias)
    is_plain = {type(model.get_submodule(f"model.layers.0.self_attn.{name}_proj")) is torch.nn.Linear for name in "qo"}
    assert is_plain == {weights == "auto"}
    if weights == "auto":
        error = (logits_of(model) - logits_of(plain)).norm(dim=1) / logits_of(plain).norm(dim=1)
        assert float(error.median()) < 0.02


@pytest.mark.usefixtures("cache")
def test_what_the_experts_of_gpt_oss_take_is_known_from_the_header(tmp_path: Path) -> None:
    if operators() is None:
        pytest.skip("no compiled operators")
    folder, _ = gpt_oss(tmp_path / "made")
    needs = needs_of_folder(folder, [folder / "model.safetensors"], "auto", "auto")
    model = loaded(folder)
    assert needs.weights_bytes == pytest.approx(sum(part.nbytes for part in tensors_of(model)), rel=0.02)


@pytest.mark.usefixtures("cache")
def test_blocks_without_their_scales_are_refused(tmp_path: Path) -> None:
    folder, _ = gpt_oss(tmp_path / "made")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, 1:].contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"MXFP4 weights with blocks of the shape .* are not served"):
        loaded(folder)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits": (GPTQ | {"bits": 3}, "GPTQ weights in 3 bits are not served"),
    "8 bits with zeros": (GPTQ | {"bits": 8, "sym": False}, "GPTQ weights in 8 bits with zeros are not served"),
    "marlin": (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ weights in the format marlin are not served"),
    "gemv": (AWQ | {"version": "gemv"}, "AWQ weights in 4 bits (gemv) are not served"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "weights quantised with bitsandbytes are not served"),
    "hqq": ({"quant_method": "hqq"}, "weights quantised with hqq are not served"),
    "nvfp4": (
        compressed_settings("nvfp4-pack-quantized", 4, type="float"),
        "compressed-tensors weights in float4 (nvfp4-pack-quantized) are not served",
    ),
    "rotated": (
        compressed_settings("pack-quantized", 4) | {"transform_config": {"config_groups": {"R1": {}}}},
        "compressed-tensors weights that were rotated are not served",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.usefixtures("cache")
def test_what_no_operator_has_is_refused_before_weights_are_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, message = REFUSED[name]
    folder = tiny.write_folder(tmp_path / "made")
    edit(folder, settings)
    monkeypatch.setattr("diskprefix.model.quants.quantising.stored_tensors", None)
    monkeypatch.setattr("diskprefix.model.quants.quantising.weights_digest", None)
    with pytest.raises(ModelError) as raised:
        loaded(folder)
    assert raised.value.message.startswith(message + "; give another quant of the model")


def with_order(random: torch.Generator, rows: int, columns: int) -> Made:
    parts, weights = gptq(4, 64, is_symmetric=True)(random, rows, columns)
    parts["g_idx"] = parts["g_idx"][torch.randperm(columns, generator=random)]
    return parts, weights


def in_three_bits(random: torch.Generator, rows: int, columns: int) -> Made:
    parts, weights = gptq(4, 64, is_symmetric=True)(random, rows, columns)
    return parts | {"qzeros": parts["qzeros"][:, : rows * 3 // 32].contiguous()}, weights


def in_groups_of_16(random: torch.Generator, rows: int, columns: int) -> Made:
    return gptq(4, 16, is_symmetric=True)(random, rows, columns)


@pytest.mark.parametrize(
    ("write", "what"),
    [(with_order, "columns in another order"), (in_three_bits, "3 bits"), (in_groups_of_16, "groups of 16 weights")],
)
@pytest.mark.usefixtures("cache")
def test_tensors_that_no_operator_takes_are_refused_before_anything_is_made(
    write: Write, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = published(tmp_path / "made", GPTQ, write)
    monkeypatch.setattr("diskprefix.model.quants.quantising.StreamedQuantising", None)
    with pytest.raises(ModelError, match=what):
        loaded(folder)


def test_quants_of_long_scales_are_rounded_once() -> None:
    random = torch.Generator().manual_seed(0)
    codes, zeros = numbers(random, 0, 15, 16, 64).to(torch.uint8), numbers(random, 0, 15, 16, 2).to(torch.uint8)
    scales = torch.rand(16, 2, generator=random)
    found = exact_quants(4, codes, zeros, scales)
    wide = [part.float().repeat_interleave(32, dim=1) for part in (zeros, scales)]
    assert torch.equal(found.dequantised(), ((codes.float() - wide[0]) * wide[1]).bfloat16())


def test_codes_that_lie_too_far_from_their_zeros_have_no_form() -> None:
    codes, zeros = torch.full((16, 32), 255, dtype=torch.uint8), torch.zeros(16, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="differences of codes and zeros from 255 to 255"):
        exact_quants(8, codes, zeros, torch.ones(16, 1))


def mixture(folder: Path, name: str, settings: dict[str, Any], write: Write) -> tuple[Path, PreTrainedModel]:
    """A tiny mixture with experts as such a checkpoint has them, one by one, and the model with their weights."""
    model = AutoModelForCausalLM.from_config(shrink(name, **MIXTURES[name]), dtype=torch.bfloat16).eval()
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    random, stored = torch.Generator().manual_seed(0), load_file(folder / "model.safetensors")
    parts, weights = dict(stored), dict(stored)
    for key in [key for key in stored if ".experts." in key]:
        made, weight = write(random, *parts.pop(key).shape)
        weights[key] = weight.bfloat16()
        parts |= {f"{key.removesuffix('.weight')}.{part}": tensor.contiguous() for part, tensor in made.items()}
    assert len(parts) > len(stored)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    save_file(parts, folder / "model.safetensors", {"format": "pt"})
    edit(folder, settings)
    return folder, plain


MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    "mixtral": {"intermediate_size": 64},
    "deepseek_v3": {"moe_intermediate_size": 64, "first_k_dense_replace": 1},
}


def differently(random: torch.Generator, rows: int, columns: int) -> Made:
    """Some matrices have zeros, of others scales that float16 does not hold."""
    kind = int(numbers(random, 0, 2, 1))
    parts, weights = compressed(4, 32, is_symmetric=kind == 0)(random, rows, columns)
    if kind == 2:
        tiny_scale = torch.tensor(1e-9).bfloat16()
        parts["weight_scale"][0, 0] = tiny_scale
        codes, zeros = (numbers(random, -8, 7, rows, size) for size in (columns, columns // 32))
        weights = weights_of(codes, zeros, parts["weight_scale"])
        parts["weight_packed"] = in_words(codes + 8, 4)
        parts["weight_zero_point"] = in_words((zeros + 8).t(), 4).t().contiguous()
    return parts, weights


@pytest.mark.parametrize(
    ("name", "settings", "write", "bits"),
    [
        ("qwen3_moe", GPTQ, gptq(4, 32, is_symmetric=True), "int4"),
        ("mixtral", AWQ, awq, "int5"),
        ("deepseek_v3", compressed_settings("pack-quantized", 4), compressed(4, 32, is_symmetric=True), "int4"),
        ("qwen3_moe", compressed_settings("pack-quantized", 4), differently, "int8"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_experts_are_served_in_the_quants_that_they_were_published_with(
    name: str, settings: dict[str, Any], write: Write, bits: str, tmp_path: Path
) -> None:
    folder, plain = mixture(tmp_path / "made", name, settings, write)
    model = loaded(folder)
    mixtures = {name: module for name, module in model.named_modules() if isinstance(module, QuantisedExperts)}
    assert set(mixtures) == {name for name, module in plain.named_modules() if is_mixture(module)} != set()
    for path, found in mixtures.items():
        for part, (weight, _) in matrices_of(plain.get_submodule(path)).items():
            assert torch.equal(found.parts()[part].weight, weight), (path, part)
            assert str(found.parts()[part].form).startswith(bits)
    layout, reason = make_exact(model)
    assert (layout.exact_at, reason) == ("token", "")
    if write is not differently:
        needs = needs_of_folder(folder, [folder / "model.safetensors"], "auto", "auto")
        assert needs.weights_bytes == pytest.approx(sum(part.nbytes for part in tensors_of(model)), rel=0.05)


def tensors_of(model: PreTrainedModel) -> list[torch.Tensor]:
    return [*{part.data_ptr(): part for part in (*model.parameters(), *model.buffers())}.values()]


@pytest.mark.usefixtures("cache")
def test_experts_of_more_bits_than_wanted_are_made_anew(tmp_path: Path) -> None:
    folder, plain = mixture(
        tmp_path / "made",
        "qwen3_moe",
        compressed_settings("pack-quantized", 8),
        compressed(8, 32, is_symmetric=True),
    )
    found = loaded(folder, "int4").get_submodule("model.layers.0.mlp.experts")
    assert isinstance(found, QuantisedExperts)
    assert str(found.parts()["down"].form).startswith("int4")
    (weight, _) = matrices_of(plain.get_submodule("model.layers.0.mlp.experts"))["down"]
    assert 0 < float((found.parts()["down"].weight.float() - weight.float()).norm() / weight.float().norm()) < 0.2


@pytest.mark.usefixtures("cache")
def test_experts_that_no_operator_computes_with_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = mixture(tmp_path / "made", "qwen3_moe", GPTQ, gptq(4, 32, is_symmetric=True))
    monkeypatch.setattr("diskprefix.model.quants.quantising.quantisable_experts", lambda _: iter(()))
    with pytest.raises(ModelError) as raised:
        loaded(folder)
    assert raised.value.message == (
        "experts of this architecture are not served in GPTQ int4 weights; add --weights int4 or int8"
    )


def test_experts_that_are_put_together_in_another_way_are_refused() -> None:
    one = exact_quants(4, torch.full((16, 32), 3, dtype=torch.uint8), torch.zeros(16, 1), torch.ones(16, 1))
    rows = torch.arange(32).view(2, 16)
    joined = JoinedQuants(rows, [one, one])
    assert joined.packed(rows)[0].shape[0] == 2
    for wrong in (rows.flip(1), rows.view(1, 32), rows.view(4, 8)):
        with pytest.raises(ModelError, match="put together in a way that is not served"):
            joined.packed(wrong)
