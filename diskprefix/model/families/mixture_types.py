"""The mixtures of experts of models, by their type in transformers, as far as their configurations do not say them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from diskprefix.model.config import MixtureConfig
from diskprefix.model.operands import Gating, Router

_NOTHING: Mapping[str, Any] = {}
_SOFTMAX = "flex_olmo mellum mistral4 olmoe qwen2_moe qwen3_moe qwen3_next"
_SOFTMAX_OF_CHOSEN = "aria_text gpt_oss granitemoe granitemoe_swa granitemoehybrid granitemoeshared"
_NORMED = "ernie4_5_moe hunyuan_v1_moe mixtral qwen3_5_moe_text qwen3_vl_moe_text"
_SIGMOID = (
    "axk1 deepseek_v3 dots1 exaone_moe flint glm4_moe glm4_moe_lite kimi_linear mimo_v2_flash nemotron_h solar_open"
)
_NORMED_SIGMOID = "afmoe hy_v3 laguna minimax_m2 step3p5"
_BESIDE = ("gemma4_text",)
"""Those whose mixture is beside gated products."""

_ROUTERS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(_SOFTMAX.split(), _NOTHING),
    **{name: {"scores": "softmax_of_chosen"} for name in _SOFTMAX_OF_CHOSEN.split()},
    **{name: {"is_normed": True} for name in _NORMED.split()},
    **{name: {"scores": "sigmoid"} for name in _SIGMOID.split()},
    **{name: {"scores": "sigmoid", "is_normed": True} for name in _NORMED_SIGMOID.split()},
    **{name: {"scores": "sigmoid_of_chosen"} for name in ("cohere2_moe", "kolibri1", "llama4_text")},
    "phimoe": {"scores": "sparse_mixer"},
    "deepseek_v2": {"of_group": 1},
    **{name: {"is_normed": True, "floor": 0.0} for name in _BESIDE},
    "lfm2_moe": {"scores": "sigmoid", "floor": 1e-6},
}
"""The fields of `Router`."""

_FLOAT_ROUTERS = (*_SIGMOID.split(), "deepseek_v2", "ernie4_5_moe", "hunyuan_v1_moe", "hy_v3", "kolibri1")
_SHARED: Mapping[str, Any] = {
    **dict.fromkeys(("hunyuan_v1_moe", "llama4_text", "step3p5"), "plain"),
    "nemotron_h": "ungated",
    **dict.fromkeys(("qwen2_moe", "qwen3_5_moe_text", "qwen3_next"), "weighed"),
}


def first_of(config: Any, names: str, default: Any) -> Any:
    """Returns the first field of these names that says something."""
    return next((found for one in names.split() if (found := getattr(config, one, None)) is not None), default)


def mixture_of(config: Any, function: str) -> MixtureConfig | None:
    """Returns the mixture of a model, None if it has none. `function` is its activation."""
    name = config.model_type
    if name not in _ROUTERS:
        return None
    first = partial(first_of, config)
    counts, groups = first("num_experts_per_tok moe_topk top_k_experts", 1), first("n_group", 1)
    if first("topk_method", "") == "greedy":
        groups = 1
    of_factor = "routed_scaling_factor router_scaling_factor moe_routed_scaling_factor"
    found = {
        "num_chosen": counts if isinstance(counts, int) else counts[0],
        "is_normed": first("norm_topk_prob", False),
        "floor": first("moe_norm_min", 1e-20),
        "factor": first(f"{of_factor} moe_router_scaling_factor route_scale", 1.0),
        "threshold": 2 * first("router_jitter_noise", 0.0),
        "groups": groups,
        "groups_chosen": first("topk_group", 1) if groups > 1 else 1,
        "softcap": first("moe_router_logit_softcapping", 0.0),
    }
    of_shared = "n_shared_experts num_shared_experts moe_num_shared_experts shared_intermediate_size"
    gating = Gating(function, weighs_rows=name == "llama4_text")
    if hasattr(config, "swiglu_alpha"):
        gating = Gating("limited_silu", "limited_and_one", config.swiglu_alpha, config.swiglu_limit)
    routers = _ROUTERS[name]
    if first("expert_selection_fn", "") == "softmax":
        routers = {"scores": "softmax_of_chosen"}
    return MixtureConfig(
        Router(**{**found, **routers}),
        gating,
        has_float_router=name in _FLOAT_ROUTERS,
        shared=_SHARED.get(name, "plain" if first(f"{of_shared} shared_expert_intermediate_size", 0) else ""),
        is_average=first("shared_expert_combination_strategy", "") == "average",
        has_latents=first("moe_latent_size", None) is not None,
        has_norm=name == "axk1",
    )


def feed_forward_of(config: Any, layer: int) -> Literal["gated", "mixture", "gated beside mixture"]:
    """Returns what follows attention in a layer."""
    if config.model_type in _ROUTERS and _has_mixture(config, layer):
        return "gated beside mixture" if config.model_type in _BESIDE else "mixture"
    return "gated"


def _has_mixture(config: Any, layer: int) -> bool:
    if getattr(config, "num_local_experts", None) == 0:
        return False
    if hasattr(config, "enable_moe_block"):
        return bool(config.enable_moe_block)
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds:
        return bool(kinds[layer] == "sparse")
    if getattr(config, "moe_layers", None) is not None:
        return layer in config.moe_layers
    first = getattr(config, "moe_layer_start_index", 0)
    last = getattr(config, "moe_layer_end_index", layer)
    interval = getattr(config, "moe_layer_interval", getattr(config, "decoder_sparse_step", 1))
    dense = getattr(config, "first_k_dense_replace", None) or getattr(config, "num_dense_layers", None) or first
    alone = getattr(config, "mlp_only_layers", None) or ()
    return dense <= layer <= last and (layer + 1) % interval == 0 and layer not in alone
