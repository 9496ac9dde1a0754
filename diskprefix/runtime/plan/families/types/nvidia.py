"""The models of NVIDIA: Nemotron; and Mamba 2, whose layers Nemotron-H has."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.runtime.plan.families.types.deepseek import FLOAT_ROUTER
from diskprefix.runtime.plan.families.types.derivations import FULL, LINEAR, all_of
from diskprefix.runtime.plan.families.types.model_type import (
    NO_MODULE,
    NORMS,
    SILU_ONLY,
    Experts,
    ModelType,
    Options,
    Rotation,
)
from diskprefix.runtime.plan.part_options import ExpertsForm, Norms

_PARTS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}
_SPACE = r"mamba\.(in|out)_proj"
_NAMES = {
    "embed_tokens": "embeddings",
    "input_layernorm": "norm",
    "norm": "norm_f",
    **dict.fromkeys(("mamba", "mlp", "self_attn"), "mixer"),
}


def _layers_of_pattern(own: Options, extra: Options) -> None:
    if own["layers_block_type"] is None:
        own["layers_block_type"] = [_PARTS[letter] for letter in extra.get("hybrid_override_pattern", "ME*-")]
    own["num_hidden_layers"] = len(own["layers_block_type"])


def _states_alone(own: Options, _: Options) -> None:
    own["layer_types"] = all_of(LINEAR)(own, {})


NEMOTRON = ModelType(
    norms=Norms("layer_plus_one"), is_gated=False, rotary=Rotation(partial=True, part=0.5), biases=NORMS
)
NEMOTRON_H = ModelType(
    experts=Experts(
        scores="sigmoid", float_router=True, correction=True, shared="ungated", form=ExpertsForm(has_up=False)
    ),
    single_part=True,
    names=_NAMES,
    biases_by_option={"use_bias": _SPACE, "attention_bias": NO_MODULE, "mamba_proj_bias": NO_MODULE},
    in_float32=FLOAT_ROUTER,
    renamed_options={
        "mamba_n_groups": "n_groups",
        "mamba_d_conv": "conv_kernel",
        "mamba_expand": "expand",
        "mamba_dt_limit": "time_step_limit",
        "mamba_conv_bias": "use_conv_bias",
    },
    derive=_layers_of_pattern,
    derives=("num_hidden_layers",),
    float_logits=True,
)
MAMBA2 = ModelType(
    single_part=True,
    names=_NAMES,
    biases_by_option={"use_bias": _SPACE},
    derive=_states_alone,
    derives=("layer_types",),
    float_logits=True,
    all_layers=LINEAR,
    only=SILU_ONLY,
)
TYPES: Mapping[str, ModelType] = {"nemotron": NEMOTRON, "nemotron_h": NEMOTRON_H, "mamba2": MAMBA2}
