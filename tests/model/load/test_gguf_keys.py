"""Every key and every tensor of a GGUF file that changes numbers is read, or the file is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from diskprefix.errors import ModelError
from diskprefix.model.load.gguf import converted_folder
from diskprefix.model.load.loader import load_model
from diskprefix.settings import Settings
from tests.model import tiny

HIDDEN, HEADS, KV_HEADS, INNER, LAYERS, WINDOW = 64, 4, 2, 96, 2, 16
BASE = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": len(tiny.tokens()),
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
RMS = {"attention.layer_norm_rms_epsilon": 3e-3}
EPSILON = {"rms_norm_eps": 3e-3}
# The root of its hidden size has no rounding, by which it scales embeddings.
GEMMA = EPSILON | {"head_dim": 32, "sliding_window": WINDOW, "tie_word_embeddings": True}
GEMMA_VALUES: dict[str, Any] = RMS | {
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.sliding_window": WINDOW,
}


def rope(base: float = 250000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, **more}


# By name: the architecture of the file, the model type, what its configuration has, and the metadata for that.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "Gemma 3 27B": (
        "gemma3",
        "gemma3_text",
        GEMMA
        | {"num_hidden_layers": 62, "query_pre_attn_scalar": 16}
        | {"rope_parameters": {"sliding_attention": rope(20000.0), "full_attention": rope()}},
        GEMMA_VALUES | {"rope.freq_base": 250000.0, "rope.freq_base_swa": 20000.0},
    ),
    "Gemma 3": (
        "gemma3",
        "gemma3_text",
        GEMMA
        | {"query_pre_attn_scalar": 32, "final_logit_softcapping": 2.0}
        | {"rope_parameters": {"sliding_attention": rope(10000.0), "full_attention": rope()}},
        GEMMA_VALUES | {"rope.freq_base": 250000.0, "final_logit_softcapping": 2.0},
    ),
    "Gemma 2 27B": (
        "gemma2",
        "gemma2",
        GEMMA | {"num_hidden_layers": 46, "query_pre_attn_scalar": 16, "rope_parameters": rope(10000.0)},
        GEMMA_VALUES | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma 2 with other caps": (
        "gemma2",
        "gemma2",
        GEMMA
        | {"query_pre_attn_scalar": 32, "rope_parameters": rope(10000.0)}
        | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
        GEMMA_VALUES | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0},
    ),
    "Phi-4-mini": (
        "phi3",
        "phi3",
        EPSILON | {"rope_parameters": rope(partial_rotary_factor=0.75)},
        RMS | {"rope.dimension_count": 12, "rope.freq_base": 250000.0},
    ),
    "Phi-3 with a window": (
        "phi3",
        "phi3",
        EPSILON | {"rope_parameters": rope(), "sliding_window": WINDOW},
        RMS | {"rope.dimension_count": 16, "rope.freq_base": 250000.0, "attention.sliding_window": WINDOW},
    ),
    "StarCoder 2": (
        "starcoder2",
        "starcoder2",
        {"norm_epsilon": 3e-3, "use_bias": True, "rope_parameters": rope(), "tie_word_embeddings": True},
        {"attention.layer_norm_epsilon": 3e-3, "rope.freq_base": 250000.0},
    ),
    "Granite Code": (
        "llama",
        "llama",
        EPSILON | {"attention_bias": True, "mlp_bias": True, "rope_parameters": rope()},
        RMS | {"rope.dimension_count": 16, "rope.freq_base": 250000.0},
    ),
    "Llama without the base of positions": (
        "llama",
        "llama",
        EPSILON | {"rope_parameters": rope(10000.0)},
        RMS | {"rope.dimension_count": 16},
    ),
    "Qwen 3 with biases": (
        "qwen3",
        "qwen3",
        EPSILON | {"head_dim": 32, "attention_bias": True, "rope_parameters": rope()},
        RMS | {"attention.key_length": 32, "attention.value_length": 32, "rope.freq_base": 250000.0},
    ),
}


def made(model_type: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """A random model in float32, of numbers that bfloat16 has. No bias and no norm is what it starts with."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(BASE | sizes))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, tensor in model.named_parameters():
        if tensor.ndim < 2:
            tensor.data += 0.2 * torch.randn_like(tensor)
        else:
            tensor.data.normal_(0, 1 if "embed" in name else 1.2 * tensor.shape[-1] ** -0.5)
        tensor.data = tensor.data.bfloat16().float()
    model.tie_weights()
    return model


def written(path: Path, architecture: str, model: PreTrainedModel, values: dict[str, Any]) -> Path:
    """The model as llama.cpp writes it, in float32."""
    config = model.config
    common = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (common | values).items():
        tiny.add_value(writer, f"{architecture}.{key}", value)
    tiny.add_tokenizer(writer)
    writer.add_pad_token_id(2)
    kind = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, end = name.rpartition(".")
        numbers = tensor.numpy()
        if architecture == "llama" and (heads := heads_of(stem)):
            numbers = numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            numbers = numbers + 1
        writer.add_tensor(f"{names.get_name(stem)}.{end}", np.ascontiguousarray(numbers))
    tiny.finish(writer)
    return path


def heads_of(stem: str) -> int:
    return HEADS if stem.endswith("q_proj") else KV_HEADS if stem.endswith("k_proj") else 0


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.arange(5, 45)[None], use_cache=False).logits[0]
    return found.float()


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_the_logits_of_its_model(family: str, tmp_path: Path) -> None:
    architecture, model_type, sizes, values = FAMILIES[family]
    model = made(model_type, sizes)
    file = written(tmp_path / "tiny.gguf", architecture, model, values)
    found = load_model(Settings(model=str(file), weights="native"), lambda _: None).model.float()
    expected = logits_of(model)
    torch.testing.assert_close(logits_of(found), expected, rtol=0, atol=1e-4 * float(expected.std()))


@pytest.mark.usefixtures("cache")
def test_the_length_that_phi_was_trained_with_is_that_of_the_file(tmp_path: Path) -> None:
    """40 tokens are longer than it, so that the divisors for long texts count."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.0 + 3.0 * i for i in range(6)]}
    scaled = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors}
    scaled |= {"original_max_position_embeddings": 16, "attention_factor": 1.3}
    sizes = {"rope_parameters": scaled, "original_max_position_embeddings": 16, **EPSILON}
    model = made("phi3", sizes)
    values = RMS | {"rope.dimension_count": 12, "rope.scaling.original_context_length": 16}
    values |= {"rope.scaling.attn_factor": 1.3}
    plain = written(tmp_path / "plain.gguf", "phi3", model, values)
    file = with_tensors(
        plain,
        tmp_path / "tiny.gguf",
        {f"rope_factors_{name}.weight": np.array(factors[f"{name}_factor"], np.float32) for name in ("short", "long")},
    )
    found = load_model(Settings(model=str(file), weights="native"), lambda _: None).model.float()
    expected = logits_of(model)
    torch.testing.assert_close(logits_of(found), expected, rtol=0, atol=1e-4 * float(expected.std()))


def with_tensors(source: Path, path: Path, tensors: dict[str, np.ndarray[Any, Any]]) -> Path:
    """A copy of a file with further tensors."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    for name, numbers in tensors.items():
        writer.add_tensor(name, numbers)
    tiny.finish(writer)
    return path


def keys(**values: Any) -> Callable[[Any], None]:
    """Adds keys below the architecture, whose dots are written as two underscores."""

    def more(writer: Any) -> None:
        for name, value in values.items():
            tiny.add_value(writer, f"{writer.arch}.{name.replace('__', '.')}", value)

    return more


def tensor(name: str, dtype: Any = np.float32) -> Callable[[Any], None]:
    return lambda writer: writer.add_tensor(name, np.full(tiny.HIDDEN // tiny.HEADS // 2, 2, dtype))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("more", "named"),
    [
        (tensor("blk.1.attn_sub_norm.weight"), "blk.1.attn_sub_norm.weight"),
        (tensor("blk.0.attn_q.scale"), "blk.0.attn_q.scale"),
        (tensor("rope_freqs.weight", np.float16), "rope_freqs.weight"),
        (tensor("rope_factors_long.weight"), "rope_factors_long.weight"),
        (tensor("blk.2.nextn.eh_proj.weight"), "blk.2.nextn.eh_proj.weight"),
        (keys(of_tomorrow=3), "llama.of_tomorrow is 3"),
        (keys(of_layers=[0.5] * 2000), "llama.of_layers is an array"),
        (keys(logit_scale=0.5), "llama.logit_scale is 0.5"),
        (keys(residual_scale=0.22), "llama.residual_scale is 0.22"),
        (keys(embedding_scale=12.0), "llama.embedding_scale is 12"),
        (keys(rope__scale_linear=4.0), "llama.rope.scale_linear is 4"),
        (keys(attention__clamp_kqv=8.0), "llama.attention.clamp_kqv is 8"),
        (keys(attention__scale=0.5), "llama.attention.scale is 0.5, and the model would have 0.353553"),
        (keys(attention__sliding_window=16), "llama.attention.sliding_window is 16, and the model would have 0"),
        (keys(attention__sliding_window_pattern=[True, False]), "llama.attention.sliding_window_pattern"),
        (keys(attention__value_length=4), "llama.attention.value_length is 4, and the model would have 8"),
        (keys(attention__layer_norm_epsilon=1e-3), "llama.attention.layer_norm_rms_epsilon is 1e-05"),
        (keys(attention__shared_kv_layers=1), "llama.attention.shared_kv_layers is 1, and the model would have 0"),
        (keys(attn_logit_softcapping=50.0), "llama.attn_logit_softcapping is 50"),
        (keys(rope__freq_base_swa=1e6), "llama.rope.freq_base_swa is 1e.06, and the model would have 10000"),
        (keys(rope__scaling__type="dynamic"), "llama.rope.scaling.type is dynamic"),
        (keys(rope__scaling__type="longrope"), "llama.rope.scaling.type is longrope"),
        (keys(rope__scaling__attn_factor=1.5), "llama.rope.scaling.attn_factor is 1.5"),
        (keys(rope__scaling__of_tomorrow=1), "llama.rope.scaling.of_tomorrow is 1"),
        (
            lambda writer: [keys(rope__scaling__factor=4.0)(writer), tensor("rope_freqs.weight")(writer)],
            "scales positions twice: by rope_freqs.weight",
        ),
    ],
)
def test_what_nothing_reads_is_refused_by_name(more: Callable[[Any], None], named: str, tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf", more=more)
    with pytest.raises(ModelError, match=named) as raised:
        converted_folder(file, lambda _: None)
    assert "\n" not in str(raised.value)
    assert "file" in str(raised.value)


@pytest.mark.usefixtures("cache")
def test_a_head_that_rotates_in_part_is_refused_where_the_model_rotates_all(tmp_path: Path) -> None:
    sizes = {"head_dim": 32, "rope_parameters": rope(), **EPSILON}
    values = RMS | {"attention.key_length": 32, "attention.value_length": 32, "rope.freq_base": 250000.0}
    file = written(tmp_path / "tiny.gguf", "qwen3", made("qwen3", sizes), values | {"rope.dimension_count": 16})
    with pytest.raises(ModelError, match=r"qwen3\.rope\.dimension_count is 16, and the model would rotate 32"):
        converted_folder(file, lambda _: None)


@pytest.mark.usefixtures("cache")
def test_layers_of_gemma_4_that_share_keys_are_not_overlooked(tmp_path: Path) -> None:
    more = keys(attention__shared_kv_layers=18, attention__key_length=512, attention__value_length=512)
    file = tiny.write_gguf(tmp_path / "tiny.gguf", architecture="gemma4", more=more)
    with pytest.raises(ModelError, match=r"gemma4\.attention\.shared_kv_layers is 18, and the model would have 0"):
        converted_folder(file, lambda _: None)


@pytest.mark.usefixtures("cache")
def test_what_files_have_beside_the_numbers_is_no_fault(tmp_path: Path) -> None:
    def more(writer: Any) -> None:
        keys(
            tensor_data_layout="Meta AI original pth",
            attention__key_length=8,
            attention__value_length=8,
            attention__sliding_window=0,
            attention__scale=0.0,
            attention__clamp_kqv=0.0,
            expert_count=0,
            expert_used_count=0,
            expert_gating_func=2,
            logit_scale=1.0,
            embedding_scale=1.0,
            rope__scaling__type="none",
            rope__scaling__factor=8.0,
            rope__scaling__finetuned=True,
            # Of encoders, which are other files.
            mm__tokens_per_image=256,
            vision__block_count=27,
            audio__block_count=12,
        )(writer)
        for key, value in {
            "general.name": "Tiny",
            "general.size_label": "1K",
            "general.tags": ["text-generation"],
            "general.sampling.temp": 0.7,
            "quantize.imatrix.file": "imatrix.dat",
            "quantize.imatrix.entries_count": 14,
            "split.count": 0,
            "mradermacher.quantized_by": "somebody",
            "tokenizer.ggml.add_space_prefix": False,
        }.items():
            tiny.add_value(writer, key, value)

    converted_folder(tiny.write_gguf(tmp_path / "tiny.gguf", more=more), lambda _: None)
