"""Weights that some decoders have and others lack, by their usual names within a layer: biases, the sinks of attention,
the corrections of routers. They follow from the type and the configuration, so a file that lacks one is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from diskprefix.model.families.type_table import LATENT, options_of

_NORMS, _HEAD_NORMS = r"(input|post_attention)_layernorm|norm", r"self_attn\.[qk]_norm"
_QUERIES, _OUT = r"self_attn\.(qkv|q|k|v)_proj", r"self_attn\.o_proj"
_ATTENTION = f"{_QUERIES}|{_OUT}"
_OF_LATENTS = rf"self_attn\.(q_a_proj|kv_a_proj_with_mqa)|{_OUT}"
_FEED_FORWARD = r"mlp\.(shared_experts\.)?(gate|up|down)_proj"
_SPACE, _SPACE_IN, _SPACE_OUT = r"mamba\.(in|out)_proj", r"mamba\.in_proj", r"mamba\.out_proj"
_NONE = r"(?!)"

_BY_OPTION: Mapping[str, str] = {
    "attention_bias": _ATTENTION,
    "attention_out_bias": _OUT,
    "qkv_bias": _QUERIES,
    "use_qkv_bias": _QUERIES,
    "enable_bias": f"{_ATTENTION}|{_FEED_FORWARD}",
    "use_bias": f"{_ATTENTION}|{_FEED_FORWARD}",
    "mlp_bias": _FEED_FORWARD,
    "conv_bias": r"conv\.(conv|in_proj|out_proj)",
    "mamba_conv_bias": r"mamba\.conv1d",
    "use_conv_bias": r"mamba\.conv1d",
    "mamba_proj_bias": _SPACE,
    "projectors_bias": _SPACE_OUT,
    "lm_head_bias": "lm_head",
}
"""The modules that have biases where a configuration says so."""
_WITH_QUERIES = "glm glm4 glm4_moe helium mimo_v2_flash seed_oss solar_open"
_OTHERWISE: Mapping[str, Mapping[str, str]] = {
    **{key: {"attention_bias": _QUERIES} for key in _WITH_QUERIES.split()},
    **{key: {"attention_bias": _OF_LATENTS} for key in LATENT.split()},
    "ernie4_5_moe": {"use_bias": f"{_ATTENTION}|{_FEED_FORWARD}|lm_head"},
    "falcon_h1": {"mamba_proj_bias": _SPACE_IN},
    "mamba2": {"use_bias": _SPACE},
    "nemotron_h": {"use_bias": _SPACE, "attention_bias": _NONE, "mamba_proj_bias": _NONE},
}
"""Types where the same options are about other modules."""
_ALWAYS: Mapping[str, str] = {
    **dict.fromkeys(("biogpt", "gpt2", "gpt_bigcode"), f"{_NORMS}|{_ATTENTION}|{_FEED_FORWARD}"),
    "gpt_neox": f"{_NORMS}|{_FEED_FORWARD}",
    "gpt_oss": r"mlp\.gate",
    "opt": _NORMS,
    "persimmon": f"{_NORMS}|{_HEAD_NORMS}|{_ATTENTION}|{_FEED_FORWARD}",
    "phi": f"{_NORMS}|{_HEAD_NORMS}|{_ATTENTION}|{_FEED_FORWARD}|lm_head",
    **dict.fromkeys(("jais2", "nemotron", "phimoe", "stablelm", "starcoder2"), _NORMS),
    **dict.fromkeys(("qwen2", "qwen2_vl_text", "qwen2_5_vl_text"), _QUERIES),
}
"""The modules that have biases in all models of a type."""

_SINKS = "flint gpt_oss granite_swa granitemoe_swa"
_CORRECTIONS = """
    afmoe axk1 deepseek_v3 dots1 ernie4_5_moe exaone_moe glm4_moe glm4_moe_lite hy_v3 kimi_linear kolibri1 laguna
    mimo_v2_flash minimax_m2 nemotron_h solar_open step3p5
"""
_OF_SOME: Mapping[str, str] = {"self_attn.sinks": _SINKS, "mlp.gate.e_score_correction_bias": _CORRECTIONS}


def modules_with_bias(config: Any) -> re.Pattern[str]:
    """Returns the pattern of the names of the modules of a decoder that have biases."""
    kind = config.model_type
    options = {**_BY_OPTION, **_OTHERWISE.get(kind, {})}
    # An option that the type does not have is one of another type.
    found = [modules for name, modules in options.items() if name in options_of(kind) and getattr(config, name)]
    return re.compile("|".join([_ALWAYS.get(kind, _NONE), *found]))


def has_tensor(config: Any, layer: str, name: str) -> bool:
    """Returns whether a decoder has a tensor in a layer, whose name is such as `layers.0.`."""
    kind = config.model_type
    if kind == "mimo_v2_flash" and name == "self_attn.sinks":
        # Layers with a window have them, and the draft layer has one.
        number = re.search(r"\d+", layer)
        return number is None or bool(config.layer_types[int(number[0])] == "sliding_attention")
    if kind == "lfm2_moe" and name == "mlp.gate.e_score_correction_bias":
        return bool(config.use_expert_bias)
    return kind in _OF_SOME[name].split() if name in _OF_SOME else True
