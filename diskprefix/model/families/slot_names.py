"""The names of the weights of models, by their types in transformers, and their order, where that is unusual."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msgspec import Struct

from diskprefix.model.families.mixture_types import first_of
from diskprefix.model.families.optional_weights import has_tensor, modules_with_bias
from diskprefix.model.families.type_table import LATENT
from diskprefix.model.weights import ExpertsForm

_BIAS_OF_ROUTER = "mlp.gate.e_score_correction_bias"
_GRANITE = {
    "mlp": "block_sparse_moe",
    "mlp.gate": "block_sparse_moe.router",
    "mlp.gate_up_proj": "shared_mlp.input_linear",
    "mlp.down_proj": "shared_mlp.output_linear",
    "mlp.shared_experts": "shared_mlp",
    "mlp.shared_experts.gate_up_proj": "shared_mlp.input_linear",
    "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
}

_HUNYUAN_NORMS = {
    "self_attn.q_norm": "self_attn.query_layernorm",
    "self_attn.k_norm": "self_attn.key_layernorm",
}
_LAYER_NORMS = {"self_attn.q_norm": "self_attn.q_layernorm", "self_attn.k_norm": "self_attn.k_layernorm"}
_GLM_NORMS = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}
_GPT2 = {
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
_NEOX = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
_OPT = {
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}

_BAMBA = {"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward", "norm": "final_layernorm"}
_ONE_MIXER = {
    "embed_tokens": "embeddings",
    "input_layernorm": "norm",
    "norm": "norm_f",
    **dict.fromkeys(("mamba", "mlp", "self_attn"), "mixer"),
}
_LFM2 = {
    "norm": "embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp": "feed_forward",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}

_QWEN_NAMES: Mapping[str, str] = {"mlp.shared_experts": "mlp.shared_expert"}

_NAMES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(["granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"], _GRANITE),
    "hy_v3": {_BIAS_OF_ROUTER: "mlp.e_score_correction_bias"},
    "minimax_m2": {_BIAS_OF_ROUTER: "mlp.e_score_correction_bias"},
    "afmoe": {
        "mlp.gate": "mlp.router.gate",
        _BIAS_OF_ROUTER: "mlp.expert_bias",
        "pre_feedforward_layernorm": "pre_mlp_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
    "ernie4_5_moe": {_BIAS_OF_ROUTER: "mlp.gate.moe_statics.e_score_correction_bias"},
    "gpt_oss": {"mlp.gate": "mlp.router"},
    "hunyuan_v1_dense": _HUNYUAN_NORMS,
    "hunyuan_v1_moe": {"mlp.gate": "mlp.gate.wg", "mlp.shared_experts": "mlp.shared_mlp", **_HUNYUAN_NORMS},
    "laguna": {"self_attn.gate_proj": "self_attn.g_proj"},
    "llama4_text": {
        "mlp": "feed_forward",
        "mlp.gate": "feed_forward.router",
        "mlp.shared_experts": "feed_forward.shared_expert",
    },
    "bamba": _BAMBA,
    "falcon_h1": _BAMBA,
    "mamba2": _ONE_MIXER,
    "nemotron_h": _ONE_MIXER,
    "kimi_linear": {
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
    "lfm2": _LFM2,
    "lfm2_moe": {**_LFM2, _BIAS_OF_ROUTER: "feed_forward.expert_bias"},
    "olmo_hybrid": {
        "linear_attn.in_proj_z": "linear_attn.g_proj",
        "linear_attn.in_proj_a": "linear_attn.a_proj",
        "linear_attn.in_proj_b": "linear_attn.b_proj",
        "linear_attn.norm": "linear_attn.o_norm",
        "linear_attn.out_proj": "linear_attn.o_proj",
    },
    **dict.fromkeys(("qwen2_moe", "qwen3_next", "qwen3_5_moe_text"), _QWEN_NAMES),
    "aria_text": {"mlp.gate": "mlp.router"},
    "biogpt": {"norm": "layer_norm", **_OPT},
    **dict.fromkeys(["gpt2", "gpt_bigcode"], _GPT2),
    "gpt_neox": {
        "embed_tokens": "embed_in",
        "norm": "final_layer_norm",
        "self_attn.qkv_proj": "attention.query_key_value",
        "self_attn.o_proj": "attention.dense",
        **_NEOX,
    },
    "opt": {"norm": "final_layer_norm", **_OPT},
    "persimmon": {
        "norm": "final_layernorm",
        "self_attn.qkv_proj": "self_attn.query_key_value",
        "self_attn.o_proj": "self_attn.dense",
        **_NEOX,
        **_LAYER_NORMS,
    },
    "bitnet": {"self_attn.inner_norm": "self_attn.attn_sub_norm", "mlp.inner_norm": "mlp.ffn_sub_norm"},
    "flint": {"mlp.shared_experts": "mlp.shared_expert"},
    **dict.fromkeys(["glm4", "kolibri1"], _GLM_NORMS),
    "hyperclovax": {
        "post_attention_layernorm": "post_norm1",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_norm2",
    },
    "nanochat": {"embedding_norm": "norm", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
    "phimoe": {"mlp.gate": "mlp.router"},
    "step3p5": {"self_attn.gate_proj": "self_attn.g_proj"},
    "phi": {
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "self_attn.o_proj": "self_attn.dense",
        "norm": "final_layernorm",
        **_LAYER_NORMS,
    },
    "stablelm": _LAYER_NORMS,
    "starcoder2": {"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
    "vaultgemma": {"post_attention_layernorm": "pre_feedforward_layernorm"},
}
"""The names of the slots of layers, where they are not the usual ones."""

_EXPERTS: Mapping[str, ExpertsForm] = {
    "aria_text": ExpertsForm(is_turned=True),
    "gpt_oss": ExpertsForm(has_bias=True, is_turned=True, turns_about=True),
    "llama4_text": ExpertsForm(is_turned=True),
    "nemotron_h": ExpertsForm(has_up=False),
}
_CORRECTION = "e_score_correction_bias"
_ROUTER = (_CORRECTION, "gate.weight")
_IN_FLOAT32: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("axk1", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite"), _ROUTER),
    **dict.fromkeys(("hy_v3", "mimo_v2_flash", "nemotron_h", "solar_open"), _ROUTER),
    "afmoe": ("expert_bias",),
    "deepseek_v2": ("gate.weight",),
    "ernie4_5_moe": (*_ROUTER, "moe_statics"),
    "flint": ("gate.weight", "sinks"),
    "hunyuan_v1_moe": ("gate.wg",),
    "kimi_linear": (*_ROUTER, "dt_bias"),
    "kolibri1": (_CORRECTION,),
    "lfm2_moe": ("expert_bias",),
    "olmo_hybrid": ("A_log",),
}
"""Parts of the names of parameters that are float32 in models of any type of numbers."""
_OF_LATENTS = dict.fromkeys(("self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"), 1e-6)
_EPSILONS: Mapping[str, Mapping[str, float]] = {
    **dict.fromkeys(LATENT.split(), _OF_LATENTS),
    "olmo_hybrid": {"linear_attn.norm": 1e-5},
}
"""The epsilons of norms that no configuration says."""


class SlotNames(Struct, frozen=True):
    """The names of the weights of a model: `own` names within a layer or outside of layers, by the usual ones. Norms
    of hidden states have no weights if they are plain. Turned matrices have rows and columns exchanged. `epsilons` are
    those of norms that differ from the model's."""

    hidden_size: int
    own: Mapping[str, str]
    experts: ExpertsForm
    epsilons: Mapping[str, float]
    has_plain_norms: bool
    has_turned_matrices: bool
    with_bias: re.Pattern[str] | None = None
    """The modules that have biases, by their usual names; None if the weights decide."""
    has: Callable[[str, str], bool | None] = lambda _layer, _name: None
    """Returns whether there is a tensor, by its layer and its usual name; None if the weights decide."""
    num_experts: int | None = None

    @classmethod
    def of(cls, config: Any) -> SlotNames:
        """Returns those of a decoder of this configuration."""
        kind = config.model_type
        return cls(
            hidden_size=config.hidden_size,
            own=_NAMES.get(kind, {}),
            experts=_EXPERTS.get(kind, ExpertsForm()),
            epsilons=_EPSILONS.get(kind, {}),
            has_plain_norms=kind in ("nanochat", "olmo"),
            has_turned_matrices=kind == "gpt2",
            with_bias=modules_with_bias(config),
            has=partial(has_tensor, config),
            num_experts=first_of(config, "num_experts num_local_experts n_routed_experts moe_num_experts", None),
        )


def kept_in_float32(config: Any) -> tuple[str, ...]:
    """Returns parts of the names of parameters that are float32 in models of any type of numbers."""
    return _IN_FLOAT32.get(config.get_text_config(decoder=True).model_type, ())
