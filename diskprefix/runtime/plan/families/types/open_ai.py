"""The models of OpenAI, and older ones of GPT's kind."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.runtime.plan.families.types.derivations import every
from diskprefix.runtime.plan.families.types.microsoft import LAYER_NORMS
from diskprefix.runtime.plan.families.types.model_type import (
    ATTENTION,
    FEED_FORWARD,
    HEAD_NORMS,
    NORMS,
    Experts,
    ModelType,
    Options,
    Rotation,
)
from diskprefix.runtime.plan.part_options import ExpertsForm, Norms


def _heads_of_keys(own: Options, _: Options) -> None:
    own["num_key_value_heads"] = 1 if own["multi_query"] else own["n_head"]


_GPT2_NAMES = {
    "embed_tokens": "wte",
    "embed_positions": "wpe",
    "layers": "h",
    "norm": "ln_f",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_NEOX_NAMES = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
GPT2 = ModelType(
    norms=Norms("layer"),
    is_gated=False,
    joined="in_parts",
    position_offset=0,
    names=_GPT2_NAMES,
    biases=f"{NORMS}|{ATTENTION}|{FEED_FORWARD}",
    transposed=True,
)
GPT_OSS = ModelType(
    norms=Norms("rms_unrounded"),
    rotary=Rotation(
        defaults={
            "rope_type": "yarn",
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    ),
    experts=Experts(
        scores="softmax_of_chosen",
        published_mxfp4=True,
        form=ExpertsForm(has_bias=True, is_transposed=True, is_interleaved=True),
    ),
    names={"mlp.gate": "mlp.router"},
    biases=r"mlp\.gate",
    sinks="all",
    layer_types=every(2),
)
GPT_BIGCODE = ModelType(
    norms=Norms("layer"),
    is_gated=False,
    joined="in_heads",
    position_offset=0,
    names=_GPT2_NAMES,
    biases=f"{NORMS}|{ATTENTION}|{FEED_FORWARD}",
    derive=_heads_of_keys,
    derives=("num_key_value_heads",),
)
"""By BigCode: StarCoder."""
GPT_NEOX = ModelType(
    norms=Norms("layer"),
    is_gated=False,
    rotary=Rotation(partial=True, part=0.25, nests=False, option_names=("rotary_emb_base", "rotary_pct")),
    joined="in_heads",
    parallel="two_norms",
    names={
        "embed_tokens": "embed_in",
        "norm": "final_layer_norm",
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        **_NEOX_NAMES,
    },
    biases=f"{NORMS}|{FEED_FORWARD}",
)
"""By EleutherAI: Pythia."""
PERSIMMON = ModelType(
    norms=Norms("layer"),
    is_gated=False,
    rotary=Rotation(partial=True, part=0.5),
    joined="in_heads",
    names={
        "norm": "final_layernorm",
        "self_attn.qkv_proj": "self_attn.query_key_value",
        "self_attn.o_proj": "self_attn.dense",
        **_NEOX_NAMES,
        **LAYER_NORMS,
    },
    biases=f"{NORMS}|{HEAD_NORMS}|{ATTENTION}|{FEED_FORWARD}",
)
"""By Adept."""
TYPES: Mapping[str, ModelType] = {
    "gpt2": GPT2,
    "gpt_oss": GPT_OSS,
    "gpt_bigcode": GPT_BIGCODE,
    "gpt_neox": GPT_NEOX,
    "persimmon": PERSIMMON,
}
