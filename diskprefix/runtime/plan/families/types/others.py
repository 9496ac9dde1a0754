"""The models of other makers, by name."""

from __future__ import annotations

from collections.abc import Mapping

from diskprefix.runtime.plan.families.types.derivations import (
    FULL,
    SLIDING,
    all_of,
    every,
    first_of_each,
    layers_of,
    rotary_layers,
    sparse_from,
    state_space,
    unless_set,
)
from diskprefix.runtime.plan.families.types.ibm import BAMBA_NAMES
from diskprefix.runtime.plan.families.types.microsoft import LAYER_NORMS
from diskprefix.runtime.plan.families.types.model_type import (
    CORRECTION,
    NORMS,
    QUERIES,
    SILU_ONLY,
    Experts,
    ModelType,
    Options,
    Rotation,
)
from diskprefix.runtime.plan.families.types.zhipu import AROUND_NAMES
from diskprefix.runtime.plan.part_options import ExpertsForm, Gates, Norms

AFMOE = ModelType(
    norms=Norms("rms_unrounded", query_key="head"),
    norm_place="around",
    gates=Gates(attention="sigmoid"),
    rotary=Rotation(windows_only=True),
    experts=Experts(scores="sigmoid", is_normed=True, correction=True),
    names={
        "mlp.gate": "mlp.router.gate",
        CORRECTION: "mlp.expert_bias",
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
    in_float32=("expert_bias",),
    layer_types=every(("global_attn_every_n_layers", 0)),
)
"""By Arcee: Trinity."""
APERTUS = ModelType(
    norms=Norms(query_key="head"),
    is_gated=False,
    rotary=Rotation(
        defaults={
            "rope_type": "llama3",
            "rope_theta": 12000000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    ),
    names={"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"},
    head_dim_undeclared=True,
)
"""By EPFL, ETH Zurich and CSCS."""
ARCEE = ModelType(is_gated=False)
ARIA = ModelType(
    experts=Experts(scores="softmax_of_chosen", form=ExpertsForm(is_transposed=True)),
    names={"mlp.gate": "mlp.router"},
    published=(
        (r"mlp\.experts\.fc1\.weight", "mlp.experts.gate_up_proj"),
        (r"mlp\.experts\.fc2\.weight", "mlp.experts.down_proj"),
    ),
    only=SILU_ONLY,
)
"""By Rhymes AI."""
FALCON_H1 = ModelType(
    names=BAMBA_NAMES,
    biases_by_option={"mamba_proj_bias": r"mamba\.in_proj"},
    head_dim_undeclared=True,
    derive=state_space,
    derives=("layers_block_type",),
    only=SILU_ONLY,
)
"""By TII."""
FLINT = ModelType(
    norms=Norms(query_key="head"),
    rotary=Rotation(windows_only=True),
    experts=Experts(scores="sigmoid", float_router=True),
    names={"mlp.shared_experts": "mlp.shared_expert"},
    published=((r"self_attn\.softmax_offset", "self_attn.sinks"),),
    sinks="all",
    in_float32=("gate.weight", "sinks"),
    derive=unless_set("mlp_only_layers", lambda _: [0, 1]),
    layer_types=lambda own, _: [
        FULL if i < 2 or i % 4 == 1 or i == own["num_hidden_layers"] - 1 else SLIDING for i in layers_of(own)
    ],
)
HELIUM = ModelType(
    norms=Norms("rms_unrounded"), rotary=Rotation(interleaved=True), biases_by_option={"attention_bias": QUERIES}
)
"""By Kyutai."""
JAIS2 = ModelType(norms=Norms("layer"), is_gated=False, biases=NORMS)
"""By Inception."""
KOLIBRI1 = ModelType(
    norms=Norms(query_key="head"),
    norm_place="around",
    rotary=Rotation(windows_only=True),
    experts=Experts(scores="sigmoid_of_chosen", float_router=True, correction=True),
    names=AROUND_NAMES,
    published=(
        (r"moe\.router\.expert_bias", "mlp.gate.e_score_correction_bias"),
        ("post_attn_norm", "post_self_attn_layernorm"),
        ("post_ffn_norm", "post_mlp_layernorm"),
    ),
    in_float32=("e_score_correction_bias",),
    layer_types=every(5),
)


def _heads_by_layer(own: Options) -> list[int]:
    return [own["num_attention_heads"]] * own["num_hidden_layers"]


LAGUNA = ModelType(
    norms=Norms(query_key="head"),
    gates=Gates(attention="softplus"),
    rotary=Rotation(
        partial=True,
        older_names=False,
        defaults={
            "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ),
    experts=Experts(scores="sigmoid", is_normed=True, correction=True),
    names={"self_attn.gate_proj": "self_attn.g_proj"},
    published=(
        (r"mlp\.experts\.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        (r"mlp\.shared_expert\.", "mlp.shared_experts."),
    ),
    derive=unless_set("num_attention_heads_per_layer", _heads_by_layer),
    layer_types=all_of(FULL),
    mlp_layer_types=sparse_from("", 1),
)
"""By Poolside."""


def _full_layers(own: Options, _: Options) -> list[str]:
    full = own["full_attn_idxs"]
    return [FULL if full is None or i in full else "conv" for i in layers_of(own)]


_LFM2_NAMES = {
    "norm": "embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    **LAYER_NORMS,
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp": "feed_forward",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
LFM2 = ModelType(
    norms=Norms(query_key="head"),
    names=_LFM2_NAMES,
    head_dim_undeclared=True,
    renamed_options={"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"},
    layer_types=_full_layers,
)
"""By Liquid AI, as LFM2_MOE is."""
LFM2_MOE = ModelType(
    norms=Norms(query_key="head"),
    experts=Experts(scores="sigmoid", floor=1e-6, correction=True),
    names={**_LFM2_NAMES, CORRECTION: "feed_forward.expert_bias"},
    in_float32=("expert_bias",),
    head_dim_undeclared=True,
    renamed_options={"tie_embedding": "tie_word_embeddings"},
)
MELLUM = ModelType(
    norms=Norms(query_key="head"),
    rotary=Rotation(
        partial=True,
        older_names=False,
        defaults={
            "full_attention": {"rope_type": "default", "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    experts=Experts(),
    layer_types=all_of(FULL),
    mlp_layer_types=sparse_from("", 0),
)
"""By JetBrains."""
NANOCHAT = ModelType(
    norms=Norms("rms_unrounded", query_key="without_weights", after_rotary=True, of_embeddings=True),
    is_gated=False,
    rotary=Rotation(reverses=True),
    names={"embedding_norm": "norm", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
    unweighted_norms=True,
    head_dim_undeclared=True,
)
SMALLTHINKER = ModelType(
    rotary=Rotation(windows_only=True),
    experts=Experts(scores="sigmoid", is_normed=True, reads_input=True),
    layer_types=first_of_each(4),
)
"""By PowerInfer. transformers has no class of it, so that folders are not served, but `.gguf` files are."""


def _windows_without_rotary(own: Options, _: Options) -> list[str]:
    has_window = own["use_sliding_window"] and own["sliding_window"] is not None
    rotary = own["no_rope_layers"][: own["num_hidden_layers"]]
    return [SLIDING if has_window and not has_rotary else FULL for has_rotary in rotary]


SMOLLM3 = ModelType(
    head_dim_undeclared=True,
    derive=unless_set("no_rope_layers", rotary_layers),
    layer_types=_windows_without_rotary,
)
"""By Hugging Face."""
STABLELM = ModelType(norms=Norms("layer"), rotary=Rotation(partial=True, part=0.25), names=LAYER_NORMS, biases=NORMS)
"""By Stability AI."""
STARCODER2 = ModelType(
    norms=Norms("layer"),
    is_gated=False,
    names={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    biases=NORMS,
    head_dim_undeclared=True,
)
"""By BigCode."""
TYPES: Mapping[str, ModelType] = {
    "afmoe": AFMOE,
    "apertus": APERTUS,
    "arcee": ARCEE,
    "aria_text": ARIA,
    "falcon_h1": FALCON_H1,
    "flint": FLINT,
    "helium": HELIUM,
    "jais2": JAIS2,
    "kolibri1": KOLIBRI1,
    "laguna": LAGUNA,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "mellum": MELLUM,
    "nanochat": NANOCHAT,
    "smallthinker": SMALLTHINKER,
    "smollm3": SMOLLM3,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
}
