"""Gemma 3n and 4: windows in most layers, layers that share keys and values, inputs of each layer. Gemma 4 has heads of
two widths. Gemma 3n has four streams: a layer computes one and predicts the others."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

from diskprefix.errors import ModelError
from diskprefix.runtime.files.gguf.architecture import Architecture
from diskprefix.runtime.files.gguf.configuration import BASE
from diskprefix.runtime.files.gguf.dense_families import AROUND, kinds_of_layers, windows_and_all
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.files.gguf.names import NAMES
from diskprefix.runtime.files.gguf.sources import Sources, TensorSource, moved

_FREQUENCIES = "rope_freqs.weight"
_OF_SHARED = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
"""Files may have these tensors in layers that share keys and values with other layers."""

_SOURCES_OF_4: Sources = {
    **AROUND,
    "layer_scalar": "layer_output_scale.weight",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": NAMES["mlp.experts.gate_up_proj"],
    "experts.down_proj": "ffn_down_exps",
}


def _gemma_4(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    metadata.each_layer("attention.sliding_window_pattern")
    kinds = kinds_of_layers(metadata)
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    windowed = [i for i, kind in enumerate(kinds) if kind != "full_attention"]
    heads, widths = metadata.each_layer("attention.head_count_kv"), metadata.each_layer("feed_forward_length")
    if not full or not windowed:
        raise ModelError("Gemma 4 has layers with a window and layers without one")
    if not {*widths} <= {widths[0], 2 * widths[0]}:
        raise metadata.fault("feed_forward_length", "one width, and twice as much")
    own_values = f"blk.{full[0]}.attn_v.weight" in metadata.tensors
    metadata.get("attention.value_length_swa")
    return {
        "layer_types": kinds,
        "num_key_value_heads": heads[windowed[0]],
        "num_global_key_value_heads": None if own_values else heads[full[0]],
        "attention_k_eq_v": not own_values,
        "head_dim": metadata("attention.key_length_swa"),
        "global_head_dim": metadata("attention.key_length"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0) or None,
        "vocab_size_per_layer_input": metadata.num_rows("per_layer_token_embd.weight"),
        "enable_moe_block": bool(metadata.get("expert_count", 0)),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", BASE)},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": metadata.get("rope.freq_base", BASE),
                "partial_rotary_factor": _rotated(metadata),
            },
        },
    }


def _rotated(metadata: Metadata) -> float:
    """Returns the rotated part of a head in layers without a window: where the frequencies' divisor is one."""
    tensor = metadata.tensors.get(_FREQUENCIES)
    if tensor is None:
        return 1.0
    divisors = tensor.content()
    count = int((divisors == 1).sum())
    if not ((divisors[:count] == 1).all() and (divisors[count:] > 1e20).all()):
        raise ModelError(f"{_FREQUENCIES} scales frequencies in a way that is not known")
    return count / len(divisors)


GEMMA_4 = Architecture(
    model_type="gemma4_text",
    sources=_SOURCES_OF_4,
    config=_gemma_4,
    own=("feed_forward_length",),
    unused=(_FREQUENCIES, *_OF_SHARED),
)


_NUM_STREAMS = 4


def _stream(tensor: str, i: int) -> TensorSource:
    return moved(tensor, lambda _, streams: streams[i])


_SOURCES_OF_3N: Sources = {
    **AROUND,
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
    **{f"model.altup_projections.{i}": _stream("altup_proj", i) for i in range(_NUM_STREAMS - 1)},
    **{f"model.altup_unembed_projections.{i}": _stream("altup_unembd_proj", i) for i in range(_NUM_STREAMS - 1)},
}


def _gemma_3n(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    """Older files lack the cap. Files give sparsity in standard deviations, minus infinity for a layer without it;
    configurations give a fraction."""
    deviations = metadata.each_layer("activation_sparsity_scale", -math.inf)
    if metadata("altup.num_inputs") != _NUM_STREAMS:
        raise ModelError(f"Gemma 3n has {_NUM_STREAMS} streams: altup.num_inputs is {metadata('altup.num_inputs')}")
    return windows_and_all(metadata, options) | {
        "layer_types": kinds_of_layers(metadata, 5),
        "intermediate_size": list(metadata.each_layer("feed_forward_length")),
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0),
        "activation_sparsity_pattern": [round(NormalDist().cdf(deviation), 6) for deviation in deviations],
        "altup_active_idx": metadata("altup.active_idx"),
        "altup_num_inputs": _NUM_STREAMS,
        "laurel_rank": metadata.num_rows("blk.0.laurel_l.weight"),
        "num_kv_shared_layers": metadata("attention.shared_kv_layers"),
        "vocab_size_per_layer_input": metadata.num_rows("per_layer_token_embd.weight"),
    }


GEMMA_3N = Architecture(
    model_type="gemma3n_text", sources=_SOURCES_OF_3N, config=_gemma_3n, own=("feed_forward_length",), unused=_OF_SHARED
)
