"""The models of Qwen (Alibaba)."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.runtime.plan.families.types.derivations import FULL, LINEAR, SLIDING, every, layers_of, windows_from_max
from diskprefix.runtime.plan.families.types.model_type import QUERIES, SILU_ONLY, Experts, ModelType, Options, Rotation
from diskprefix.runtime.plan.part_options import DeltaConfig, Gates, Norms


def _window_if_used(own: Options, _: Options) -> None:
    if not own["use_sliding_window"]:
        own["sliding_window"] = None


def _zero_unless_used(own: Options, _: Options) -> None:
    own["sliding_window"] = own["sliding_window"] if own["use_sliding_window"] else 0


def _no_window(own: Options, _: Options) -> None:
    own["sliding_window"] = None


def _every_second_window(own: Options, _: Options) -> list[str]:
    last = own["max_window_layers"] if own["use_sliding_window"] else 0
    return [SLIDING if (i + 1) % 2 and i < last else FULL for i in layers_of(own)]


QWEN2 = ModelType(
    biases=QUERIES, head_dim_undeclared=True, derive=_window_if_used, layer_types=windows_from_max, wide_keys=True
)
QWEN2_VL = ModelType(
    rotary=Rotation(
        sections=(16, 24, 24), sections_in_order=True, part_is_fixed=True, renamed_kinds={"mrope": "default"}
    ),
    biases=QUERIES,
    derive=_window_if_used,
    layer_types=windows_from_max,
    wide_keys=True,
)
_SHARED = {"mlp.shared_experts": "mlp.shared_expert"}
QWEN2_MOE = ModelType(
    experts=Experts(shared="weighed"),
    names=_SHARED,
    head_dim_undeclared=True,
    derive=_zero_unless_used,
    layer_types=_every_second_window,
    wide_keys=True,
)
QWEN3 = ModelType(norms=Norms(query_key="head"), derive=_window_if_used, layer_types=windows_from_max)
QWEN3_MOE = ModelType(
    norms=Norms(query_key="head"), experts=Experts(), head_dim_undeclared=True, derive=_window_if_used
)
QWEN3_VL = ModelType(norms=Norms(query_key="head"), rotary=Rotation(sections=(24, 20, 20)))
QWEN3_VL_MOE = ModelType(
    norms=Norms(query_key="head"),
    rotary=Rotation(sections=(24, 20, 20)),
    experts=Experts(is_normed=True),
    either_order=True,
    derive=_no_window,
    derives=("sliding_window",),
)
_NORMS = Norms("rms_plus_one", query_key="head")
_GATES = Gates(attention="sigmoid", is_in_query=True)
_LAYERS = every(("full_attention_interval", 4), LINEAR)
_DRAFT_LAYER = {"layer_types": FULL}
QWEN3_NEXT = ModelType(
    norms=_NORMS,
    gates=_GATES,
    rotary=Rotation(partial=True, part=0.25),
    experts=Experts(shared="weighed"),
    delta=DeltaConfig("by_key_heads"),
    names=_SHARED,
    layer_types=_LAYERS,
    draft_layer=_DRAFT_LAYER,
    only=SILU_ONLY,
)
QWEN3_5 = ModelType(
    norms=_NORMS,
    gates=_GATES,
    rotary=Rotation(partial=True, part=0.25, sections=(11, 11, 10)),
    delta=DeltaConfig("together"),
    layer_types=_LAYERS,
    draft_layer=_DRAFT_LAYER,
    only=SILU_ONLY,
)
QWEN3_5_MOE = ModelType(
    norms=_NORMS,
    gates=_GATES,
    rotary=Rotation(partial=True, part=0.25, sections=(11, 11, 10)),
    experts=Experts(is_normed=True, shared="weighed"),
    delta=DeltaConfig("together"),
    names=_SHARED,
    layer_types=_LAYERS,
    draft_layer=_DRAFT_LAYER,
    only=SILU_ONLY,
)
TYPES: Mapping[str, ModelType] = {
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_vl_text": QWEN3_VL,
    "qwen3_vl_moe_text": QWEN3_VL_MOE,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
}
