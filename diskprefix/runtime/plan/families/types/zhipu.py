"""The models of Zhipu (Z.ai): GLM."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.runtime.plan.families.types.deepseek import FLOAT_ROUTER, V3_EXPERTS
from diskprefix.runtime.plan.families.types.derivations import sparse_from
from diskprefix.runtime.plan.families.types.mistral import LATENT_EPSILONS
from diskprefix.runtime.plan.families.types.model_type import LATENTS, QUERIES, ModelType, Rotation
from diskprefix.runtime.plan.part_options import Gates

AROUND_NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
"""How GLM 4 calls the norms around the parts of a layer."""
GLM = ModelType(
    gates=Gates(is_joined=True),
    rotary=Rotation(interleaved=True, partial=True, part=0.5),
    biases_by_option={"attention_bias": QUERIES},
)
GLM4 = ModelType(
    norm_place="around",
    gates=Gates(is_joined=True),
    rotary=Rotation(interleaved=True, partial=True, part=0.5),
    names=AROUND_NAMES,
    biases_by_option={"attention_bias": QUERIES},
)
GLM4_MOE = ModelType(
    rotary=Rotation(partial=True, part=0.5),
    experts=V3_EXPERTS,
    biases_by_option={"attention_bias": QUERIES},
    in_float32=FLOAT_ROUTER,
    head_dim_undeclared=True,
    draft_layer={},
)
GLM4_MOE_LITE = ModelType(
    rotary=Rotation(partial=True),
    experts=V3_EXPERTS,
    biases_by_option={"attention_bias": LATENTS},
    in_float32=FLOAT_ROUTER,
    epsilons=LATENT_EPSILONS,
    mlp_layer_types=sparse_from("", 1),
    draft_layer={"mlp_layer_types": "sparse"},
)
TYPES: Mapping[str, ModelType] = {"glm": GLM, "glm4": GLM4, "glm4_moe": GLM4_MOE, "glm4_moe_lite": GLM4_MOE_LITE}
