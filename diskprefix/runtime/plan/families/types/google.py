"""The models of Google: Gemma."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from diskprefix.runtime.plan.families.types.derivations import FULL, every
from diskprefix.runtime.plan.families.types.model_type import (
    Derive,
    Experts,
    MakeList,
    ModelType,
    Options,
    Rotation,
    WholeType,
)
from diskprefix.runtime.plan.part_options import Norms


def _tanh(own: Options, _: Options) -> None:
    """Calls the activation of the first configurations by the function that the modules compute."""
    if own["hidden_act"] == "gelu":
        own["hidden_act"] = "gelu_pytorch_tanh"


def _widths_and_sparsity(own: Options, _: Options) -> None:
    count = own["num_hidden_layers"]
    if isinstance(own["intermediate_size"], int):
        own["intermediate_size"] = [own["intermediate_size"]] * count
    if own["activation_sparsity_pattern"] is None:
        num_sparse = 10 if count > 10 else 0
        own["activation_sparsity_pattern"] = [0.95] * num_sparse + [0.0] * (count - num_sparse)


def _heads_of_full_layers(layer_types: MakeList) -> Derive:
    """Returns a function that gives layers without a window heads of another size, and maybe another number of them.
    The last layer is one of them."""

    def derive(own: Options, extra: Options) -> None:
        size, heads = extra.pop("global_head_dim", 512), extra.pop("num_global_key_value_heads", None)
        own["layer_types"] = [*(own["layer_types"] or layer_types(own, extra))[:-1], FULL]
        if "per_layer_config" not in extra:
            changed = {"head_dim": size}
            if heads is not None and own.get("attention_k_eq_v", True):
                changed["num_key_value_heads"] = heads
            extra["per_layer_config"] = {i: changed for i, kind in enumerate(own["layer_types"]) if kind == FULL}

    return derive


GEMMA = ModelType(norms=Norms("rms_plus_one"), root_of_width=True, derive=_tanh)
GEMMA2 = ModelType(norms=Norms("rms_plus_one"), norm_place="around", root_of_width=True, layer_types=every(2))
GEMMA3 = ModelType(
    norms=Norms("rms_plus_one", query_key="head"),
    norm_place="around",
    rotary=Rotation(bases=(1e6, 1e4)),
    root_of_width=True,
    layer_types=every(("sliding_window_pattern", 6)),
    pictures="all",
    only={"attn_logit_softcapping": None},
)
GEMMA3N = ModelType(
    norms=Norms("rms_unrounded", query_key="head", of_values=True),
    norm_place="around",
    rotary=Rotation(bases=(1e6, 1e4)),
    scale=1.0,
    root_of_width=True,
    derive=_widths_and_sparsity,
    layer_types=every(5),
)
_LAYERS = every(6)
GEMMA4_UNIFIED = ModelType(
    norms=Norms("rms_unrounded", query_key="head", of_values=True),
    norm_place="around",
    rotary=Rotation(
        older_names=False,
        defaults={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    ),
    scale=1.0,
    root_of_width=True,
    layer_scales=True,
    pictures_by_option="otherwise",
    derive=_heads_of_full_layers(_LAYERS),
    layer_types=_LAYERS,
)
"""For pictures, transformers makes two different masks."""
GEMMA4 = replace(
    GEMMA4_UNIFIED,
    experts=Experts(is_normed=True, floor=0.0, added_to_gated=True),
    pictures_by_option="windowed",
)
VAULTGEMMA = ModelType(
    norms=Norms("rms_plus_one"),
    root_of_width=True,
    names={"post_attention_layernorm": "pre_feedforward_layernorm"},
    layer_types=every(2),
)
TYPES: Mapping[str, ModelType] = {
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3,
    "gemma3n_text": GEMMA3N,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4_UNIFIED,
    "vaultgemma": VAULTGEMMA,
}
WHOLES: Mapping[str, WholeType] = {
    "gemma3n": WholeType(problem="its encoders embed some tokens"),
    "gemma4": WholeType(pads_placeholders=True),
    "gemma4_unified": WholeType(pads_placeholders=True),
    # A token sees the whole prompt.
    "paligemma": WholeType(pictures="otherwise"),
}
