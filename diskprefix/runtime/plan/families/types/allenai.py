"""The models of Ai2: OLMo."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.runtime.plan.families.types.derivations import FULL, LINEAR, every, layers_of
from diskprefix.runtime.plan.families.types.model_type import (
    SILU_ONLY,
    Experts,
    ModelType,
    Options,
    Rotation,
    WholeType,
)
from diskprefix.runtime.plan.part_options import DeltaConfig, Norms


def _delta_sizes(own: Options, _: Options) -> None:
    heads = own["num_attention_heads"]
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        own[name] = heads if own[name] is None else own[name]
    if own["linear_key_head_dim"] is None:
        own["linear_key_head_dim"] = int(0.75 * own["hidden_size"] / own["linear_num_key_heads"])
    if own["linear_value_head_dim"] is None:
        own["linear_value_head_dim"] = 2 * own["linear_key_head_dim"]


def _each_fourth_full(own: Options, _: Options) -> list[str]:
    kinds = [FULL if i % 4 == 3 else LINEAR for i in layers_of(own)]
    return kinds if FULL in kinds else [*kinds[:-1], FULL]


_NORMS = Norms("rms_unrounded", query_key="row")
OLMO = ModelType(norms=Norms("layer"), unweighted_norms=True, head_dim_undeclared=True)
OLMO2 = ModelType(norms=_NORMS, norm_place="after", head_dim_undeclared=True)
OLMO3 = ModelType(
    norms=_NORMS,
    norm_place="after",
    rotary=Rotation(bases=(5e5, 5e5)),
    head_dim_undeclared=True,
    layer_types=every(4),
)
OLMO_HYBRID = ModelType(
    norms=_NORMS,
    norm_place="after",
    delta=DeltaConfig("apart"),
    names={
        "linear_attn.in_proj_z": "linear_attn.g_proj",
        "linear_attn.in_proj_a": "linear_attn.a_proj",
        "linear_attn.in_proj_b": "linear_attn.b_proj",
        "linear_attn.norm": "linear_attn.o_norm",
        "linear_attn.out_proj": "linear_attn.o_proj",
    },
    published=(
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    ),
    in_float32=("A_log",),
    epsilons={"linear_attn.norm": 1e-5},
    head_dim_undeclared=True,
    derive=_delta_sizes,
    layer_types=_each_fourth_full,
    only=SILU_ONLY,
)
OLMOE = ModelType(norms=Norms(query_key="row"), experts=Experts(), head_dim_undeclared=True)
FLEX_OLMO = ModelType(norms=_NORMS, norm_place="after", experts=Experts(), head_dim_undeclared=True)
TYPES: Mapping[str, ModelType] = {
    "olmo": OLMO,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "olmo_hybrid": OLMO_HYBRID,
    "olmoe": OLMOE,
    "flex_olmo": FLEX_OLMO,
}
WHOLES: Mapping[str, WholeType] = {"molmo2": WholeType(pictures="otherwise")}
"""All pictures of a prompt count as one."""
