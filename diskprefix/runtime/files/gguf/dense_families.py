"""Architectures whose layers are attention and a feed-forward part. Some layers may have windows."""

from __future__ import annotations

from typing import Any

from diskprefix.runtime.files.gguf.architecture import Architecture
from diskprefix.runtime.files.gguf.configuration import BASE
from diskprefix.runtime.files.gguf.metadata import SCALING, Metadata
from diskprefix.runtime.files.gguf.sources import (
    Array,
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
"""In files of Llama's kind, the rotary pairs of queries and keys are interleaved."""


AROUND: Sources = {"post_attention_layernorm": "post_attention_norm"}
"""There is a norm after attention, whether or not there is one before the feed-forward part."""
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
"""Norms whose weights in files are the model's weights plus 1."""
XIELU = ("alpha_p", "alpha_n", "beta", "eps")
"""The numbers of the activation of Apertus, which files have as metadata."""
WEIGHTS_PLUS_ONE: Sources = {
    f"{parameter}.weight": changed(tensor, minus_one)
    for parameter, tensor in {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "model.norm": "output_norm",
    }.items()
}
"""Norms whose weights in files are the model's weights plus 1, and whose biases are the model's."""


def _by_head(config: Any, both: Array) -> Array:
    """Returns the queries, keys and values of each head. The file has all queries, then all keys and all values."""
    return both.reshape(3, config.num_attention_heads, -1, *both.shape[1:]).swapaxes(0, 1).reshape(both.shape)


NEOX: Sources = {
    **{f"{model}.embed_in": "token_embd" for model in ("model", "gpt_neox")},
    **{f"{model}.final_layer_norm": "output_norm" for model in ("model", "gpt_neox")},
    "post_attention_layernorm": "ffn_norm",
    "attention.query_key_value": moved("attn_qkv", _by_head),
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}


def windows_and_all(metadata: Metadata, options: dict[str, Any], base: float = BASE) -> dict[str, Any]:
    """Returns the rotary parameters of models whose layers with a window have their own, with `base` if the file has
    none for them."""
    windows = {"rope_type": "default", "rope_theta": metadata.get("rope.freq_base_swa", base)}
    return {"rope_parameters": {"sliding_attention": windows, "full_attention": options["rope_parameters"]}}


def _query_scale(metadata: Metadata, options: dict[str, Any], largest: int) -> dict[str, Any]:
    """Returns the scale of queries. As in llama.cpp, the model with `largest` layers (27B parameters) has another
    one."""
    is_largest = metadata.num_layers == largest
    plain = options["hidden_size"] // options["num_attention_heads"]
    return {"query_pre_attn_scalar": plain if is_largest else options["head_dim"]}


def _gemma_2(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    """Older files lack the window and the caps."""
    return _query_scale(metadata, options, 46) | {
        "sliding_window": metadata.get("attention.sliding_window", 4096) or None,
        "attn_logit_softcapping": metadata.get("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": metadata.get("final_logit_softcapping", 30.0) or None,
    }


def _gemma_3(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    return _query_scale(metadata, options, 62) | windows_and_all(metadata, options)


def kinds_of_layers(metadata: Metadata, every: int = 0) -> list[str]:
    """Returns the kinds of layers: windows as in the file, or else in all layers except every `every`th."""
    key = "attention.sliding_window_pattern"
    if metadata.is_array(key):
        pattern = metadata.each_layer(key)
    else:
        step = int(metadata.get(key, every))
        pattern = tuple(bool(step) and (i + 1) % step != 0 for i in range(metadata.num_layers))
    return ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


def windows_of_layers(metadata: Metadata, options: dict[str, Any]) -> list[str]:
    """Returns the kinds of layers. If the file has a window: as in the file, or else all layers except every fourth."""
    if not options.get("sliding_window"):
        return ["full_attention"] * metadata.num_layers
    return kinds_of_layers(metadata, 4)


def _windows(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    return {"layer_types": windows_of_layers(metadata, options)}


def _exaone_4(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    """The model with 64 layers (32B parameters) has a window, whether or not the file says so."""
    if metadata.num_layers == 64 and "attention.sliding_window" not in metadata:
        return {"layer_types": kinds_of_layers(metadata, 4), "sliding_window": 4096}
    return _windows(metadata, options)


def of_text(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """Accepts the number of encoder levels, which matters for pictures only."""
    metadata.get("n_deepstack_layers")
    return {}


def _stable_lm(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    return {
        "qk_layernorm": metadata.has("attn_q_norm.weight"),
        "use_parallel_residual": not metadata.has("ffn_norm.weight"),
    }


def _smol_lm_3(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    """Every fourth layer has no rotary embedding."""
    return {"no_rope_layers": [int((i + 1) % 4 != 0) for i in range(metadata.num_layers)], "no_rope_layer_interval": 4}


def _logit_factor(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    return {"logit_scale": metadata("logit_scale")}


def rotated_granite(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the factors of Granite. Raises `ModelError` for a file that says that nothing rotates, as only those of
    models with Mamba do."""
    if not metadata.scaling().get("finetuned", True):
        raise metadata.fault(f"{SCALING}finetuned", "true: a model without positions is not served")
    return granite_factors(metadata, options)


def granite_factors(metadata: Metadata, _: dict[str, Any]) -> dict[str, Any]:
    return {"logits_scaling": metadata.get("logit_scale", 1.0), "attention_multiplier": metadata("attention.scale")}


def scaled_by_position(metadata: Metadata, options: dict[str, Any], default: float) -> dict[str, Any]:
    """Returns the rotary parameters that scale queries by their position. A missing factor is `default`."""
    original = metadata.scaling().get("original_context_length", options["max_position_embeddings"])
    return {
        "llama_4_scaling_beta": metadata.get("attention.temperature_scale", default),
        "original_max_position_embeddings": original,
    }


def _ministral(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "rope_parameters": options["rope_parameters"] | scaled_by_position(metadata, options, 0.0),
        "sliding_window": None,
    }


DENSE: dict[str, Architecture] = {
    "llama": Architecture(model_type="llama", sources=PAIRED),
    "arcee": Architecture(model_type="arcee", sources=PAIRED),
    "apertus": Architecture(
        model_type="apertus",
        sources={f"mlp.act_fn.{name}": f"xielu.{name}" for name in XIELU},
        listed={f"xielu.{name}": f"xielu.{name}" for name in XIELU},
    ),
    "mistral3": Architecture(model_type="ministral3", sources=PAIRED, config=_ministral),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen2vl": Architecture(model_type="qwen2"),
    "qwen3vl": Architecture(model_type="qwen3", config=of_text),
    "gemma": Architecture(
        model_type="gemma", sources={**PLUS_ONE, "post_attention_layernorm": changed("ffn_norm", minus_one)}
    ),
    "gemma2": Architecture(model_type="gemma2", sources=PLUS_ONE, config=_gemma_2),
    "gemma3": Architecture(model_type="gemma3_text", sources=PLUS_ONE, config=_gemma_3),
    "phi3": Architecture(model_type="phi3"),
    "glm4": Architecture(
        model_type="glm4",
        sources={"post_self_attn_layernorm": "post_attention_norm", "post_attention_layernorm": "ffn_norm"},
    ),
    "granite": Architecture(model_type="granite", sources=PAIRED, config=rotated_granite),
    "olmo2": Architecture(model_type="olmo2", sources=AROUND),
    "exaone4": Architecture(model_type="exaone4", sources=AROUND, config=_exaone_4),
    "ernie4_5": Architecture(model_type="ernie4_5"),
    "seed_oss": Architecture(
        model_type="seed_oss", config=lambda metadata, _: {"attention_bias": metadata.has("attn_q.bias")}
    ),
    "smollm3": Architecture(model_type="smollm3", sources=PAIRED, config=_smol_lm_3),
    "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense"),
    "command-r": Architecture(model_type="cohere", config=_logit_factor),
    "cohere2": Architecture(
        model_type="cohere2",
        config=lambda metadata, options: _logit_factor(metadata, options) | _windows(metadata, options),
    ),
    "chatglm": Architecture(model_type="glm"),
    "jais2": Architecture(model_type="jais2"),
    # Its files are of models with this activation, which llama.cpp has for all of them.
    "bitnet": Architecture(model_type="bitnet", fixed={"hidden_act": "silu"}),
    "nemotron": Architecture(model_type="nemotron", sources=WEIGHTS_PLUS_ONE),
    "phi2": Architecture(model_type="phi"),
    "gptneox": Architecture(
        model_type="gpt_neox",
        sources=NEOX,
        config=lambda metadata, _: {"use_parallel_residual": bool(metadata("use_parallel_residual"))},
    ),
    "starcoder2": Architecture(model_type="starcoder2"),
    "stablelm": Architecture(model_type="stablelm", config=_stable_lm),
}


def _olmo_3(metadata: Metadata, options: dict[str, Any]) -> dict[str, Any]:
    """Files of models whose layers have one base lack the base of layers with a window."""
    base = options["rope_parameters"]["rope_theta"]
    return _windows(metadata, options) | windows_and_all(metadata, options, base)


OLMO_3 = Architecture(model_type="olmo3", sources=AROUND, config=_olmo_3)
"""Its files have the architecture `olmo2`, and a window."""
