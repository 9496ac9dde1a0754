"""The models of Mistral AI."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from diskprefix.runtime.plan.families.types.derivations import FULL, SLIDING, layers_of
from diskprefix.runtime.plan.families.types.model_type import LATENTS, Experts, ModelType, Options, Rotation

MIXTRAL_FILES = ((r"\.block_sparse_moe\.", ".mlp."),)
"""How files of Mixtral, and of models after it, call mixtures."""
LATENT_EPSILONS = dict.fromkeys(("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"), 1e-6)
_SCALED: Mapping[str, Any] = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_ROTARY_4 = {**_SCALED, "rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}


def _window_in_all(own: Options, _: Options) -> list[str]:
    return [FULL if own["sliding_window"] is None else SLIDING for _ in layers_of(own)]


def _heads_in_parts(own: Options, _: Options) -> None:
    own["head_dim"] = own["qk_nope_head_dim"] + own["qk_rope_head_dim"]
    if own["rope_parameters"] is None:
        own["rope_parameters"] = deepcopy(_ROTARY_4)
    own["rope_parameters"].setdefault("partial_rotary_factor", own["qk_rope_head_dim"] / own["head_dim"])


MISTRAL = ModelType()
MINISTRAL = ModelType(layer_types=_window_in_all)
MINISTRAL3 = ModelType(
    rotary=Rotation(
        scales_queries=True,
        defaults={**_SCALED, "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384},
    )
)
MISTRAL4 = ModelType(
    rotary=Rotation(scales_queries=True),
    experts=Experts(),
    biases_by_option={"attention_bias": LATENTS},
    epsilons=LATENT_EPSILONS,
    derive=_heads_in_parts,
    derives=("head_dim",),
)
MIXTRAL = ModelType(experts=Experts(is_normed=True), published=MIXTRAL_FILES)
TYPES: Mapping[str, ModelType] = {
    "mistral": MISTRAL,
    "ministral": MINISTRAL,
    "ministral3": MINISTRAL3,
    "mistral4": MISTRAL4,
    "mixtral": MIXTRAL,
}
