"""Architectures with mixtures of experts, and those with latent attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from diskprefix.errors import ModelError
from diskprefix.runtime.files.gguf.architecture import Architecture
from diskprefix.runtime.files.gguf.configuration import BASE
from diskprefix.runtime.files.gguf.dense_families import (
    PAIRED,
    kinds_of_layers,
    of_text,
    rotated_granite,
    scaled_by_position,
    windows_of_layers,
)
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.files.gguf.sources import Array, Sources, TensorSource, expansion_of_latents, same

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""The functions of routers: the values of `expert_gating_func`."""


def _interleaved(_: Any, gate: Array, up: Array) -> Array:
    """Returns the rows of gate and up, [experts, rows, ..], interleaved."""
    return np.stack([gate, up], axis=2).reshape(len(gate), -1, *gate.shape[2:])


def _gpt_oss(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    return width_of_experts(metadata, options) | {
        "head_dim": metadata.get("attention.key_length", 64),
        "sliding_window": metadata.get("attention.sliding_window", 128),
        # All of its models scale positions like this; files do not say so.
        "rope_parameters": options["rope_parameters"] | {"truncate": False},
    }


def width_of_experts(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """Returns the width of experts, for configurations without another width."""
    return {"intermediate_size": metadata.get("expert_feed_forward_length") or metadata("feed_forward_length")}


def _ernie_moe(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """The converter guesses the width of shared experts. It is used only if their number is missing."""
    width = metadata("expert_feed_forward_length")
    plain = metadata.get("expert_shared_feed_forward_length", 0) // width
    return {
        "moe_layer_end_index": metadata.num_layers - 1,
        "moe_layer_interval": metadata.get("interleave_moe_layer_step", 1),
        "moe_num_shared_experts": metadata.get("expert_shared_count", plain),
    }


def _llama_4(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """Every fourth layer has no rotary embedding and sees all tokens; the others see their chunk. The model with 128
    experts has no norms of queries and keys. Neither is in the file; it is in llama.cpp (`llama_model_llama4`)."""
    has_chunks = metadata.get("attention.sliding_window") != 0
    return {
        "intermediate_size": metadata("expert_feed_forward_length"),
        "intermediate_size_mlp": metadata("feed_forward_length"),
        "interleave_moe_layer_step": metadata("interleave_moe_layer_step"),
        "use_qk_norm": metadata("expert_count") != 128,
        "no_rope_layers": [int(not has_chunks or (i + 1) % 4 != 0) for i in range(metadata.num_layers)],
        "layer_types": None if has_chunks else ["full_attention"] * metadata.num_layers,
    }


def _mimo_2(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    """In the file, a window counts the tokens before the current one; transformers (`MiMoV2FlashConfig`) includes
    it."""
    kinds, heads = kinds_of_layers(metadata), metadata.each_layer("attention.head_count_kv")
    if "full_attention" not in kinds:
        raise metadata.fault("attention.sliding_window_pattern", "that of MiMo 2, of which some layers have no window")
    full = options["rope_parameters"]
    return {
        "layer_types": kinds,
        "mlp_layer_types": _kinds_of_feed_forward(metadata),
        "num_key_value_heads": heads[kinds.index("full_attention")],
        "v_head_dim": metadata("attention.value_length"),
        "attention_value_scale": metadata.get("attention.value_scale", 1.0),
        "sliding_window": metadata("attention.sliding_window") + 1,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": full | {"rope_theta": metadata.get("rope.freq_base_swa", BASE)},
        },
    }


def _mellum(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    """Layers with a window have the same base as the others unless the file has its own."""
    full = options["rope_parameters"]
    theta = metadata.get("rope.freq_base_swa", full["rope_theta"])
    return {
        "layer_types": windows_of_layers(metadata, options),
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta}},
    }


def _hy_3(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """A layer without a router has no experts. Shared experts are one expert of their total width."""
    if not metadata.get("expert_weights_norm", False):
        raise ModelError("experts that are weighted so are not served: hy_v3.expert_weights_norm is false")
    width = metadata("expert_feed_forward_length")
    return {
        "num_shared_experts": (metadata.get("expert_shared_feed_forward_length", 0) or width) // width,
        "router_scaling_factor": metadata.get("expert_weights_scale", 1.0),
        "mlp_layer_types": _kinds_of_feed_forward(metadata),
    }


def _bailing_2(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """Ling 2.0 computes the same as GLM 4 MoE. Its shared experts are one expert of their total width."""
    metadata.get("expert_shared_feed_forward_length")
    if metadata.get("attention.sliding_window", 0):
        raise metadata.fault("attention.sliding_window", "0: models of this architecture have no windows")
    return {"use_qk_norm": True, "norm_topk_prob": _normed(metadata)}


def _normed(metadata: Metadata) -> bool:
    return bool(metadata.get("expert_weights_norm", False))


def _kinds_of_feed_forward(metadata: Metadata) -> list[str]:
    routers = [f"blk.{i}.ffn_gate_inp.weight" in metadata.tensors for i in range(metadata.num_layers)]
    return ["sparse" if has_router else "dense" for has_router in routers]


def _laguna(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    """Layers with a window may have more heads, and another rotary embedding. Without a list in the file, the first of
    every few layers has no window. A gate has a number for each head, or for each element of heads."""
    if not metadata.get("expert_weights_norm", False):
        raise ModelError("experts that are weighted so are not served: laguna.expert_weights_norm is not true")
    heads, window = metadata.each_layer("attention.head_count"), metadata.get("attention.sliding_window", 0)
    width, key = metadata("attention.key_length"), "attention.sliding_window_pattern"
    if metadata.get("attention.value_length", width) != width:
        raise metadata.fault("attention.value_length", f"the {width} of attention.key_length")
    gates = {heads[0]: "per-head", heads[0] * width: "per-element"}
    if (rows := metadata.num_rows("blk.0.attn_gate.weight")) not in gates:
        raise ModelError(f"the file's blk.0.attn_gate.weight has {rows} rows, for {heads[0]} heads of {width}")
    step = 0 if metadata.is_array(key) else metadata.get(key, 4)
    has_window = [bool(not step or i % step) for i in range(metadata.num_layers)]
    if metadata.is_array(key):
        has_window = [bool(flag) for flag in metadata.each_layer(key)]
    rotated = metadata.get("rope.dimension_count", width)
    base = metadata.get("rope.freq_base", BASE)
    bases = {"full_attention": base, "sliding_attention": metadata.get("rope.freq_base_swa", base)}
    parts = {"full_attention": rotated, "sliding_attention": metadata.get("rope.dimension_count_swa", rotated)}
    return {
        "num_attention_heads": max(heads),
        "num_attention_heads_per_layer": list(heads),
        "num_key_value_heads": metadata("attention.head_count_kv"),
        "head_dim": width,
        "gating": gates[rows],
        # The configuration needs a number even without a window.
        "sliding_window": window or options["max_position_embeddings"],
        "layer_types": ["sliding_attention" if window and flag else "full_attention" for flag in has_window],
        "mlp_layer_types": _kinds_of_feed_forward(metadata),
        "moe_routed_scaling_factor": metadata.get("expert_weights_scale", 1.0),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": bases[kind], "partial_rotary_factor": part / width}
            for kind, part in parts.items()
        },
    }


def latent_sizes(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    """Newer files have the sizes of heads in keys with `mla`, and the sizes of latents in the older keys."""
    rotary_dim = metadata("rope.dimension_count")
    for key in ("attention.key_length", "attention.value_length"):
        metadata.get(key)
    if not metadata.varies("attention.head_count_kv"):
        metadata.get("attention.head_count_kv")
    key_dim = metadata.get("attention.key_length_mla") or metadata("attention.key_length")
    own = {
        "num_key_value_heads": options["num_attention_heads"],
        "q_lora_rank": metadata.get("attention.q_lora_rank"),
        "kv_lora_rank": metadata("attention.kv_lora_rank"),
        "head_dim": rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": key_dim - rotary_dim,
        "v_head_dim": metadata.get("attention.value_length_mla") or metadata("attention.value_length"),
    }
    if "rope_parameters" in options:
        own["rope_parameters"] = {
            name: value for name, value in options["rope_parameters"].items() if name != "partial_rotary_factor"
        }
    if not metadata.get("expert_count", 0):
        return own | {"first_k_dense_replace": metadata.num_layers}
    groups = metadata.get("expert_group_count", 1)
    return own | {
        "n_shared_experts": metadata.get("expert_shared_count", 0),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
    }


def _mistral_4(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    """Files lack the factor that scales queries by their position. It is the same for all models."""
    own = latent_sizes(metadata, options)
    return own | {
        "head_dim": own["qk_nope_head_dim"] + own["qk_rope_head_dim"],
        "rope_parameters": own["rope_parameters"] | scaled_by_position(metadata, options, 0.1),
    }


def _minicpm_3(metadata: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    rotary_dim = metadata("rope.dimension_count")
    plain = common["hidden_size"] // common["num_attention_heads"]
    return {
        "head_dim": rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": metadata("attention.key_length") - rotary_dim,
        "v_head_dim": metadata.get("attention.value_length", plain),
        "rope_parameters": {
            name: value for name, value in common["rope_parameters"].items() if name != "partial_rotary_factor"
        },
    }


LATENT: Sources = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": (
        "attn_kv_b",
        TensorSource(("attn_k_b", "attn_v_b"), expansion_of_latents, same, is_of_heads=True),
    ),
}


def deepseek(metadata: Metadata) -> Architecture:
    """Returns DeepSeek V2 or V3, by the function of routers. It is missing only in files older than other models."""
    has_bias, is_normed = metadata.has("exp_probs_b.bias"), bool(metadata.get("expert_weights_norm", False))
    gate = metadata.get("expert_gating_func") or (SIGMOID if has_bias else SOFTMAX)
    if metadata.get("expert_count", 0) and gate == SOFTMAX and not is_normed:
        return Architecture(model_type="deepseek_v2", sources=LATENT, config=latent_sizes, gate=SOFTMAX)
    if metadata.get("expert_count", 0) and gate != SIGMOID:
        raise ModelError(f"experts that are weighted so are not served: expert_gating_func {gate}, normed: {is_normed}")
    return Architecture(model_type="deepseek_v3", sources=LATENT, config=latent_sizes, gate=gate)


MIXTURES: dict[str, Architecture] = {
    "qwen2moe": Architecture(model_type="qwen2_moe", gate=SOFTMAX, fixed={"norm_topk_prob": False}),
    "olmoe": Architecture(model_type="olmoe", config=width_of_experts, gate=SOFTMAX, fixed={"norm_topk_prob": False}),
    "qwen3moe": Architecture(model_type="qwen3_moe", gate=SOFTMAX, fixed={"norm_topk_prob": True}),
    "qwen3vlmoe": Architecture(model_type="qwen3_moe", gate=SOFTMAX, fixed={"norm_topk_prob": True}, config=of_text),
    "gpt-oss": Architecture(
        model_type="gpt_oss",
        sources={
            "post_attention_layernorm": "post_attention_norm",
            "mlp.experts.gate_up_proj": TensorSource(("ffn_gate_exps", "ffn_up_exps"), _interleaved),
        },
        config=_gpt_oss,
        gate=SOFTMAX_OF_CHOSEN,
    ),
    "minimax-m2": Architecture(model_type="minimax_m2", config=width_of_experts, gate=SIGMOID),
    "granitemoe": Architecture(
        model_type="granitemoe",
        sources=PAIRED,
        config=lambda metadata, options: width_of_experts(metadata, options) | rotated_granite(metadata, options),
    ),
    "hunyuan-moe": Architecture(model_type="hunyuan_v1_moe", gate=SOFTMAX),
    "dots1": Architecture(
        model_type="dots1",
        config=lambda metadata, _: {"n_shared_experts": metadata("expert_shared_count")},
        gate=SIGMOID,
    ),
    "llama4": Architecture(
        model_type="llama4_text",
        config=_llama_4,
        gate=SIGMOID,
        own=("feed_forward_length",),
        fixed={"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True},
    ),
    "mistral4": Architecture(model_type="mistral4", sources=LATENT, config=_mistral_4, gate=SOFTMAX),
    "minicpm3": Architecture(
        model_type="minicpm3",
        sources=LATENT,
        config=_minicpm_3,
        # Files lack these, which all models have.
        fixed={"scale_emb": 12.0, "dim_model_base": 256, "scale_depth": 1.4},
    ),
    "mimo2": Architecture(
        model_type="mimo_v2_flash",
        config=_mimo_2,
        gate=SIGMOID,
        own=("attention.sliding_window",),
        fixed={"norm_topk_prob": True},
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe",
        # If a file says nothing, whole heads are rotated; transformers' default is half of a head.
        config=lambda metadata, _: {
            "use_qk_norm": metadata.has("attn_q_norm.weight"),
            "partial_rotary_factor": 1.0,
            "norm_topk_prob": _normed(metadata),
        },
        gate=SIGMOID,
    ),
    "bailingmoe2": Architecture(model_type="glm4_moe", config=_bailing_2, gate=SIGMOID),
    "mellum": Architecture(model_type="mellum", config=_mellum, gate=SOFTMAX, fixed={"norm_topk_prob": True}),
    "hy_v3": Architecture(
        model_type="hy_v3",
        sources={"mlp.e_score_correction_bias": ("exp_probs_b", "exp_probs_b.bias")},
        config=_hy_3,
        gate=SIGMOID,
    ),
    "laguna": Architecture(
        model_type="laguna",
        sources={"self_attn.g_proj": "attn_gate"},
        config=_laguna,
        gate=SIGMOID,
        own=("attention.head_count", "attention.sliding_window"),
    ),
    "ernie4_5-moe": Architecture(model_type="ernie4_5_moe", config=_ernie_moe, gate=SOFTMAX),
}
MIXTRAL = Architecture(model_type="mixtral", sources=PAIRED, gate=SOFTMAX)
