"""The models of Microsoft: Phi, BitNet and BioGPT."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.runtime.plan.families.types.meta import OPT_NAMES
from diskprefix.runtime.plan.families.types.mistral import MIXTRAL_FILES
from diskprefix.runtime.plan.families.types.model_type import (
    ATTENTION,
    FEED_FORWARD,
    HEAD_NORMS,
    NORMS,
    Experts,
    ModelType,
    Rotation,
)
from diskprefix.runtime.plan.part_options import Gates, Norms

LAYER_NORMS = {"self_attn.q_norm": "self_attn.q_layernorm", "self_attn.k_norm": "self_attn.k_layernorm"}
PHI = ModelType(
    norms=Norms("layer"),
    is_gated=False,
    rotary=Rotation(partial=True, part=0.5),
    is_parallel=True,
    names={
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "self_attn.o_proj": "self_attn.dense",
        "norm": "final_layernorm",
        **LAYER_NORMS,
    },
    biases=f"{NORMS}|{HEAD_NORMS}|{ATTENTION}|{FEED_FORWARD}|lm_head",
    head_dim_undeclared=True,
)
PHI3 = ModelType(
    gates=Gates(is_joined=True),
    rotary=Rotation(
        partial=True,
        part=1.0,
        nests=False,
        renamed_kinds={"su": "longrope", "yarn": "longrope"},
        kinds=("default", "longrope"),
    ),
    joined="in_parts",
    head_dim_undeclared=True,
)
PHIMOE = ModelType(
    norms=Norms("layer"),
    rotary=Rotation(own_factors=True, kinds=("default", "longrope")),
    experts=Experts(scores="sparse_mixer"),
    names={"mlp.gate": "mlp.router"},
    published=(*MIXTRAL_FILES, (r"\.gate\.weight", ".router.weight")),
    biases=NORMS,
    head_dim_undeclared=True,
    only={"num_experts_per_tok": 2},
)
BITNET = ModelType(
    norms=Norms(inner=True),
    names={"self_attn.inner_norm": "self_attn.attn_sub_norm", "mlp.inner_norm": "mlp.ffn_sub_norm"},
    head_dim_undeclared=True,
)
BIOGPT = ModelType(
    norms=Norms("layer", 1e-5),
    is_gated=False,
    position_offset=2,
    names={"norm": "layer_norm", **OPT_NAMES},
    biases=f"{NORMS}|{ATTENTION}|{FEED_FORWARD}",
)
TYPES: Mapping[str, ModelType] = {"phi": PHI, "phi3": PHI3, "phimoe": PHIMOE, "bitnet": BITNET, "biogpt": BIOGPT}
