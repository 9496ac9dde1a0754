"""Architectures whose layers are attention and a feed-forward part, alike in all layers or with windows in some."""

from __future__ import annotations

from typing import Any

from diskprefix.model.gguf.architecture import Architecture
from diskprefix.model.gguf.configuration import BASE
from diskprefix.model.gguf.metadata import Metadata
from diskprefix.model.gguf.sources import (
    Sources,
    attention_part,
    changed,
    minus_one,
    moved,
    paired_keys,
    paired_queries,
)

PAIRED: Sources = {
    "self_attn.q_proj": (moved("attn_q", paired_queries), attention_part(0, paired_queries)),
    "self_attn.k_proj": (moved("attn_k", paired_keys), attention_part(1, paired_keys)),
}
"""Rotary pairs of queries and keys lie side by side in files of Llama's kind."""


AROUND: Sources = {"post_attention_layernorm": "post_attention_norm"}
"""There is a norm behind attention, whether or not one stands before the feed-forward part."""
PLUS_ONE: Sources = {
    parameter: changed(tensor, minus_one)
    for parameter, tensor in {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "model.norm": "output_norm",
    }.items()
}
"""Norms that files have with one more than the model."""


def windows_and_all(metadata: Metadata, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the positions of models that have others in layers with a window."""
    windows = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", BASE)}
    return {"rope_parameters": {"sliding_attention": windows, "full_attention": found["rope_parameters"]}}


def _query_scale(metadata: Metadata, found: dict[str, Any], largest: int) -> dict[str, Any]:
    """Returns the scale of queries. In llama.cpp that of 27B parameters, with the `largest` layers, is another one."""
    is_largest = metadata.num_layers == largest
    plain = found["hidden_size"] // found["num_attention_heads"]
    return {"query_pre_attn_scalar": plain if is_largest else found["head_dim"]}


def _gemma_2(metadata: Metadata, found: dict[str, Any]) -> dict[str, Any]:
    """Older files lack the window and the caps."""
    return _query_scale(metadata, found, 46) | {
        "sliding_window": metadata.get("attention.sliding_window", 4096) or None,
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0) or None,
    }


def _gemma_3(metadata: Metadata, found: dict[str, Any]) -> dict[str, Any]:
    return _query_scale(metadata, found, 62) | windows_and_all(metadata, found)


def kinds_of_layers(metadata: Metadata, every: int = 0) -> list[str]:
    """Returns which layers have a window: those that the file says, or else all but each `every`th."""
    key = "attention.sliding_window_pattern"
    if metadata.is_array(key):
        pattern = metadata.each_layer(key)
    else:
        step = int(metadata.get(key, every))
        pattern = tuple(bool(step) and (i + 1) % step != 0 for i in range(metadata.num_layers))
    return ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


def windows_of_layers(metadata: Metadata, found: dict[str, Any]) -> list[str]:
    """Returns which layers have a window, if the file has one: as it says, or else all but each fourth."""
    if not found.get("sliding_window"):
        return ["full_attention"] * metadata.num_layers
    return kinds_of_layers(metadata, 4)


def _windows(metadata: Metadata, found: dict[str, Any]) -> dict[str, Any]:
    return {"layer_types": windows_of_layers(metadata, found)}


def of_text(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """Pictures are what else is put into the first layers."""
    metadata.get("n_deepstack_layers")
    return {}


def _stable_lm(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    return {
        "qk_layernorm": metadata.has("attn_q_norm.weight"),
        "use_parallel_residual": not metadata.has("ffn_norm.weight"),
    }


def _smol_lm_3(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """Each fourth layer has no positions."""
    return {"no_rope_layers": [int((i + 1) % 4 != 0) for i in range(metadata.num_layers)], "no_rope_layer_interval": 4}


def _logit_factor(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    return {"logit_scale": metadata("logit_scale")}


def granite_factors(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    return {"logits_scaling": metadata.get("logit_scale", 1.0), "attention_multiplier": metadata("attention.scale")}


def scaled_by_position(metadata: Metadata, found: dict[str, Any], default: float) -> dict[str, Any]:
    """Returns the parameters of positions by which queries are scaled, with `default` where a file has no factor."""
    original = metadata.scaling().get("original_context_length", found["max_position_embeddings"])
    return {
        "llama_4_scaling_beta": metadata.get("attention.temperature_scale", default),
        "original_max_position_embeddings": original,
    }


def _ministral(metadata: Metadata, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_parameters": found["rope_parameters"] | scaled_by_position(metadata, found, 0.0),
        "sliding_window": None,
    }


DENSE: dict[str, Architecture] = {
    "llama": Architecture(model_type="llama", sources=PAIRED),
    "mistral3": Architecture(model_type="ministral3", sources=PAIRED, config=_ministral),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen2vl": Architecture(model_type="qwen2"),
    "qwen3vl": Architecture(model_type="qwen3", config=of_text),
    "gemma2": Architecture(model_type="gemma2", sources=PLUS_ONE, config=_gemma_2),
    "gemma3": Architecture(model_type="gemma3_text", sources=PLUS_ONE, config=_gemma_3),
    "phi3": Architecture(model_type="phi3"),
    "glm4": Architecture(
        model_type="glm4",
        sources={"post_self_attn_layernorm": "post_attention_norm", "post_attention_layernorm": "ffn_norm"},
    ),
    "granite": Architecture(model_type="granite", sources=PAIRED, config=granite_factors),
    "olmo2": Architecture(model_type="olmo2", sources=AROUND),
    "exaone4": Architecture(model_type="exaone4", sources=AROUND, config=_windows),
    "ernie4_5": Architecture(model_type="ernie4_5"),
    "seed_oss": Architecture(
        model_type="seed_oss", config=lambda metadata, _: {"attention_bias": metadata.has("attn_q.bias")}
    ),
    "smollm3": Architecture(model_type="smollm3", sources=PAIRED, config=_smol_lm_3),
    "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense"),
    "command-r": Architecture(model_type="cohere", config=_logit_factor),
    "cohere2": Architecture(
        model_type="cohere2",
        config=lambda metadata, found: _logit_factor(metadata, found) | _windows(metadata, found),
    ),
    "starcoder2": Architecture(model_type="starcoder2"),
    "stablelm": Architecture(model_type="stablelm", config=_stable_lm),
}
OLMO_3 = Architecture(
    model_type="olmo3",
    sources=AROUND,
    config=lambda metadata, found: _windows(metadata, found) | windows_and_all(metadata, found),
)
"""Its files are called `olmo2`, and have a window."""
