"""The models of Korean makers: LG (EXAONE), NAVER (HyperCLOVA X) and Upstage (Solar)."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.errors import ModelError
from diskprefix.runtime.plan.families.types.deepseek import FLOAT_ROUTER, V3_EXPERTS
from diskprefix.runtime.plan.families.types.derivations import every, sparse_from, unless_set
from diskprefix.runtime.plan.families.types.model_type import QUERIES, ModelType, Options, Rotation
from diskprefix.runtime.plan.part_options import Norms


def _exaone_layers(own: Options, extra: Options) -> list[str]:
    if own["sliding_window"] is None:
        raise ModelError("the configuration says neither a window nor the kinds of its layers")
    return every(("sliding_window_pattern", 4))(own, extra)


EXAONE4 = ModelType(
    norms=Norms(query_key="head"),
    norm_place="after",
    rotary=Rotation(windows_only=True),
    head_dim_undeclared=True,
    layer_types=_exaone_layers,
)
EXAONE_MOE = ModelType(
    norms=Norms(query_key="head"),
    rotary=Rotation(windows_only=True),
    experts=V3_EXPERTS,
    published=((r"mlp\.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),),
    in_float32=FLOAT_ROUTER,
    head_dim_undeclared=True,
    layer_types=_exaone_layers,
    mlp_layer_types=sparse_from("first_k_dense_replace", 0),
)
HYPERCLOVAX = ModelType(
    norm_place="around",
    multiplies_logits=True,
    names={
        "post_attention_layernorm": "post_norm1",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_norm2",
    },
    derive=unless_set("attention_multiplier", lambda own: own["head_dim"] ** -0.5),
)
SOLAR_OPEN = ModelType(
    rotary=Rotation(partial=True),
    experts=V3_EXPERTS,
    biases_by_option={"attention_bias": QUERIES},
    in_float32=FLOAT_ROUTER,
)
TYPES: Mapping[str, ModelType] = {
    "exaone4": EXAONE4,
    "exaone_moe": EXAONE_MOE,
    "hyperclovax": HYPERCLOVAX,
    "solar_open": SOLAR_OPEN,
}
