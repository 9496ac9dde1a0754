"""The models of Cohere: Command."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.runtime.plan.families.types.derivations import (
    FULL,
    SLIDING,
    all_of,
    every,
    heads_of_width,
    layers_of,
    sparse_from,
)
from diskprefix.runtime.plan.families.types.model_type import Experts, ModelType, Options, Rotation
from diskprefix.runtime.plan.part_options import Norms


def _rotary_in_options(own: Options, extra: Options) -> None:
    own["rope_parameters"] = extra.pop("rope_parameters", None) or {"rope_theta": own["rope_theta"]}


def _windows_of_dense_and_sparse(own: Options, extra: Options) -> list[str]:
    dense = extra.get("first_k_dense_replace", 0)
    steps = own["prefix_dense_sliding_window_pattern"], own["sliding_window_pattern"]
    steps_by_layer = [(i, steps[0]) for i in range(dense)]
    steps_by_layer += [(i, steps[1]) for i in range(len(layers_of(own)) - dense)]
    return [SLIDING if (i + 1) % step else FULL for i, step in steps_by_layer]


_NORMS = Norms("layer")
COHERE = ModelType(norms=_NORMS, rotary=Rotation(interleaved=True), is_parallel=True, head_dim_undeclared=True)
COHERE2 = ModelType(
    norms=_NORMS,
    rotary=Rotation(interleaved=True, windows_only=True),
    is_parallel=True,
    derive=heads_of_width,
    derives=("head_dim",),
    layer_types=every(("sliding_window_pattern", 4)),
)
COHERE2_MOE = ModelType(
    norms=_NORMS,
    rotary=Rotation(interleaved=True, windows_only=True),
    experts=Experts(scores="sigmoid_of_chosen"),
    is_parallel=True,
    rms_by_epsilon=True,
    derive=_rotary_in_options,
    derives=("rope_parameters",),
    layer_types=_windows_of_dense_and_sparse,
    mlp_layer_types=sparse_from("first_k_dense_replace", 0),
)
COHERE_COMPASS = ModelType(
    norms=_NORMS,
    rotary=Rotation(sections=(24, 20, 20), older_names=False, one_for_all=True),
    is_parallel=True,
    derive=heads_of_width,
    derives=("head_dim",),
    layer_types=all_of(FULL),
)
TYPES: Mapping[str, ModelType] = {
    "cohere": COHERE,
    "cohere2": COHERE2,
    "cohere2_moe": COHERE2_MOE,
    "cohere_compass_text": COHERE_COMPASS,
}
