"""The models of Tencent: Hunyuan."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.runtime.plan.families.types.deepseek import FLOAT_ROUTER
from diskprefix.runtime.plan.families.types.derivations import sparse_from
from diskprefix.runtime.plan.families.types.model_type import CORRECTION, Experts, ModelType, Rotation
from diskprefix.runtime.plan.part_options import Norms

_NAMES = {"self_attn.q_norm": "self_attn.query_layernorm", "self_attn.k_norm": "self_attn.key_layernorm"}
_NORMS = Norms(query_key="head", after_rotary=True)
HUNYUAN_DENSE = ModelType(norms=_NORMS, rotary=Rotation(takes_alpha=True), names=_NAMES)
HUNYUAN_MOE = ModelType(
    norms=_NORMS,
    rotary=Rotation(takes_alpha=True),
    experts=Experts(is_normed=True, float_router=True, shared="plain"),
    names={"mlp.gate": "mlp.gate.wg", "mlp.shared_experts": "mlp.shared_mlp", **_NAMES},
    in_float32=("gate.wg",),
)
HY_V3 = ModelType(
    norms=Norms(query_key="head"),
    experts=Experts(scores="sigmoid", is_normed=True, float_router=True, correction=True),
    names={CORRECTION: "mlp.e_score_correction_bias"},
    published=(
        (r"mlp\.router\.gate\.weight", "mlp.gate.weight"),
        (r"mlp\.expert_bias", "mlp.e_score_correction_bias"),
        (r"mlp\.shared_mlp\.", "mlp.shared_experts."),
    ),
    in_float32=FLOAT_ROUTER,
    mlp_layer_types=sparse_from("", 1),
)
TYPES: Mapping[str, ModelType] = {
    "hunyuan_v1_dense": HUNYUAN_DENSE,
    "hunyuan_v1_moe": HUNYUAN_MOE,
    "hy_v3": HY_V3,
}
