"""The mixtures of experts of models, by their type in transformers, as far as their configurations do not say them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diskprefix.model.config import MixtureConfig
from diskprefix.model.plan import Router

_NOTHING: Mapping[str, Any] = {}

ROUTERS: Mapping[str, Mapping[str, Any]] = {
    "qwen3_moe": _NOTHING,
}
"""The fields of `Router`."""

MIXTURES: Mapping[str, Mapping[str, Any]] = {}
"""The fields of `MixtureConfig`."""


def mixture_of(config: Any) -> MixtureConfig | None:
    """Returns the mixture of a model, None if it has none."""
    name = config.model_type
    if name not in ROUTERS:
        return None

    def first(*names: str, default: Any) -> Any:
        return next((found for one in names if (found := getattr(config, one, None)) is not None), default)

    found = {
        "num_chosen": config.num_experts_per_tok,
        "is_normed": first("norm_topk_prob", default=False),
        "factor": first("routed_scaling_factor", default=1.0),
        "groups": first("n_group", default=1),
        "groups_chosen": first("topk_group", default=1),
    }
    return MixtureConfig(Router(**{**found, **ROUTERS[name]}), **MIXTURES.get(name, _NOTHING))


def has_mixture(config: Any, layer: int) -> bool:
    """Returns whether a layer has the mixture of its model."""
    kinds = getattr(config, "mlp_layer_types", None)
    if kinds:
        return bool(kinds[layer] == "sparse")
    dense = getattr(config, "mlp_only_layers", None) or ()
    return (
        config.model_type in ROUTERS
        and layer not in dense
        and layer >= (getattr(config, "first_k_dense_replace", None) or 0)
        and (layer + 1) % getattr(config, "decoder_sparse_step", 1) == 0
    )
