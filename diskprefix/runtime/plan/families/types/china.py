"""The models of Chinese makers with a type or two: Baidu, ByteDance, MiniMax, RedNote, Shanghai AI Lab, StepFun, Xiaomi
and others."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.errors import ModelError
from diskprefix.runtime.plan.families.types.deepseek import FLOAT_ROUTER, V3_EXPERTS
from diskprefix.runtime.plan.families.types.derivations import (
    FULL,
    SLIDING,
    all_of,
    layers_of,
    sparse_from,
    standardise_rotary,
    windows_from_max,
)
from diskprefix.runtime.plan.families.types.mistral import MIXTRAL_FILES
from diskprefix.runtime.plan.families.types.model_type import (
    ATTENTION,
    CORRECTION,
    FEED_FORWARD,
    OUT,
    QUERIES,
    Experts,
    ModelType,
    Options,
    Rotation,
)
from diskprefix.runtime.plan.part_options import Gates, Norms


def _last_mixture(own: Options, _: Options) -> None:
    if own["moe_layer_end_index"] == -1:
        own["moe_layer_end_index"] = own["num_hidden_layers"] - 1


ERNIE4_5 = ModelType(rotary=Rotation(interleaved=True))
ERNIE4_5_MOE = ModelType(
    rotary=Rotation(interleaved=True),
    experts=Experts(is_normed=True, float_router=True, correction=True),
    names={CORRECTION: "mlp.gate.moe_statics.e_score_correction_bias"},
    published=((r"mlp\.moe_statics\.", "mlp.gate.moe_statics."),),
    biases_by_option={"use_bias": f"{ATTENTION}|{FEED_FORWARD}|lm_head"},
    in_float32=(*FLOAT_ROUTER, "moe_statics"),
    head_dim_undeclared=True,
    derive=_last_mixture,
)
"""By Baidu."""
SEED_OSS = ModelType(biases_by_option={"attention_bias": QUERIES})
"""By ByteDance."""
DOTS1 = ModelType(
    norms=Norms(query_key="head"),
    experts=V3_EXPERTS,
    in_float32=FLOAT_ROUTER,
    head_dim_undeclared=True,
    layer_types=windows_from_max,
)
"""By RedNote."""
INTERNLM3 = ModelType()
"""By Shanghai AI Lab."""


def _no_windows_nor_clips(_: Options, extra: Options) -> None:
    if extra.get("use_sliding_window") or extra.get("clip_qkv") is not None:
        raise ModelError("windows and clipped queries are not known of this type")


def _as_ling_2(own: Options, extra: Options) -> None:
    """Models of the same name that weigh experts in another way are those of Ling 1."""
    if extra.get("score_function", "sigmoid") != "sigmoid" or not own["norm_topk_prob"]:
        raise ModelError("of this type, models alone are served that weigh experts by normed sigmoids")
    if extra.get("norm_head") or not extra.get("use_rmsnorm", True):
        raise ModelError("a normed matrix of logits and other norms than RMS norms are not known of this type")


BAILING_MOE = ModelType(
    rotary=Rotation(partial=True, part=1.0),
    experts=V3_EXPERTS,
    joined="in_parts",
    names={
        "embed_tokens": "word_embeddings",
        "self_attn": "attention",
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        CORRECTION: "mlp.gate.expert_bias",
    },
    biases_by_option={"use_bias": OUT},
    in_float32=("gate.weight", "expert_bias"),
    derive=_as_ling_2,
)
"""By Ant Group: Ling 2.0 and Ring 2.0. transformers has no class of it."""
IQUESTCODER = ModelType(derive=_no_windows_nor_clips)


def _rotated_numbers(own: Options, extra: Options) -> None:
    if (rotated := extra.get("rotary_dim")) is not None:
        extra.setdefault("partial_rotary_factor", rotated / own["head_dim"])


MINIMAX_M2 = ModelType(
    norms=Norms(query_key="row"),
    rotary=Rotation(partial=True),
    experts=Experts(scores="sigmoid", is_normed=True, correction=True),
    names={CORRECTION: "mlp.e_score_correction_bias"},
    published=MIXTRAL_FILES,
    derive=_rotated_numbers,
)


def _mimo_window(own: Options, extra: Options) -> None:
    if own["routed_scaling_factor"] is None:
        own["routed_scaling_factor"] = 1.0
    if extra.get("sliding_window_size") is not None:
        # It counts the tokens before the present one.
        own["sliding_window"] = extra["sliding_window_size"] + 1


MIMO_V2_FLASH = ModelType(
    rotary=Rotation(
        partial=True,
        part=0.334,
        older_names=False,
        defaults={
            "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
        },
    ),
    experts=V3_EXPERTS,
    published=((r"self_attn\.attention_sink_bias", "self_attn.sinks"),),
    biases_by_option={"attention_bias": QUERIES},
    sinks="windowed",
    in_float32=FLOAT_ROUTER,
    derive=_mimo_window,
    layer_types=lambda own, _: [FULL if i == 0 or (i + 1) % 6 == 0 else SLIDING for i in layers_of(own)],
    mlp_layer_types=sparse_from("", 1),
    draft_layer={"layer_types": SLIDING, "mlp_layer_types": "dense"},
    windows_double_heads=True,
)
"""By Xiaomi."""


def _step_sizes(own: Options, extra: Options) -> None:
    count = own["num_hidden_layers"]
    own["num_nextn_predict_layers"] = further = extra.pop(
        "num_nextn_predict_layers", own.get("num_nextn_predict_layers", 0)
    )
    for options, names in (
        (own, ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")),
        (extra, ("rope_theta", "partial_rotary_factors")),
    ):
        for name in names:
            if isinstance(values := options.get(name), list) and len(values) == count + further:
                options[name] = values[:count]
    if own["num_sliding_attention_heads"] is None:
        windows = extra.get("attention_other_setting") or {}
        own["num_sliding_attention_heads"] = windows.get("num_attention_heads", own["num_attention_heads"])
    kinds = own["layer_types"] or []
    heads = {"num_attention_heads": own["num_sliding_attention_heads"]}
    extra.setdefault("per_layer_config", {i: heads for i, kind in enumerate(kinds) if kind == SLIDING})
    if own["query_pre_attn_scalar"] is None:
        own["query_pre_attn_scalar"] = own["head_dim"]
    own["hidden_act"] = "silu"


def _step_rotary(own: Options, extra: Options, base: float) -> Options:
    """Lists by layer have a value for each kind of layers."""
    theta, parts = extra.pop("rope_theta", base), extra.pop("partial_rotary_factors", None)
    scaling, kinds, given = extra.pop("rope_scaling", None), own["layer_types"], own["rope_parameters"] or {}
    if all(isinstance(given.get(kind), dict) for kind in kinds):
        for kind in kinds:
            given[kind].setdefault("rope_theta", base)
        standardise_rotary(own, given, kinds)
        return {kind: given[kind] for kind in dict.fromkeys(kinds)}
    parameters: Options = {}
    for kind in dict.fromkeys(kinds):
        first = kinds.index(kind)
        parameters[kind] = {"rope_type": "default", "rope_theta": theta[first] if isinstance(theta, list) else theta}
        if parts:
            parameters[kind]["partial_rotary_factor"] = parts[first]
    if scaling and "full_attention" in parameters:
        parameters["full_attention"].update(scaling)
    return parameters


def _step_mixtures(own: Options, extra: Options) -> list[str]:
    listed = extra.get("moe_layers_enum")
    items = listed.split(",") if isinstance(listed, str) else listed
    numbers = range(3, own["num_hidden_layers"]) if items is None else {int(i) for i in items if str(i).strip()}
    return ["sparse" if i in numbers else "dense" for i in layers_of(own)]


STEP3P5 = ModelType(
    norms=Norms("rms_plus_one", query_key="head"),
    gates=Gates(attention="sigmoid"),
    rotary=Rotation(partial=True, older_names=False, parameters=_step_rotary),
    experts=Experts(scores="sigmoid", is_normed=True, correction=True, shared="plain"),
    names={"self_attn.gate_proj": "self_attn.g_proj"},
    published=(
        (r"\.moe\.gate\.weight", ".mlp.gate.weight"),
        (r"\.moe\.router_bias", ".mlp.gate.e_score_correction_bias"),
        (r"\.moe\.(gate|up|down)_proj\.weight", r".mlp.experts.\1_proj"),
        (r"\.share_expert\.", ".mlp.shared_experts."),
    ),
    derive=_step_sizes,
    derives=("num_nextn_predict_layers",),
    layer_types=all_of(FULL),
    mlp_layer_types=_step_mixtures,
)
"""By StepFun."""
TYPES: Mapping[str, ModelType] = {
    "bailing_moe": BAILING_MOE,
    "dots1": DOTS1,
    "ernie4_5": ERNIE4_5,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "internlm3": INTERNLM3,
    "iquestcoder": IQUESTCODER,
    "mimo_v2_flash": MIMO_V2_FLASH,
    "minimax_m2": MINIMAX_M2,
    "seed_oss": SEED_OSS,
    "step3p5": STEP3P5,
}
