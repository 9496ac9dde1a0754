"""The mixtures of experts of models, from the record of a type and the options of a configuration."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from msgspec.structs import replace

from diskprefix.runtime.plan.config import MixtureConfig
from diskprefix.runtime.plan.families.declared import first_of, is_option, option
from diskprefix.runtime.plan.families.types.known_types import type_of
from diskprefix.runtime.plan.operands import Gating, Router


def mixture_of(config: Any, function: str) -> MixtureConfig | None:
    """Returns the mixture of a model, None if it has none. `function` is the activation of the model."""
    experts = type_of(config).experts
    if experts is None:
        return None
    first = partial(first_of, config)
    counts, groups = first("num_experts_per_tok moe_topk top_k_experts", 1), first("n_group", 1)
    if first("topk_method", "") == "greedy":
        groups = 1
    factors = "routed_scaling_factor router_scaling_factor moe_routed_scaling_factor moe_router_scaling_factor"
    router = Router(
        num_chosen=counts if isinstance(counts, int) else counts[0],
        scores=experts.scores,
        is_normed=first("norm_topk_prob", False) if experts.is_normed is None else experts.is_normed,
        floor=first("moe_norm_min", 1e-20) if experts.floor is None else experts.floor,
        factor=first(f"{factors} route_scale", 1.0),
        groups=groups,
        groups_chosen=first("topk_group", 1) if groups > 1 else 1,
        of_group=experts.of_group,
        softcap=first("moe_router_logit_softcapping", 0.0),
        threshold=2 * first("router_jitter_noise", 0.0),
    )
    if first("expert_selection_fn", "") == "softmax":
        router = replace(router, scores="softmax_of_chosen")
    gating = Gating(function, weighs_rows=experts.weighs_rows)
    if is_option(config.model_type, "swiglu_alpha"):
        gating = Gating("limited_silu", "limited_and_one", config.swiglu_alpha, config.swiglu_limit)
    counts_of_shared = "n_shared_experts num_shared_experts moe_num_shared_experts"
    widths_of_shared = "shared_intermediate_size shared_expert_intermediate_size"
    shared: Any = "plain" if first(f"{counts_of_shared} {widths_of_shared}", 0) else ""
    return MixtureConfig(
        router,
        gating,
        has_float_router=experts.float_router,
        reads_input=experts.reads_input,
        shared=shared if experts.shared is None else experts.shared,
        is_average=first("shared_expert_combination_strategy", "") == "average",
        has_latents=first("moe_latent_size", None) is not None,
        has_norm=experts.has_norm,
    )


def feed_forward_of(config: Any, layer: int) -> Literal["gated", "mixture", "gated plus mixture"]:
    """Returns the kind of the feed-forward part of a layer."""
    experts = type_of(config).experts
    if experts is None or not _has_mixture(config, layer):
        return "gated"
    return "gated plus mixture" if experts.added_to_gated else "mixture"


def _has_mixture(config: Any, layer: int) -> bool:
    if option(config, "num_local_experts") == 0:
        return False
    if is_option(config.model_type, "enable_moe_block"):
        return bool(config.enable_moe_block)
    if kinds := option(config, "mlp_layer_types"):
        return bool(kinds[layer] == "sparse")
    if (listed := option(config, "moe_layers")) is not None:
        return layer in listed
    first = option(config, "moe_layer_start_index", 0)
    last = option(config, "moe_layer_end_index", layer)
    interval = option(config, "moe_layer_interval", option(config, "decoder_sparse_step", 1))
    dense = option(config, "first_k_dense_replace") or option(config, "num_dense_layers") or first
    alone = option(config, "mlp_only_layers") or ()
    return bool(dense <= layer <= last and (layer + 1) % interval == 0 and layer not in alone)
