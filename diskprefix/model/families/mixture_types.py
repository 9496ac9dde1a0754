"""The mixtures of experts of models, by their type in transformers, as far as their configurations do not say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from diskprefix.model.config import MixtureConfig
from diskprefix.model.plan import Gating, Router

_NOTHING: Mapping[str, Any] = {}
_SOFTMAX = "flex_olmo mellum olmoe qwen2_moe qwen3_moe"
_SOFTMAX_OF_CHOSEN = "gpt_oss granitemoe granitemoe_swa granitemoeshared"
_NORMED = "ernie4_5_moe hunyuan_v1_moe mixtral"
_SIGMOID = "deepseek_v3 dots1 exaone_moe glm4_moe glm4_moe_lite mimo_v2_flash solar_open"
_NORMED_SIGMOID = "afmoe hy_v3 laguna minimax_m2"
_BESIDE = ("gemma4_text",)
"""Those whose mixture is beside gated products."""

_ROUTERS: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(_SOFTMAX.split(), _NOTHING),
    **{name: {"scores": "softmax_of_chosen"} for name in _SOFTMAX_OF_CHOSEN.split()},
    **{name: {"is_normed": True} for name in _NORMED.split()},
    **{name: {"scores": "sigmoid"} for name in _SIGMOID.split()},
    **{name: {"scores": "sigmoid", "is_normed": True} for name in _NORMED_SIGMOID.split()},
    "llama4_text": {"scores": "sigmoid_of_chosen"},
    "deepseek_v2": {"of_group": 1},
    **{name: {"is_normed": True, "floor": 0.0} for name in _BESIDE},
}
"""The fields of `Router`."""

_FLOAT_ROUTERS = (*_SIGMOID.split(), "deepseek_v2", "ernie4_5_moe", "hunyuan_v1_moe", "hy_v3")
_SHARED: Mapping[str, Any] = {"hunyuan_v1_moe": "plain", "llama4_text": "plain", "qwen2_moe": "weighed"}


def mixture_of(config: Any, function: str) -> MixtureConfig | None:
    """Returns the mixture of a model, None if it has none. `function` is its activation."""
    name = config.model_type
    if name not in _ROUTERS:
        return None

    def first(names: str, default: Any) -> Any:
        return next((found for one in names.split() if (found := getattr(config, one, None)) is not None), default)

    counts, groups = first("num_experts_per_tok top_k_experts", 0), first("n_group", 1)
    if first("topk_method", "") == "greedy":
        groups = 1
    found = {
        "num_chosen": counts if isinstance(counts, int) else counts[0],
        "is_normed": first("norm_topk_prob", False),
        "floor": first("moe_norm_min", 1e-20),
        "factor": first("routed_scaling_factor router_scaling_factor moe_routed_scaling_factor route_scale", 1.0),
        "groups": groups,
        "groups_chosen": first("topk_group", 1) if groups > 1 else 1,
        "softcap": first("moe_router_logit_softcapping", 0.0),
    }
    of_shared = "n_shared_experts num_shared_experts moe_num_shared_experts shared_intermediate_size"
    gating = Gating(function, weighs_rows=name == "llama4_text")
    if hasattr(config, "swiglu_alpha"):
        gating = Gating("limited_silu", "limited_and_one", config.swiglu_alpha, config.swiglu_limit)
    return MixtureConfig(
        Router(**{**found, **_ROUTERS[name]}),
        gating,
        has_float_router=name in _FLOAT_ROUTERS,
        shared=_SHARED.get(name, "plain" if first(f"{of_shared} shared_expert_intermediate_size", 0) else ""),
    )


def feed_forward_of(config: Any, layer: int) -> Literal["gated", "mixture", "gated beside mixture"]:
    """Returns what follows attention in a layer."""
    if config.model_type in _ROUTERS and _has_mixture(config, layer):
        return "gated beside mixture" if config.model_type in _BESIDE else "mixture"
    return "gated"


def _has_mixture(config: Any, layer: int) -> bool:
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
