"""The models of IBM: Granite and Bamba."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.runtime.plan.families.types.derivations import LINEAR, all_of, first_of_each, state_space
from diskprefix.runtime.plan.families.types.model_type import SILU_ONLY, Experts, ModelType, Rotation
from diskprefix.runtime.plan.part_options import Gates

_NAMES = {
    "mlp": "block_sparse_moe",
    "mlp.gate": "block_sparse_moe.router",
    "mlp.gate_up_proj": "shared_mlp.input_linear",
    "mlp.down_proj": "shared_mlp.output_linear",
    "mlp.shared_experts": "shared_mlp",
    "mlp.shared_experts.gate_up_proj": "shared_mlp.input_linear",
    "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
}
_FILES = (
    (r"block_sparse_moe\.input_linear\.weight", "block_sparse_moe.experts.gate_up_proj"),
    (r"block_sparse_moe\.output_linear\.weight", "block_sparse_moe.experts.down_proj"),
    (r"block_sparse_moe\.router\.layer\.weight", "block_sparse_moe.router.weight"),
)
_EXPERTS = Experts(scores="softmax_of_chosen")
GRANITE = ModelType(head_dim_undeclared=True)
GRANITE_SWA = ModelType(sinks="all", head_dim_undeclared=True, layer_types=first_of_each(4))
GRANITEMOE = ModelType(experts=_EXPERTS, names=_NAMES, published=_FILES, head_dim_undeclared=True)
GRANITEMOE_SWA = ModelType(
    gates=Gates(is_joined=True),
    experts=_EXPERTS,
    names=_NAMES,
    sinks="all",
    head_dim_undeclared=True,
    layer_types=first_of_each(4),
)
GRANITEMOESHARED = ModelType(
    gates=Gates(is_joined=True), experts=_EXPERTS, names=_NAMES, published=_FILES, head_dim_undeclared=True
)
GRANITEMOEHYBRID = ModelType(
    gates=Gates(is_joined=True),
    experts=_EXPERTS,
    names=_NAMES,
    published=_FILES,
    head_dim_undeclared=True,
    derive=state_space,
    layer_types=all_of(LINEAR),
    only=SILU_ONLY,
)
BAMBA_NAMES = {"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward", "norm": "final_layernorm"}
BAMBA = ModelType(
    rotary=Rotation(partial=True, part=0.5, part_is_fixed=True),
    names=BAMBA_NAMES,
    head_dim_undeclared=True,
    derive=state_space,
    derives=("layers_block_type",),
    only=SILU_ONLY,
)
TYPES: Mapping[str, ModelType] = {
    "granite": GRANITE,
    "granite_swa": GRANITE_SWA,
    "granitemoe": GRANITEMOE,
    "granitemoe_swa": GRANITEMOE_SWA,
    "granitemoeshared": GRANITEMOESHARED,
    "granitemoehybrid": GRANITEMOEHYBRID,
    "bamba": BAMBA,
}
