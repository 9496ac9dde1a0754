"""The models of DeepSeek, and others with its latent attention."""

from __future__ import annotations

import math
from collections.abc import Mapping

from diskprefix.runtime.plan.families.types.derivations import FULL, LINEAR, heads_of_rotary, layers_of, sparse_from
from diskprefix.runtime.plan.families.types.mistral import LATENT_EPSILONS, MIXTRAL_FILES
from diskprefix.runtime.plan.families.types.model_type import LATENTS, SILU_ONLY, Experts, ModelType, Options, Rotation
from diskprefix.runtime.plan.part_options import DeltaConfig

FLOAT_ROUTER = ("e_score_correction_bias", "gate.weight")
"""Parts of the names of what routers have in float32."""
V3_EXPERTS = Experts(scores="sigmoid", float_router=True, correction=True)


def _heads_and_scales(own: Options, _: Options) -> None:
    own["head_dim"] = own["qk_rope_head_dim"]
    if own["v_head_dim"] is None:
        own["v_head_dim"] = own["hidden_size"] // own["num_attention_heads"]
    if own["scale_depth"] is None:
        own["scale_depth"] = math.sqrt(own["num_hidden_layers"])
    if own["dim_model_base"] is None:
        own["dim_model_base"] = own["hidden_size"]
    own["logits_scaling"] = own["hidden_size"] / own["dim_model_base"]


def _sparse_at_each(own: Options, extra: Options) -> list[str]:
    step = extra.get("moe_layer_freq", 1)
    kinds = sparse_from("first_k_dense_replace", 1)(own, extra)
    return ["dense" if i % step else kind for i, kind in enumerate(kinds)]


def _kimi_sizes(own: Options, extra: Options) -> None:
    own["head_dim"] = own["qk_rope_head_dim"]
    given = extra.get("linear_attn_config") or {}
    for name, key in (
        ("linear_head_dim", "head_dim"),
        ("linear_num_heads", "num_heads"),
        ("linear_conv_kernel_dim", "short_conv_kernel_size"),
    ):
        own[name] = given.get(key, own[name])


def _kimi_layers(own: Options, extra: Options) -> list[str]:
    given = extra.get("linear_attn_config", {})
    if "full_attn_layers" not in given or "kda_layers" not in given:
        return [FULL if i and i % 4 == 0 else LINEAR for i in layers_of(own)]
    kinds = {
        layer - 1: kind for kind, name in ((FULL, "full_attn_layers"), (LINEAR, "kda_layers")) for layer in given[name]
    }
    return [kinds[i] for i in layers_of(own)]


DEEPSEEK_V2 = ModelType(
    rotary=Rotation(interleaved=True),
    experts=Experts(of_group=1, float_router=True),
    biases_by_option={"attention_bias": LATENTS},
    in_float32=("gate.weight",),
    epsilons=LATENT_EPSILONS,
    derive=heads_of_rotary,
    only={"norm_topk_prob": False},
)
DEEPSEEK_V3 = ModelType(
    experts=V3_EXPERTS,
    biases_by_option={"attention_bias": LATENTS},
    in_float32=FLOAT_ROUTER,
    epsilons=LATENT_EPSILONS,
    derive=heads_of_rotary,
    derives=("head_dim",),
    draft_layer={},
)
AXK1 = ModelType(
    experts=Experts(scores="sigmoid", float_router=True, correction=True, has_norm=True),
    published=((r"(?<!mlp\.)post_mlp_layernorm", "mlp.post_mlp_layernorm"),),
    biases_by_option={"attention_bias": LATENTS},
    in_float32=FLOAT_ROUTER,
    epsilons=LATENT_EPSILONS,
    derive=heads_of_rotary,
    derives=("head_dim",),
    mlp_layer_types=_sparse_at_each,
)
"""By SK Telecom."""
KIMI_LINEAR = ModelType(
    experts=V3_EXPERTS,
    delta=DeltaConfig("apart", has_narrow_gates=True, gate="sigmoid"),
    names={
        "linear_attn": "self_attn",
        "linear_attn.in_proj_z": "self_attn.g_a_proj",
        "linear_attn.gate_proj": "self_attn.g_b_proj",
        "linear_attn.in_proj_a": "self_attn.forget_gate.f_a_proj",
        "linear_attn.decay_proj": "self_attn.forget_gate.f_b_proj",
        "linear_attn.dt_bias": "self_attn.forget_gate.dt_bias",
        "linear_attn.A_log": "self_attn.forget_gate.A_log",
        "linear_attn.in_proj_b": "self_attn.b_proj",
        "linear_attn.norm": "self_attn.o_norm",
        "linear_attn.out_proj": "self_attn.o_proj",
    },
    published=(
        *MIXTRAL_FILES,
        (r"self_attn\.(f_a_proj\.|f_b_proj\.|dt_bias|A_log)", r"self_attn.forget_gate.\1"),
    ),
    biases_by_option={"attention_bias": LATENTS},
    in_float32=(*FLOAT_ROUTER, "dt_bias"),
    epsilons=LATENT_EPSILONS,
    derive=_kimi_sizes,
    derives=("head_dim",),
    layer_types=_kimi_layers,
    mlp_layer_types=sparse_from("first_k_dense_replace", 1),
    only=SILU_ONLY,
)
"""By Moonshot."""
MINICPM3 = ModelType(
    biases_by_option={"attention_bias": LATENTS},
    epsilons=LATENT_EPSILONS,
    derive=_heads_and_scales,
    derives=("logits_scaling",),
)
"""By OpenBMB."""
YOUTU = ModelType(
    biases_by_option={"attention_bias": LATENTS},
    epsilons=LATENT_EPSILONS,
    derive=heads_of_rotary,
    derives=("head_dim",),
)
"""By Tencent."""
TYPES: Mapping[str, ModelType] = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "axk1": AXK1,
    "kimi_linear": KIMI_LINEAR,
    "minicpm3": MINICPM3,
    "youtu": YOUTU,
}
