"""A GGUF file gives the numbers of the model that llama.cpp's converter would write it from, whatever its age."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError
from diskprefix.gguf_types import GGUF_TYPES
from diskprefix.native.library import operators
from diskprefix.runtime.files.file_matrix import MatrixPacking
from diskprefix.runtime.files.fit import needs_of_gguf
from diskprefix.runtime.files.gguf.gguf import GgufModel
from diskprefix.runtime.files.gguf.gguf_header import FileTensor, GgufHeader
from diskprefix.runtime.files.gguf.gguf_rope import scale_positions
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.load.loader import load_model
from diskprefix.runtime.load.self_check import check
from diskprefix.runtime.plan.families.slot_names import SlotNames
from diskprefix.runtime.plan.part_options import ExpertsForm
from diskprefix.runtime.plan.planned import plan_layout
from diskprefix.runtime.plan.quants.forms import compiled
from tests.arrays import array_of
from tests.runtime.plan import plans, tiny
from tests.runtime.plan.gguf_files import (
    EPSILON,
    KINDS,
    RMS,
    deepseek,
    is_quantised,
    made,
    rope,
    tensors_of,
    type_of,
    write_deepseek,
    written,
)
from tests.runtime.plan.tensor_weights import require_numbers

pytestmark = pytest.mark.usefixtures("cache")
WINDOW = 16
TOKENS = np.arange(5, 85)
# The root of its hidden size has no rounding, by which it scales embeddings.
GEMMA = EPSILON | {"head_dim": 32, "sliding_window": WINDOW, "tie_word_embeddings": True}
GEMMA_VALUES: dict[str, Any] = RMS | {
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.sliding_window": WINDOW,
}
LAYER = {"attention.layer_norm_epsilon": 3e-3}
KEYS: dict[str, Any] = {"attention.key_length": 16, "attention.value_length": 16}
WINDOWS = KEYS | {"attention.sliding_window": WINDOW}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OF_EXPERTS: dict[str, Any] = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
OF_EXPERTS |= {"expert_gating_func": 2}
THREE_AND_ONE = ["sliding_attention"] * 3 + ["full_attention"]
# The first layer has positions because it is dense, and the others if they have a window.
COHERE_2_MOE: dict[str, Any] = {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "intermediate_size": 32,
    "prefix_dense_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    "expert_selection_fn": "sigmoid",
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", *THREE_AND_ONE],
    "logit_scale": 0.25,
    "rope_theta": 250000.0,
}
OF_COHERE_2_MOE: dict[str, Any] = (
    WINDOWS
    | OF_EXPERTS
    | {"feed_forward_length": 96, "logit_scale": 0.25, "rope.dimension_count": 16, "rope.freq_base": 250000.0}
    | {"attention.sliding_window_pattern": [False, True, True, True, False], "leading_dense_block_count": 1}
    | {"expert_weights_norm": True, "expert_shared_count": 1, "expert_shared_feed_forward_length": 32}
    | {"rope.scaling.type": "none", "vocab_size": 263}
)
GRANITE_WINDOWS: dict[str, Any] = {
    "num_hidden_layers": 5,
    "sliding_window": WINDOW,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
    "rope_parameters": rope(),
}
OF_GRANITE_WINDOWS: dict[str, Any] = {
    "attention.sliding_window": WINDOW,
    "attention.sliding_window_pattern": [False, True, True, True, False],
    "attention.scale": 0.2,
    "embedding_scale": 3.0,
    "residual_scale": 0.5,
    "logit_scale": 4.0,
    "rope.dimension_count": 16,
    "rope.freq_base": 250000.0,
}


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
    "Mellum 2": (
        "mellum",
        "mellum",
        EPSILON
        | {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
        | {"rope_parameters": {"sliding_attention": rope(20000.0), "full_attention": rope()}},
        RMS
        | {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": WINDOW}
        | {"attention.sliding_window_pattern": [True, False], "expert_feed_forward_length": 32}
        | {"expert_count": 4, "expert_used_count": 2, "rope.freq_base": 250000.0, "rope.freq_base_swa": 20000.0},
    ),
    "Gemma": (
        "gemma",
        "gemma",
        EPSILON | {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": rope(10000.0)},
        RMS | {"attention.key_length": 32, "attention.value_length": 32},
    ),
    "Arcee": (
        "arcee",
        "arcee",
        EPSILON | {"rope_parameters": rope()},
        RMS | {"rope.dimension_count": 16, "rope.freq_base": 250000.0},
    ),
    "OLMoE": (
        "olmoe",
        "olmoe",
        EPSILON
        | {"intermediate_size": 32, "num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2}
        | {"rope_parameters": rope()},
        RMS
        | {"rope.freq_base": 250000.0, "feed_forward_length": 32, "expert_count": 8, "expert_used_count": 2}
        | {"expert_gating_func": 1},
    ),
    "Ling mini 2.0": (
        "bailingmoe2",
        "glm4_moe",
        EPSILON
        | {"num_hidden_layers": 3, "head_dim": 16, "use_qk_norm": True, "first_k_dense_replace": 1}
        | {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "n_shared_experts": 1}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
        | {"rope_parameters": rope(600000.0, partial_rotary_factor=0.5)},
        RMS
        | {"rope.dimension_count": 8, "rope.freq_base": 600000.0, "leading_dense_block_count": 1}
        | {"attention.key_length": 16, "attention.value_length": 16, "expert_feed_forward_length": 32}
        | {"expert_shared_feed_forward_length": 32, "expert_shared_count": 1, "expert_count": 8, "expert_used_count": 4}
        | {"expert_group_count": 4, "expert_group_used_count": 2, "expert_weights_scale": 2.5}
        | {"expert_weights_norm": True, "expert_gating_func": 2},
    ),
    "Apertus": ("apertus", "apertus", EPSILON | {"rope_parameters": rope()}, RMS | {"rope.freq_base": 250000.0}),
    "BitNet": (
        "bitnet",
        "bitnet",
        EPSILON | {"hidden_act": "silu", "tie_word_embeddings": True, "rope_parameters": rope()},
        RMS | {"rope.freq_base": 250000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
    ),
    "GLM-4": (
        "chatglm",
        "glm",
        EPSILON | {"head_dim": 16, "attention_bias": True, "rope_parameters": rope(10000.0, partial_rotary_factor=0.5)},
        RMS | {"rope.dimension_count": 8, "rope.freq_base": 10000.0},
    ),
    "Jais 2": (
        "jais2",
        "jais2",
        {"layer_norm_eps": 3e-3, "head_dim": 16, "rope_parameters": rope()},
        LAYER | {"rope.dimension_count": 16, "rope.freq_base": 250000.0} | KEYS,
    ),
    "Nemotron": (
        "nemotron",
        "nemotron",
        {"norm_eps": 3e-3, "head_dim": 16, "rope_parameters": rope(10000.0, partial_rotary_factor=0.5)},
        RMS | LAYER | KEYS | {"rope.dimension_count": 8, "rope.freq_base": 10000.0, "rope.scaling.type": "none"},
    ),
    "Phi-2": (
        "phi2",
        "phi",
        {"layer_norm_eps": 3e-3, "num_key_value_heads": 4}
        | {"rope_parameters": rope(10000.0, partial_rotary_factor=0.5)},
        LAYER | {"rope.dimension_count": 8},
    ),
    "Pythia": (
        "gptneox",
        "gpt_neox",
        {"layer_norm_eps": 3e-3, "rope_parameters": rope(10000.0, partial_rotary_factor=0.25)},
        LAYER | {"attention.head_count_kv": None, "rope.dimension_count": 4, "use_parallel_residual": True},
    ),
    "GPT-NeoX in order": (
        "gptneox",
        "gpt_neox",
        {"layer_norm_eps": 3e-3, "use_parallel_residual": False}
        | {"rope_parameters": rope(10000.0, partial_rotary_factor=0.25)},
        LAYER | {"attention.head_count_kv": None, "rope.dimension_count": 4, "use_parallel_residual": False},
    ),
    "MiniCPM 3": (
        "minicpm3",
        "minicpm3",
        {"rms_norm_eps": 1e-6, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32}
        | {"qk_rope_head_dim": 16, "v_head_dim": 16, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4}
        | {"rope_parameters": rope(10000.0)},
        {"attention.layer_norm_rms_epsilon": 1e-6, "attention.q_lora_rank": 32, "attention.kv_lora_rank": 64}
        | {"attention.key_length": 48, "rope.dimension_count": 16, "vocab_size": 263},
    ),
    "K-EXAONE": (
        "exaone-moe",
        "exaone_moe",
        EPSILON
        | EXPERTS
        | {"num_hidden_layers": 4, "head_dim": 16, "sliding_window": WINDOW, "layer_types": THREE_AND_ONE}
        | {"num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}
        | {"rope_parameters": rope()},
        RMS
        | WINDOWS
        | OF_EXPERTS
        | {"attention.sliding_window_pattern": [True, True, True, False], "rope.freq_base": 250000.0}
        | {"expert_group_count": 1, "expert_group_used_count": 1, "expert_shared_count": 1}
        | {"expert_shared_feed_forward_length": 32, "expert_weights_scale": 2.5, "expert_weights_norm": True}
        | {"leading_dense_block_count": 1, "nextn_predict_layers": 0, "rope.scaling.type": "none"},
    ),
    "Trinity": (
        "afmoe",
        "afmoe",
        EPSILON
        | EXPERTS
        | {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": WINDOW, "global_attn_every_n_layers": 4}
        | {"num_dense_layers": 1, "num_shared_experts": 1, "route_scale": 2.5, "mup_enabled": True}
        | {"rope_parameters": rope(10000.0)},
        RMS
        | WINDOWS
        | OF_EXPERTS
        | {"expert_shared_count": 1, "expert_weights_scale": 2.5, "expert_weights_norm": True}
        | {"leading_dense_block_count": 1, "rope.dimension_count": 16, "rope.freq_base": 10000.0},
    ),
    "Command with experts": (
        "cohere2moe",
        "cohere2_moe",
        COHERE_2_MOE | {"rms_norm_eps": None, "layer_norm_eps": 3e-3},
        LAYER | OF_COHERE_2_MOE,
    ),
    "Command with experts and RMS norms": (
        "cohere2moe",
        "cohere2_moe",
        COHERE_2_MOE | EPSILON,
        RMS | OF_COHERE_2_MOE,
    ),
    "Granite with windows": (
        "granite_swa",
        "granite_swa",
        EPSILON | GRANITE_WINDOWS | {"layer_rope_theta": [0.0, 250000.0, 250000.0, 250000.0, 0.0]},
        RMS | OF_GRANITE_WINDOWS | {"attention.rope_pattern": [False, True, True, True, False]},
    ),
    "Granite with windows and experts": (
        "granite_swa",
        "granitemoe_swa",
        EPSILON
        | GRANITE_WINDOWS
        | {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 64},
        RMS
        | OF_GRANITE_WINDOWS
        | {"feed_forward_length": 32, "expert_count": 8, "expert_used_count": 2}
        | {"expert_shared_feed_forward_length": 64},
    ),
    "Qwen 3 with biases": (
        "qwen3",
        "qwen3",
        EPSILON | {"head_dim": 32, "attention_bias": True, "rope_parameters": rope()},
        RMS | {"attention.key_length": 32, "attention.value_length": 32, "rope.freq_base": 250000.0},
    ),
}


def loaded(file: Path) -> PreTrainedModel:
    """As modules of transformers."""
    return load_model(Settings(model=str(file)), lambda _: None).read_modules()


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.from_numpy(TOKENS)[None], use_cache=False).logits[0]
    return found.float()


def require_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * float(expected.std()))


@pytest.mark.cases(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_gives_the_logits_of_its_model(family: str, tmp_path: Path) -> None:
    architecture, model_type, sizes, values = FAMILIES[family]
    model = made(model_type, sizes)
    args = tmp_path / "tiny.gguf", architecture, model.config, values, tensors_of(model, architecture)
    read = GgufModel.read(written(*args), print)
    require_equal(plans.logits_of(read.decoder_weights("float32"), read.config, TOKENS), logits_of(model))
    read = GgufModel.read(written(*args, gguf.GGMLQuantizationType.Q8_0), print)
    plain, packed = read.decoder_weights("bfloat16"), read.decoder_weights("bfloat16", MatrixPacking(compiled()))
    plans.logits_of(packed, read.config)
    assert packed._quants
    require_numbers(packed._quants, plain.tensor, SlotNames.of(read.config).experts)


@pytest.mark.parametrize("length", [16, 128], ids=["long texts", "short texts"])
def test_the_original_length_of_phi_is_read_from_the_file(length: int, tmp_path: Path) -> None:
    """80 tokens are longer than it or shorter, so that the divisors for long texts count or those for short ones."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(6)], "long_factor": [1.0 + 3.0 * i for i in range(6)]}
    scaled = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75, **factors}
    scaled |= {"original_max_position_embeddings": length, "attention_factor": 1.3}
    model = made("phi3", {"rope_parameters": scaled, "original_max_position_embeddings": length, **EPSILON})
    values = RMS | {"rope.dimension_count": 12, "rope.scaling.original_context_length": length}
    tensors = tensors_of(model, "phi3")
    tensors |= {f"rope_factors_{name[:-7]}.weight": torch.tensor(numbers) for name, numbers in factors.items()}
    file = written(tmp_path / "tiny.gguf", "phi3", model.config, values | {"rope.scaling.attn_factor": 1.3}, tensors)
    require_equal(logits_of(loaded(file).float()), logits_of(model))
    # A plan has one set for all requests.
    read = GgufModel.read(file, print)
    for context, is_same in ((length, length == 128), (length + 1, length == 16), (None, length == 16)):
        read.config.context = context
        found = plans.logits_of(read.decoder_weights("float32"), read.config, TOKENS)
        assert torch.allclose(found, logits_of(model), rtol=1e-4, atol=1e-4) == is_same


# The scaling of positions, of which no tiny model shows the numbers.

PLAIN = {"rope_type": "default", "rope_theta": 5e5}


def scaled(parameters: dict[str, Any], values: dict[str, Any], *tensors: FileTensor) -> dict[str, Any]:
    config = SimpleNamespace(rope_parameters=parameters, head_dim=64, max_position_embeddings=8192)
    found = {f"llama.rope.scaling.{name}": value for name, value in values.items()}
    header = GgufHeader({"general.architecture": "llama"} | found, {}, {}, tensors)
    scale_positions(config, Metadata(header, tensors), tensors)
    return parameters


def test_yarn_and_linear_scaling_are_read_for_the_layers_without_a_window() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32768}
    expected = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert scaled({**PLAIN}, yarn) == PLAIN | expected
    assert scaled({**PLAIN}, yarn | {"type": "none"}) == PLAIN
    both = scaled({"full_attention": {**PLAIN}, "sliding_attention": {**PLAIN}}, {"type": "linear", "factor": 8.0})
    assert both == {"full_attention": PLAIN | {"rope_type": "linear", "factor": 8.0}, "sliding_attention": PLAIN}


def test_the_frequencies_of_llama_3_are_recognised_and_others_are_used(tmp_path: Path) -> None:
    wanted = PLAIN | {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    wanted |= {"original_max_position_embeddings": 8192}

    def frequencies(kind: str, parameters: dict[str, Any], length: int | None = None) -> np.ndarray[Any, Any]:
        config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=parameters)
        found, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), length)
        assert factor == 1.0
        return found.numpy()  # type: ignore[no-any-return]

    def divisors(numbers: np.ndarray[Any, Any]) -> FileTensor:
        (file := tmp_path / "divisors").write_bytes(numbers.astype(np.float32).tobytes())
        return FileTensor("rope_freqs.weight", "F32", numbers.shape, file, 0, np.dtype(np.float32), numbers.shape)

    plain = 5e5 ** -(np.arange(32) / 32)
    of_file = plain / frequencies("llama3", wanted)
    assert scaled({**PLAIN}, {}, divisors(of_file)) == wanted
    other = scaled({**PLAIN}, {}, divisors(of_file[::-1]))
    for length in (1, 1 << 20):
        np.testing.assert_allclose(frequencies("longrope", other, length), plain / of_file[::-1], rtol=1e-5)


# DeepSeek's layers: latent attention and mixtures of experts.


def dequantised(model: PreTrainedModel, *, is_split: bool) -> PreTrainedModel:
    """The model with the numbers that its file has, as the `gguf` package reads them, in bfloat16."""
    own, kind = copy.deepcopy(model), type_of(model)
    for name, tensor in tensors_of(own, "deepseek2", is_split=is_split).items():
        if is_quantised(name, tensor):
            numbers = np.ascontiguousarray(tensor.numpy())
            tensor.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(numbers, kind), kind)))
    found, info = type(model).from_pretrained(
        None, config=model.config, state_dict=own.state_dict(), dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(info.values())
    return found.eval()


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The median of the tokens' errors: a router may choose another expert where two are nearly equal."""
    return float(((found - exact).norm(dim=1) / exact.norm(dim=1)).median())


@pytest.mark.cases(2)
@pytest.mark.parametrize("is_split", [True, False], ids=["new", "old"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_deepseek_gives_the_parameters_and_logits_of_the_model(
    kind: str, is_split: bool, tmp_path: Path
) -> None:
    model = deepseek(kind)
    expected = dequantised(model, is_split=is_split)
    file = write_deepseek(tmp_path / "tiny.gguf", kind, model, is_split=is_split)
    plain, state = loaded(file), expected.state_dict()
    assert type(plain) is type(expected)
    assert all(torch.equal(plain.state_dict()[name], tensor) for name, tensor in state.items())
    assert torch.equal(logits_of(plain), logits_of(expected))
    served = GgufModel.read(file, print).decoder_weights("bfloat16", MatrixPacking(compiled()))
    # All of the difference is rounding to bfloat16, of which transformers has as much on the same numbers.
    exact = logits_of(copy.deepcopy(expected).float())
    found = plans.logits_of(served, expected.config, TOKENS)
    assert distance(found, exact) < 3 * distance(logits_of(expected), exact)
    kept = served._quants
    assert {name.rpartition(".")[2] for name in kept} >= {"kv_a_proj_with_mqa", "o_proj", "down_proj"}
    assert "layers.0.self_attn.kv_b_proj" not in kept
    assert len([name for name in kept if name.endswith(".experts.gate")]) == (0 if kind == "dense" else 2)
    assert all((f"layers.0.self_attn.kv_b_proj.{of}" in kept) is is_split for of in ("keys", "values"))
    kept = {name: quants for name, quants in kept.items() if ".kv_b_proj." not in name}
    require_numbers(kept, lambda name: array_of(state[name if name in state else f"model.{name}"]), ExpertsForm())
    taken = sum({part.ctypes.data: part.nbytes for _, part in served.named()}.values())
    assert needs_of_gguf(file, "auto").weights_bytes == pytest.approx(taken, rel=0.02)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention__kv_lora_rank": None}, "the file lacks deepseek2.attention.kv_lora_rank"),
        ({"expert_weights_norm": True}, "experts that are weighted so are not served"),
        ({"attention__temperature_scale": 0.1}, "deepseek2.attention.temperature_scale is 0.1"),
    ],
)
def test_metadata_that_no_model_computes_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write_deepseek(tmp_path / "tiny.gguf", "V2-Lite", **values)
    with pytest.raises(ModelError, match=message):
        loaded(file)


def test_latent_attention_of_a_file_is_exact_at_every_token(tmp_path: Path) -> None:
    if operators() is None:
        pytest.skip("no compiled operators")
    file = write_deepseek(tmp_path / "tiny.gguf", "V3")
    served = load_model(Settings(model=str(file)), lambda _: None)
    assert served.weights is not None
    check(served.weights, served.config, plan_layout(served.weights, served.config))


def test_types_of_tensors_are_those_of_the_library() -> None:
    known = {(kind.value, kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert known <= {(kind.number, kind.name, kind.weights, kind.num_bytes) for kind in GGUF_TYPES}


def test_estimated_and_read_weights_have_equal_shapes(tmp_path: Path) -> None:
    read = GgufModel.read(tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q8_0"), print)
    shapes = []
    for is_unread in (False, True):
        weights = read.decoder_weights("bfloat16", MatrixPacking(compiled()), is_unread=is_unread)
        plans.logits_of(weights, read.config)
        shapes.append({name: (tensor.shape, tensor.dtype) for name, tensor in weights.named()})
    assert shapes[0] == shapes[1]
