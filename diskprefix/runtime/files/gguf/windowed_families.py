"""Architectures whose layers differ: some have a window, and most have mixtures of experts."""

from __future__ import annotations

from typing import Any

from diskprefix.errors import ModelError
from diskprefix.runtime.files.gguf.architecture import Architecture
from diskprefix.runtime.files.gguf.configuration import BASE
from diskprefix.runtime.files.gguf.dense_families import AROUND, PAIRED, granite_factors, kinds_of_layers
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.files.gguf.mixture_families import SIGMOID, SOFTMAX
from diskprefix.runtime.files.gguf.sources import joined

_EPSILONS = {"layer_norm_eps": "attention.layer_norm_epsilon", "rms_norm_eps": "attention.layer_norm_rms_epsilon"}


def _require_window(metadata: Metadata) -> None:
    if metadata("attention.sliding_window") <= 0:
        raise metadata.fault("attention.sliding_window", "a number of tokens")


def _listed_kinds(metadata: Metadata) -> list[str]:
    """Returns which layers have a window. Raises `ModelError` unless the file lists it: a number would mean another
    pattern than in other architectures."""
    key = "attention.sliding_window_pattern"
    if not metadata.is_array(key):
        metadata(key)
        raise metadata.fault(key, "an array with true or false for each block")
    return kinds_of_layers(metadata)


def _exaone_moe(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """Layers without a window have no positions."""
    _require_window(metadata)
    return {
        "layer_types": kinds_of_layers(metadata, 4),
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
    }


def _afmoe(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp gives positions to all but each fourth layer, whatever the windows are; the model, to those with a
    window."""
    _require_window(metadata)
    if not metadata.get("expert_weights_norm", False):
        raise ModelError("experts that are weighted so are not served: afmoe.expert_weights_norm is not true")
    kinds, pattern = kinds_of_layers(metadata, 4), "attention.sliding_window_pattern"
    if any((kind == "full_attention") != ((i + 1) % 4 == 0) for i, kind in enumerate(kinds)):
        raise metadata.fault(pattern, "a window in all layers but each fourth")
    return {"layer_types": kinds, "route_scale": metadata.get("expert_weights_scale", 1.0)}


def _cohere_2_moe(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """Norms are RMS norms if the file has an epsilon for them. Layers without a router are as wide as the file's
    feed-forward parts, and have positions."""
    _require_window(metadata)
    # The part of heads that rotates is checked with the plan.
    metadata.mark_read("rope.dimension_count")
    epsilons = {name: metadata.get(key) or None for name, key in _EPSILONS.items()}
    routers = [f"blk.{i}.ffn_gate_inp.weight" in metadata.tensors for i in range(metadata.num_layers)]
    return {
        "layer_norm_eps": epsilons["layer_norm_eps"] or epsilons["rms_norm_eps"],
        "rms_norm_eps": epsilons["rms_norm_eps"],
        "rope_theta": metadata.get("rope.freq_base", BASE),
        "intermediate_size": metadata("expert_feed_forward_length"),
        "prefix_dense_intermediate_size": metadata("feed_forward_length"),
        "layer_types": _listed_kinds(metadata),
        "mlp_layer_types": ["sparse" if has_router else "dense" for has_router in routers],
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", False)),
    }


def _granite_windows(metadata: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    """Files say which layers have a window, and which have positions."""
    _require_window(metadata)
    key = "attention.rope_pattern"
    rotated = metadata.each_layer(key) if key in metadata else (True,) * metadata.num_layers
    theta = common["rope_parameters"]["rope_theta"]
    return granite_factors(metadata, common) | {
        "layer_types": _listed_kinds(metadata),
        "layer_rope_theta": [theta if is_rotated else 0.0 for is_rotated in rotated],
    }


def _granite_windows_moe(metadata: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    width = metadata.get("expert_shared_feed_forward_length", 0)
    return _granite_windows(metadata, common) | {"shared_intermediate_size": width}


def _small_thinker(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """The first of each four layers has neither a window nor positions. Without windows all layers have positions."""
    count, key = metadata.num_layers, "attention.sliding_window_pattern"
    has_windows = metadata.get("attention.sliding_window", 0) > 0
    kinds = ["sliding_attention" if has_windows and i % 4 else "full_attention" for i in range(count)]
    if key in metadata and _listed_kinds(metadata) != kinds:
        raise metadata.fault(key, "a window in all layers but the first of each four")
    is_sigmoid = metadata("expert_gating_func") == SIGMOID
    return {"layer_types": kinds, "expert_selection_fn": "sigmoid" if is_sigmoid else "softmax"}


def small_thinker(metadata: Metadata) -> Architecture:
    """Returns SmallThinker, by how its routers weigh scores."""
    gate = SIGMOID if metadata.get("expert_gating_func") == SIGMOID else SOFTMAX
    return Architecture(model_type="smallthinker", config=_small_thinker, gate=gate, fixed={"hidden_act": "relu"})


WINDOWED: dict[str, Architecture] = {
    "exaone-moe": Architecture(model_type="exaone_moe", config=_exaone_moe, gate=SIGMOID),
    "afmoe": Architecture(
        model_type="afmoe",
        sources={
            **AROUND,
            "pre_mlp_layernorm": "ffn_norm",
            "self_attn.gate_proj": "attn_gate",
            "mlp.router.gate": "ffn_gate_inp",
            "mlp.expert_bias": "exp_probs_b.bias",
        },
        config=_afmoe,
        gate=SIGMOID,
        fixed={"mup_enabled": True},
    ),
    "cohere2moe": Architecture(
        model_type="cohere2_moe",
        config=_cohere_2_moe,
        gate=SIGMOID,
        own=("feed_forward_length", "expert_feed_forward_length"),
        fixed={"expert_selection_fn": "sigmoid"},
    ),
    "granite_swa": Architecture(model_type="granite_swa", sources=PAIRED, config=_granite_windows),
}
GRANITE_WINDOWS_MOE = Architecture(
    model_type="granitemoe_swa",
    sources={**PAIRED, "shared_mlp.input_linear": (joined("ffn_gate_shexp", "ffn_up_shexp"), "ffn_up_shexp")},
    config=_granite_windows_moe,
)
"""Its files are called `granite_swa`, and have experts. The gates and products of shared experts are one matrix."""
