"""Architectures with recurrent layers: short convolutions, the gated delta rule, Mamba."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from diskprefix.runtime.files.gguf.architecture import Architecture
from diskprefix.runtime.files.gguf.dense_families import PAIRED, PLUS_ONE, granite_factors
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.files.gguf.mixture_families import LATENT, SIGMOID, SOFTMAX, latent_sizes
from diskprefix.runtime.files.gguf.sources import (
    Array,
    Sources,
    TensorSource,
    changed,
    grouped_after_keys,
    grouped_columns,
    grouped_heads,
    grouped_values,
    log_of_negative,
    minus_one,
    moved,
    same,
)


def _most_heads(metadata: Metadata, heads: Sequence[int]) -> int:
    """Returns the number of heads of layers with attention. Raises `ModelError` if they differ."""
    if len({*heads} - {0}) > 1:
        raise metadata.fault("attention.head_count_kv", "one number and zeros")
    return max(heads)


def _heads_by_layer(metadata: Metadata, _: dict[str, Any], other: str) -> dict[str, Any]:
    """Returns the kinds of layers. In the file, layers without attention have 0 heads."""
    heads = metadata.each_layer("attention.head_count_kv")
    return {
        "num_key_value_heads": _most_heads(metadata, heads),
        "layer_types": ["full_attention" if number else other for number in heads],
    }


DELTA: Sources = {
    **PLUS_ONE,
    "enorm": changed("nextn.enorm", minus_one),
    "hnorm": changed("nextn.hnorm", minus_one),
    "post_norm": (
        changed("nextn.shared_head_norm", minus_one),
        TensorSource(("output_norm",), values=minus_one, is_of_model=True),
    ),
    "linear_attn.in_proj_qkv": moved("attn_qkv", grouped_after_keys),
    "linear_attn.in_proj_z": moved("attn_gate", grouped_values),
    "linear_attn.in_proj_a": moved("ssm_alpha", grouped_heads),
    "linear_attn.in_proj_b": moved("ssm_beta", grouped_heads),
    "linear_attn.conv1d": moved("ssm_conv1d", grouped_after_keys),
    "linear_attn.norm": "ssm_norm",
    "linear_attn.A_log": changed("ssm_a", log_of_negative, grouped_heads),
    "linear_attn.dt_bias": moved("ssm_dt.bias", grouped_heads),
    "linear_attn.out_proj": TensorSource(("ssm_out",), columns=grouped_columns),
}
NEXT: Sources = {
    **DELTA,
    "linear_attn.in_proj_qkvz": TensorSource(("attn_qkv", "attn_gate"), lambda *rows: _by_key_head(*rows)),
    "linear_attn.in_proj_ba": "ssm_ba",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": changed("ssm_a", log_of_negative),
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.out_proj": "ssm_out",
}


def _delta(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """Layers that are not recurrent have attention. Without a list in the file, every fourth layer is one of them."""
    every, key = metadata.get("full_attention_interval", 4), "attention.recurrent_layers"
    plain = [(i + 1) % every != 0 for i in range(metadata.num_layers)]
    recurrent = metadata.each_layer(key) if key in metadata else plain
    return {"layer_types": ["linear_attention" if is_so else "full_attention" for is_so in recurrent]}


def _by_key_head(config: Any, both: Array, gates: Array) -> Array:
    """Returns the rows of queries, keys, values and gates grouped by key head. In files, the four are consecutive."""
    heads = config.linear_num_key_heads
    width = heads * config.linear_key_head_dim
    parts = both[:width], both[width : 2 * width], both[2 * width :], gates
    by_head = [part.reshape(heads, -1, *part.shape[1:]) for part in parts]
    return np.concatenate(by_head, axis=1).reshape(-1, *both.shape[1:])


def _qwen_3_5(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    positions = {"mrope_section": metadata.sections(), "mrope_interleaved": True}
    return _delta(metadata, options) | {"rope_parameters": options["rope_parameters"] | positions}


def _granite_hybrid(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    has_positions = metadata.scaling().get("finetuned", True)
    width = metadata("feed_forward_length")
    return (
        _heads_by_layer(metadata, options, "linear_attention")
        | granite_factors(metadata, options)
        | {
            "position_embedding_type": "rope" if has_positions else "nope",
            "intermediate_size": width,
            "shared_intermediate_size": metadata.get("expert_shared_feed_forward_length") or width,
        }
    )


def _nemotron_h(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """A layer has one part: attention, experts, gated products or Mamba."""
    heads, widths = metadata.each_layer("attention.head_count_kv"), metadata.each_layer("feed_forward_length")
    has_experts = [f"blk.{i}.ffn_gate_inp.weight" in metadata.tensors for i in range(metadata.num_layers)]
    kinds = [
        "full_attention" if number else "moe" if is_mixture else "mlp" if width else "linear_attention"
        for number, width, is_mixture in zip(heads, widths, has_experts, strict=True)
    ]
    plain = [width for width, is_mixture in zip(widths, has_experts, strict=True) if not is_mixture]
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": _most_heads(metadata, heads),
        "intermediate_size": max(plain, default=0) or max(widths),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
    }


_FALCON_ONES = ("lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
"""Factors of the model that the file's weights include."""


def _kimi(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    latent = latent_sizes(metadata, options)
    num_dense = latent.pop("first_k_dense_replace", metadata.get("leading_dense_block_count", 0))
    return (
        {name: value for name, value in latent.items() if name not in ("rope_parameters", "topk_method")}
        | _heads_by_layer(metadata, options, "linear_attention")
        | {
            "num_key_value_heads": options["num_attention_heads"],
            "mlp_layer_types": ["dense" if i < num_dense else "sparse" for i in range(metadata.num_layers)],
            "norm_topk_prob": metadata.get("expert_weights_norm", True),
            "linear_head_dim": metadata("kda.head_dim"),
            "linear_num_heads": options["num_attention_heads"],
        }
    )


def _convolutions(_: Any, *parts: Array) -> Array:
    """Returns the kernels of queries, keys and values. In files, each is [1, channels, 1, width]."""
    return np.concatenate([part.reshape(-1, part.shape[-1]) for part in parts])


KIMI: Sources = {
    **LATENT,
    "self_attn.conv1d": TensorSource(("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"), _convolutions, same),
    "self_attn.forget_gate.A_log": changed("ssm_a", log_of_negative),
    "self_attn.forget_gate.dt_bias": "ssm_dt.bias",
    "self_attn.forget_gate.f_a_proj": "ssm_f_a",
    "self_attn.forget_gate.f_b_proj": "ssm_f_b",
    "self_attn.b_proj": "ssm_beta",
    "self_attn.g_a_proj": "ssm_g_a",
    "self_attn.g_b_proj": "ssm_g_b",
    "self_attn.o_norm": "ssm_norm",
}

RECURRENT: dict[str, Architecture] = {
    "lfm2": Architecture(
        model_type="lfm2",
        config=partial(_heads_by_layer, other="conv"),
        # The width in the file is final; the configuration would change it.
        fixed={"block_auto_adjust_ff_dim": False},
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe",
        config=partial(_heads_by_layer, other="conv"),
        gate=SIGMOID,
        fixed={"norm_topk_prob": True},
    ),
    "qwen35": Architecture(model_type="qwen3_5_text", sources=DELTA, config=_qwen_3_5),
    "qwen35moe": Architecture(model_type="qwen3_5_moe_text", sources=DELTA, config=_qwen_3_5, gate=SOFTMAX),
    "granitehybrid": Architecture(model_type="granitemoehybrid", sources=PAIRED, config=_granite_hybrid),
    "nemotron_h": Architecture(
        model_type="nemotron_h", config=_nemotron_h, is_rotary=False, own=("feed_forward_length",)
    ),
    "nemotron_h_moe": Architecture(
        model_type="nemotron_h",
        config=_nemotron_h,
        gate=SIGMOID,
        is_rotary=False,
        own=("feed_forward_length",),
    ),
    "mamba2": Architecture(
        model_type="mamba2",
        config=lambda metadata, _: {"head_dim": metadata("ssm.inner_size") // metadata("ssm.time_step_rank")},
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next", sources=NEXT, config=_delta, gate=SOFTMAX, fixed={"norm_topk_prob": True}
    ),
    "falcon-h1": Architecture(
        model_type="falcon_h1",
        fixed={f"{name}_multiplier": 1.0 for name in _FALCON_ONES}
        | {"mlp_multipliers": [1.0, 1.0], "ssm_multipliers": [1.0] * 5},
    ),
    "kimi-linear": Architecture(model_type="kimi_linear", sources=KIMI, config=_kimi, gate=SIGMOID, is_rotary=False),
}
