"""Tiny models with random weights of the decoder architectures of transformers, every kind of layer in each.

A config is the architecture's default with less of everything: `SIZES` cuts down what it finds by field name, the
pattern of layers shrinks to the shortest that shows every kind, and `OVERRIDES` holds what one of them needs besides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import MtpLayer

from diskprefix.runtime.plan.draft_layer import with_one_more
from tests.runtime.plan.tensor_weights import QUANTS

VOCAB = 400
POSITIONS = 4096
WINDOW = 24
"""Between the steps of 16 and 32 tokens that tests prefill in; the others are on one side of both."""
SHORT_WINDOW = 12
LONG_WINDOW = 40
WEIGHT_STD = 0.125
"""One over the root of the hidden size, so that activations keep their size from layer to layer."""

SIZES = {
    name: size
    for size, names in (
        (VOCAB, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
        # Layers, where no pattern asks for more.
        (2, "num_hidden_layers num_layers n_layer n_layers"),
        # Widths: four heads of sixteen, two of them with keys and values of their own.
        (64, "hidden_size n_embd d_model embedding_dim lru_width"),
        (4, "num_attention_heads swa_num_attention_heads attention_heads num_heads n_head n_heads"),
        (2, "num_key_value_heads swa_num_key_value_heads"),
        (16, "head_dim swa_head_dim attention_head_dim kv_channels v_head_dim qk_nope_head_dim"),
        (8, "qk_rope_head_dim rotary_dim"),
        (32, "q_lora_rank kv_lora_rank o_lora_rank laurel_rank adapter_rank"),
        (96, "intermediate_size intermediate_size_mlp dense_intermediate_size ffn_dim ffn_hidden_size dff"),
        (16, "hidden_size_per_layer_input"),
        # Experts: two of eight, and the first layer without.
        (8, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k zero_expert_num n_group num_expert_group"),
        (1, "topk_group n_shared_experts num_shared_experts"),
        (1, "first_k_dense_replace num_dense_layers moe_layer_end_index"),
        (32, "moe_intermediate_size moe_shared_expert_intermediate_size shared_expert_intermediate_size"),
        (32, "shared_experts_intermediate_size shared_intermediate_size share_expert_dim expert_ffn_hidden_size"),
        (32, "router_hidden_size"),
        # Recurrent layers. Their scans go in chunks shorter than a step of 32.
        (8, "mamba_n_heads mamba_num_heads linear_num_value_heads linear_num_heads"),
        (2, "linear_num_key_heads mamba_n_groups mamba_ngroups n_groups n_mamba_heads"),
        (16, "mamba_d_head mamba_head_dim mamba_headdim linear_key_head_dim linear_value_head_dim linear_head_dim"),
        (16, "mamba_d_state state_size ssm_state_size"),
        (16, "mamba_chunk_size chunk_size block_size"),
        (8, "mamba_dt_rank time_step_rank"),
        # Windows and sparse attention: less than a prompt.
        (
            WINDOW,
            "sliding_window sliding_window_size attention_window_size attention_chunk_size window_size index_topk",
        ),
        (2 * WINDOW, "local_attention"),
        (16, "index_head_dim"),
        # With few heads, keys that no head wants tie for a place among those attended to.
        (16, "index_n_heads"),
    )
    for name in names.split()
}
"""The most that a field of a config may say. Larger defaults are cut down to it."""
SET = {
    **dict.fromkeys(("initializer_range", "init_std"), WEIGHT_STD),
    **dict.fromkeys(("max_position_embeddings", "model_max_length", "max_seq_len", "context_length"), POSITIONS),
    **dict.fromkeys(("n_positions", "n_ctx"), POSITIONS),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Fields that have this value wherever they are."""
PATTERNS = ("layer_types", "layers_block_type", "mlp_layer_types")
"""Fields that list a kind for each layer."""


@dataclass(frozen=True)
class Architecture:
    """`name` is the model type as users say it; `build` makes the config of its tiny text decoder. It takes fields that
    differ."""

    name: str
    build: Callable[..., PreTrainedConfig]


def shrink(model_type: str, **overrides: Any) -> PreTrainedConfig:
    """The tiny config of an architecture's text decoder. `overrides` are arguments of the config's class."""
    default = CONFIG_MAPPING[model_type]().get_text_config(decoder=True)
    stored = {field.name: default.attribute_map.get(field.name, field.name) for field in fields(default)}
    # Not getattr: fields that differ by layer refuse to be read for the whole model.
    before = {name: vars(default)[key] for name, key in stored.items() if key in vars(default)}
    after = {name: _tiny(name, value) for name, value in before.items()}
    if "kv_lora_rank" in before:  # latent attention makes keys for every head
        after["num_key_value_heads"] = SIZES["num_attention_heads"]
    # What stays as it was is left out: much of it was derived from the sizes.
    changed = {name: value for name, value in after.items() if value is not before[name]} | overrides
    return type(default)(**_with_patterns_of_one_length(changed))


def _tiny(name: str, value: Any) -> Any:
    if name in SET:
        return SET[name]
    if name in PATTERNS and value:
        return _shortest_pattern(name, value)
    if name in SIZES and isinstance(value, int):
        return min(value, SIZES[name])
    return value


def _shortest_pattern(name: str, layers: list[str]) -> list[str]:
    """Every kind of layer, and all of them once more, so that each feeds and follows others."""
    kinds = list(dict.fromkeys(layers))
    return kinds if name == "mlp_layer_types" else kinds * 2


def _with_patterns_of_one_length(changed: dict[str, Any]) -> dict[str, Any]:
    patterns = {name: changed[name] for name in PATTERNS if isinstance(changed.get(name), list)}
    if not patterns:
        return changed
    count = max(len(kinds) for kinds in patterns.values())
    padded = {name: kinds + kinds[-1:] * (count - len(kinds)) for name, kinds in patterns.items()}
    return changed | padded | ({"num_hidden_layers": count} if "num_hidden_layers" in changed else {})


LINEAR_FULL = ["linear_attention", "full_attention"] * 2
CONV_FULL = ["conv", "full_attention"] * 2
SLIDING_FULL = ["sliding_attention", "full_attention"] * 2

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "cohere": {"logit_scale": 1.0},
    "cohere2": {"logit_scale": 1.0},
    "cohere2_moe": {"logit_scale": 1.0},
    "cohere_compass_text": {
        "logit_scale": 1.0,
        "layer_types": SLIDING_FULL,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}},
    "doge": {"keep_window_size": WINDOW},
    "dots1": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "dots3_note": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "gemma2": {"sliding_window": SHORT_WINDOW},
    "gemma3n": {
        "layer_types": SLIDING_FULL,
        "num_kv_shared_layers": 2,
        "intermediate_size": 96,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gemma4": {"layer_types": SLIDING_FULL, "num_kv_shared_layers": 2, "global_head_dim": 32},
    "gemma4_unified": {
        "layer_types": SLIDING_FULL,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gpt_oss": {"sliding_window": SHORT_WINDOW},
    "granitemoe_swa": {"shared_intermediate_size": 32},
    "granitemoehybrid": {"layer_types": LINEAR_FULL},
    "granitemoeshared": {"shared_intermediate_size": 32},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 8, "moe_topk": 2},
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "inkling_text": {"logits_mup_width_multiplier": 1.0},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": SLIDING_FULL, "num_attention_heads_per_layer": [8, 4, 8, 4]},
    "lfm2": {"layer_types": CONV_FULL},
    "lfm2_moe": {"layer_types": CONV_FULL},
    "llama4": {
        "no_rope_layers": [1, 0, 1, 0],
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "floor_scale": 16,
    },
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": SLIDING_FULL},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_block_size": 8,
        "index_topk_blocks": 3,
    },
    "ministral": {"head_dim": 16, "layer_types": SLIDING_FULL},
    "nemotron": {"num_key_value_heads": 2},
    # transformers takes it for a least step, which no other engine does.
    "nemotron_h": {"time_step_min": 1e-30},
    "olmo3": {"sliding_window": LONG_WINDOW},
    "qwen4_exp": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 24,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "ple_layer_ids": [1, 3],
        "ngram_vocab_size_base": VOCAB,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "smollm3": {"layer_types": ["full_attention"] * 4, "no_rope_layers": [1, 0, 1, 0]},
    "starcoder2": {"sliding_window": WINDOW},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": WINDOW},
}
"""What one of them needs: fields without a default, values that go together, layers that the default leaves out."""


def _step3p7(**fields: Any) -> PreTrainedConfig:
    """Its class takes images too, in a tower that text never enters."""
    text = shrink(
        "step3p7",
        layer_types=SLIDING_FULL,
        mlp_layer_types=["dense", "sparse"],
        sliding_window=WINDOW,
        num_sliding_attention_heads=8,
        **fields,
    )
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return CONFIG_MAPPING["step3p7"](text_config=text.to_dict(), vision_config=vision, image_token_id=VOCAB - 1)


def _with_a_tower(name: str, **fields: Any) -> PreTrainedConfig:
    """Its class takes images too, in a tower that text never enters. Heads of sixteen turn by [4, 2, 2] pairs."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = shrink(name, rope_parameters=rope, **({"head_dim": 16} if name.startswith("qwen3") else {}), **fields)
    vision: dict[str, Any] = {"depth": 1, "embed_dim": 64, "hidden_size": 64, "out_hidden_size": 64, "num_heads": 4}
    vision |= {"intermediate_size": 64, "deepstack_visual_indexes": [0]}
    return CONFIG_MAPPING[name](text_config=text.to_dict(), vision_config=vision)


DRAFTING = "+draft"
"""What a name of an architecture ends with if the model is to have a draft layer."""
WITH_DRAFT_LAYER = tuple(
    f"{name}{DRAFTING}"
    for name in ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "mimo_v2_flash", "qwen3_5", "qwen3_5_moe", "qwen3_next")
)
_FACTORS: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 3.0 * i for i in range(8)],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0, "mscale": 1.0}


def _original(num_tokens: int) -> dict[str, Any]:
    """Factors of positions: those for long texts if the original length is not that of the model."""
    length = {"original_max_position_embeddings": num_tokens}
    return {"rope_parameters": _FACTORS | length, **length}


SCALED: dict[str, dict[str, Any]] = {
    "phi3+long": _original(32),
    "phi3+short": _original(POSITIONS),
    "phimoe+short": {"rope_parameters": _original(POSITIONS)["rope_parameters"]},
    "hunyuan_v1_dense+alpha": {"rope_parameters": _ALPHA},
    "hunyuan_v1_moe+alpha": {"rope_parameters": _ALPHA},
}
"""Architectures with positions that published models have and the class has no default for."""
TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
MODEL_TYPES = """
    llama qwen2 qwen3 qwen3_moe qwen3_next qwen3_5 gemma2 gemma3 gemma3n gemma4 mistral ministral mixtral phi3
    gpt_oss olmo3 deepseek_v3 deepseek_v32 glm4_moe kimi_linear minimax granitemoehybrid bamba falcon_h1 jamba
    zamba2 nemotron_h lfm2 mamba mamba2 falcon_mamba recurrent_gemma rwkv gpt2 gpt_neox bloom falcon stablelm
    cohere2 smollm3 exaone4 llama4 afmoe step3p7

    apertus arcee aria_text axk1 axk2 bailing_hybrid beam biogpt bitnet codegen cohere cohere2_moe
    cohere_compass_text ctrl cwm dbrx deepseek_v2 deepseek_v4 diffllama doge dots1 dots3_note ernie4_5 ernie4_5_moe
    exaone_moe flex_olmo flint gemma gemma4_unified glm glm4 glm4_moe_lite glm_moe_dsa gpt_bigcode gpt_neo
    gpt_neox_japanese gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_text inkling_text internlm3 iquestcoder jais2
    jetmoe kolibri1 laguna lfm2_moe lfm3 longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text
    ministral3 mistral4 modernbert-decoder mpt nanochat nemotron olmo olmo2 olmo_hybrid olmoe opt persimmon phi
    phimoe qwen2_moe qwen3_5_moe qwen4_exp seed_oss solar_open starcoder2 vaultgemma xglm xlstm youtu zamba zaya
"""
"""The first paragraph names those that users ask for by name, the second whatever else can be made so small."""

ARCHITECTURES = {
    name: Architecture(name, _step3p7 if name == "step3p7" else partial(shrink, name, **OVERRIDES.get(name, {})))
    for name in MODEL_TYPES.split()
} | {name: Architecture(name, partial(_with_a_tower, name)) for name in TOWERS}


def tiny_model(name: str, dtype: torch.dtype, *, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """On the CPU. A seed gives the same weights in every dtype; fp32 stays what loading a checkpoint would keep so. A
    model whose name ends with `DRAFTING` has a draft layer, and one of `SCALED` other positions."""
    torch.manual_seed(seed)
    if name in SCALED:
        name, fields = name.partition("+")[0], SCALED[name] | fields
    name, drafting, _ = name.partition(DRAFTING)
    config = ARCHITECTURES[name].build(**fields)
    auto = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText
    model = auto.from_config(config, dtype=torch.float32)
    _stir_constants(model)
    if drafting:
        own = model.state_dict()
        model = with_draft_layer(type(model))._from_config(model.config, dtype=torch.float32)
        _stir_constants(model)
        model.load_state_dict(own, strict=False)
    if dtype != torch.float32:
        model = type(model).from_pretrained(None, config=config, state_dict=model.state_dict(), dtype=dtype)
    return model.eval()


def with_draft_layer(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of the models of a class that have a draft layer."""

    def initialise(model: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        kind.__init__(model, config, *args, **kwargs)
        decoder = model.get_decoder()
        classes, count = (type(decoder.layers[-1]), type(decoder.norm)), decoder.config.num_hidden_layers
        decoder.draft_layer = MtpLayer(with_one_more(decoder.config), *classes, count)
        model.init_weights()

    # By its name and its module transformers finds what it knows of a class.
    return type(kind.__name__, (kind,), {"__init__": initialise, "__module__": kind.__module__})


def quantised_tiny_model(name: str, kind: str) -> PreTrainedModel:
    """`tiny_model` in bfloat16, of which a plan gets the quants of a type of files."""
    model = tiny_model(name, torch.bfloat16)
    setattr(model, QUANTS, kind)
    return model


@torch.no_grad()
def _stir_constants(model: PreTrainedModel) -> None:
    """Biases, gates, sinks and the corrections of routers start out as zeros, which would hide whatever they act on."""
    saved = model.state_dict().keys()
    buffers = [buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()]
    for tensor in (*model.parameters(), *buffers):
        if tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            tensor.add_(torch.randn_like(tensor) * 0.05)
