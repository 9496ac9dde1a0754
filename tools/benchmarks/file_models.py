"""The models of `tools/bench files`: tiny ones of each architecture, with the features that the real ones have."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

Values: TypeAlias = dict[str, Any]
State: TypeAlias = dict[str, torch.Tensor]

HIDDEN, HEADS, LAYERS, EXPERT_SIZE, WINDOW = 256, 4, 4, 256, 16
"""Rows of 256 numbers, which K-quants need."""
VOCAB = 395
"""The vocabulary size of the tests' chat model."""


@dataclass(frozen=True)
class Case:
    """A model of the configuration class `kind` of transformers; `sizes` override the values in `DENSE`.

    `hub` overrides the keys of the `config.json` that transformers writes, as on the hub; None removes a key. With it,
    the converter reads the file instead of asking transformers. `change` turns the saved tensors into the hub's.
    `options` are the converter's. `vision` has the values of a model's vision tower. Layers of a model with `is_slow`
    remember for thousands of tokens (`tests/slow_decays.py`); it is compared in float32 only, with llama.cpp too.
    """

    kind: str
    sizes: Values
    hub: Values | None = None
    change: Callable[[State], State] = lambda state: state
    options: tuple[str, ...] = ()
    vision: Values | None = None
    is_slow: bool = False

    @property
    def num_tokens(self) -> int:
        """The length of the prompt."""
        return 2000 if self.is_slow else 100


def rope(theta: float = 250_000.0, **more: Any) -> Values:
    return {"rope_type": "default", "rope_theta": theta, **more}


def yarn(**more: Any) -> Values:
    """Returns a scaling whose effect appears within a few tokens."""
    return (
        rope(rope_type="yarn", factor=8.0, original_max_position_embeddings=512, beta_fast=32.0, beta_slow=1.0) | more
    )


def phi_rope(original: int) -> Values:
    """Returns a scaling whose frequencies are others for texts of more than `original` tokens."""
    factors = {"short_factor": [1.0 + 0.1 * i for i in range(24)], "long_factor": [1.0 + 3.0 * i for i in range(24)]}
    kind = rope(10000.0, rope_type="longrope", partial_rotary_factor=0.75)
    return kind | factors | {"original_max_position_embeddings": original}


def _with_block(state: State, at: str, joining: str, norms: tuple[str, ...]) -> State:
    """Adds a block for multi-token prediction under the name `at`: a copy of the last layer, a projection and norms."""
    own, width = f"layers.{_num_layers(state) - 1}.", len(state["model.norm.weight"])
    block = {at + name.partition(own)[2]: tensor.clone() for name, tensor in state.items() if own in name}
    block |= {f"{name}.weight": torch.randn(width).bfloat16().float() for name in norms}
    return state | block | {f"{joining}.weight": torch.randn(width, 2 * width)}


def _num_layers(state: State) -> int:
    return 1 + max(int(match[1]) for name in state if (match := re.match(r"model\.layers\.(\d+)\.", name)))


def qwen_predictor(state: State) -> State:
    return _with_block(
        state, "mtp.layers.0.", "mtp.fc", ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    )


def further_layer(state: State) -> State:
    """Adds a layer for multi-token prediction, as in DeepSeek and GLM."""
    at = f"model.layers.{_num_layers(state)}."
    return _with_block(state, at, f"{at}eh_proj", (f"{at}enorm", f"{at}hnorm", f"{at}shared_head.norm"))


def transposed_experts(state: State) -> State:
    """Transposes the experts' matrices: the hub has [experts, columns, rows]. transformers transposes them when it
    loads, but not when it saves."""
    return {name: tensor.transpose(1, 2) if "mlp.experts." in name else tensor for name, tensor in state.items()}


def with_unread(state: State) -> State:
    """Adds the weights that nothing reads: on the hub, Gemma 3n's layers that share keys and values have their own
    too."""
    own = {name: tensor for name, tensor in state.items() if re.search(r"layers\.0\.self_attn\.[kv]_", name)}
    return state | {name.replace(".0.", f".{i}."): own[name].clone() for i in range(10, 20) for name in own}


def mimo_predictors(state: State) -> State:
    """Adds three blocks for multi-token prediction, with windows and without experts. Renames the sinks as on the
    hub."""
    state = {name.replace(".sinks", ".attention_sink_bias"): tensor for name, tensor in state.items()}
    parts, norms = ("model.layers.1.self_attn.", "model.layers.0.mlp."), ("input_layernorm", "pre_mlp_layernorm")
    width = len(state["model.norm.weight"])
    for at in (f"model.mtp.layers.{i}." for i in range(3)):
        state |= {at + name[len("model.layers.0.") :]: state[name].clone() for name in state if name.startswith(parts)}
        state |= {f"{at}{name}.weight": torch.randn(width) for name in ("enorm", "hnorm", "final_layernorm", *norms)}
        state[f"{at}eh_proj.weight"] = torch.randn(width, 2 * width)
    return state


def bitnet_names(state: State) -> State:
    """As the older models have them whose files llama.cpp reads."""
    names = {"self_attn.attn_sub_norm": "self_attn.inner_attn_ln", "mlp.ffn_sub_norm": "mlp.ffn_layernorm"}
    return {re.sub("|".join(names), lambda match: names[match[0]], name): state[name] for name in state}


def kimi_names(state: State) -> State:
    return {re.sub(r"block_sparse_moe\.((gate|up|down)_proj)", r"mlp.\1", name): state[name] for name in state}


def hy_names(state: State) -> State:
    """Renames tensors as on the hub."""
    renamed = {
        name.replace(".mlp.gate.weight", ".mlp.router.gate.weight")
        .replace("mlp.e_score_correction_bias", "mlp.expert_bias")
        .replace("mlp.shared_experts.", "mlp.shared_mlp."): tensor
        for name, tensor in state.items()
    }
    return {name.replace(".shared_head.norm.", ".final_layernorm."): tensor for name, tensor in renamed.items()}


def laguna_names(state: State) -> State:
    return {
        name.replace("mlp.gate.e_score_correction_bias", "mlp.experts.e_score_correction_bias").replace(
            "mlp.shared_experts.", "mlp.shared_expert."
        ): tensor
        for name, tensor in state.items()
    }


DENSE: Values = {
    "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    "hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "rms_norm_eps": 3e-6, "tie_word_embeddings": False,
    "rope_parameters": rope(),
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
WIDE = {"head_dim": 128}
"""Heads wider than the hidden size divided by their number."""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": EXPERT_SIZE}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": EXPERT_SIZE}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": EXPERT_SIZE}
SHARED = {"shared_expert_intermediate_size": 256}
_LATENT_HEADS = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
LATENT = ROUTED | _LATENT_HEADS | {"num_key_value_heads": HEADS, "n_shared_experts": 1, "first_k_dense_replace": 1}
SLIDING = {"layer_types": ["sliding_attention"] * 3 + ["full_attention"], "sliding_window": WINDOW}
SLIDING_FIRST_FULL = ["full_attention"] + ["sliding_attention"] * 3
HYBRID = ["linear_attention"] * 3 + ["full_attention"]
DELTA = {
    "num_hidden_layers": 8, "head_dim": 64, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "layer_types": 2 * HYBRID,
}  # fmt: skip
QWEN_3_5 = {"rope_parameters": rope(partial_rotary_factor=0.25, mrope_section=[3, 3, 2], mrope_interleaved=True)}
QWEN_VL = {"rope_parameters": rope(mrope_section=[24, 20, 20], mrope_interleaved=True)}
_VISION_SIZES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
VISION = _VISION_SIZES | {"out_hidden_size": HIDDEN, "deepstack_visual_indexes": [0]}
PIXTRAL = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 16, "image_size": 32, "patch_size": 16}  # fmt: skip
FACTORS = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.11}
MAMBA = {
    "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 2, "mamba_d_state": 32, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_chunk_size": 16,
}  # fmt: skip
GRANITE_HYBRID = {
    "shared_intermediate_size": 256, "position_embedding_type": "nope",
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
GRANITE_HUB = {"layer_types": ["mamba", "mamba", "attention", "mamba"]}
# transformers takes `time_step_min` for a least step, which no other engine does.
NEMOTRON = {"head_dim": 64, "ssm_state_size": 32, "mamba_num_heads": 8, "mamba_head_dim": 64, "n_groups": 2,
    "chunk_size": 16, "layer_norm_epsilon": 3e-6, "time_step_min": 1e-30}  # fmt: skip
NEMOTRON_HUB = {"num_hidden_layers": 4, "layers_block_type": None, "rms_norm_eps": None, "rope_parameters": None,
    "time_step_min": 0.001, "time_step_limit": [0.0, float("inf")]}  # fmt: skip
NEMOTRON_MOE = NEMOTRON | ROUTED | {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
    "moe_shared_expert_intermediate_size": 256, "routed_scaling_factor": 2.5}  # fmt: skip
CONVOLUTIONS = {"layer_types": ["conv", "conv", "full_attention", "conv"], "norm_eps": 3e-6}
GEMMA_4 = {
    "num_hidden_layers": 6, "head_dim": 32, "global_head_dim": 64, "vocab_size_per_layer_input": VOCAB,
    "sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
    "rope_parameters": {"sliding_attention": rope(10000.0),
        "full_attention": rope(1e6, rope_type="proportional", partial_rotary_factor=0.25)},
}  # fmt: skip
GEMMA_3N = {
    "num_hidden_layers": 20, "num_kv_shared_layers": 10, "head_dim": 64, "intermediate_size": [256] * 20,
    "sliding_window": WINDOW, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 4, "laurel_rank": 32,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB, "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 10,
    "rope_parameters": {"sliding_attention": rope(10000.0), "full_attention": rope(1e6)},
}  # fmt: skip
MIMO_2 = {
    "num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 96, "v_head_dim": 64, "sliding_window": WINDOW + 1,
    "rope_parameters": {"sliding_attention": rope(10000.0, partial_rotary_factor=0.334),
        "full_attention": rope(5e6, partial_rotary_factor=0.334)},
}  # fmt: skip
MIMO_2_HUB = {
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1], "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1], "swa_head_dim": 96,
    "swa_v_head_dim": 64, "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": 2, "swa_rope_theta": 10000.0,
    "rope_theta": 5e6, "partial_rotary_factor": 0.334, "rope_parameters": None, "layernorm_epsilon": 3e-6,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True, "sliding_window": WINDOW,
    "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
}  # fmt: skip
_KIMI_LAYERS = {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}
_KIMI_ATTENTION = _KIMI_LAYERS | {"head_dim": 32, "num_heads": HEADS, "short_conv_kernel_size": 4}
LLAMA_3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
HUNYUAN_ROPE = rope(10000.0, rope_type="dynamic", alpha=1000.0, factor=1.0)
_HUNYUAN_EACH = {"moe_intermediate_size": EXPERT_SIZE, "moe_topk": 3, "num_shared_expert": 1}
COHERE_2_MOE = TIED | {
    "num_hidden_layers": 5, "head_dim": 64, "sliding_window": WINDOW, "logit_scale": 0.25, "num_shared_experts": 1,
    "layer_types": [*SLIDING_FIRST_FULL, "full_attention"], "mlp_layer_types": ["dense"] + ["sparse"] * 4,
    "prefix_dense_intermediate_size": 512, "intermediate_size": EXPERT_SIZE, "num_experts": 8,
    "num_experts_per_tok": 3, "expert_selection_fn": "sigmoid", "rope_theta": 250000.0,
}  # fmt: skip
MINICPM_3 = _LATENT_HEADS | {"num_key_value_heads": HEADS, "q_lora_rank": 64, "v_head_dim": 64, "scale_emb": 12.0,
    "dim_model_base": 256, "scale_depth": 1.4}  # fmt: skip
NEOX = {"layer_norm_eps": 3e-6, "rope_parameters": rope(10000.0, partial_rotary_factor=0.25)}

CASES: dict[str, Case] = {
    "afmoe": Case("afmoe", EXPERTS | {"num_hidden_layers": 5, "head_dim": 64, "sliding_window": WINDOW,
        "global_attn_every_n_layers": 4, "num_dense_layers": 1, "num_shared_experts": 1, "route_scale": 2.5,
        "mup_enabled": True}, hub={"route_norm": True, "score_func": "sigmoid"}),
    "apertus": Case("apertus", {"rope_parameters": rope(12e6, rope_type="llama3") | LLAMA_3 | {"factor": 8.0}}),
    "arcee": Case("arcee", {"head_dim": 64}),
    # The converter makes its weights -1, 0 and 1, times a number.
    "bitnet": Case("bitnet", TIED | {"hidden_act": "silu"}, change=bitnet_names),
    "chatglm": Case("glm", {"head_dim": 64, "attention_bias": True,
        "rope_parameters": rope(10000.0, partial_rotary_factor=0.5)},
        hub={"layernorm_epsilon": 3e-6, "seq_length": 4096}),
    "cohere2": Case("cohere2", SLIDING | TIED | {"layer_norm_eps": 3e-6, "logit_scale": 0.25},
        hub={"rotary_pct": 1.0, "rope_theta": 250000.0}),
    "cohere2moe": Case("cohere2_moe", COHERE_2_MOE | {"rms_norm_eps": None, "layer_norm_eps": 3e-6},
        hub={"first_k_dense_replace": 1, "rope_theta": 250000.0}),
    "cohere2moe/rms": Case("cohere2_moe", COHERE_2_MOE | {"num_shared_experts": 0},
        hub={"first_k_dense_replace": 1, "rope_theta": 250000.0, "layer_norm_eps": None}),
    "command-r": Case("cohere", TIED | {"layer_norm_eps": 3e-6, "logit_scale": 0.25, "use_qk_norm": False}),
    "deepseek2/v2-lite": Case("deepseek_v2", LATENT | {"q_lora_rank": None, "topk_method": "greedy",
        "rope_parameters": yarn(mscale=0.707, mscale_all_dim=0.707)},
        hub={"norm_topk_prob": False, "scoring_func": "softmax"}),
    "deepseek2/v3": Case("deepseek_v3", LATENT | {"n_group": 4, "topk_group": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "q_lora_rank": 64, "rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0)},
        hub={"scoring_func": "sigmoid", "num_nextn_predict_layers": 1}, change=further_layer),
    "deepseek2/glm-4.7-flash": Case("glm4_moe_lite", LATENT | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 1.8, "q_lora_rank": 64, "v_head_dim": 64},
        hub={"scoring_func": "sigmoid", "num_nextn_predict_layers": 1}, change=further_layer),
    "dots1": Case("dots1", WIDE | ROUTED | {"num_key_value_heads": HEADS, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "sliding_window": None},
        hub={"scoring_func": "sigmoid", "rope_theta": 250000.0, "n_group": 1, "topk_group": 1}),
    "ernie4_5": Case("ernie4_5", TIED | {"head_dim": 64}),
    "ernie4_5-moe": Case("ernie4_5_moe", TIED | {"moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2,
        "intermediate_size": 4 * EXPERT_SIZE, "moe_intermediate_size": EXPERT_SIZE, "moe_layer_start_index": 1,
        "moe_layer_end_index": 3}, hub={}),
    "exaone4": Case("exaone4", SLIDING | {"head_dim": 64}),
    "exaone-moe": Case("exaone_moe", SLIDING | EXPERTS | {"head_dim": 64, "num_shared_experts": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5}, hub={"scoring_func": "sigmoid"}),
    # The converter multiplies its factors into the weights, which are rounded unless these are powers of two.
    "falcon-h1": Case("falcon_h1", MAMBA | {"mamba_n_groups": 1, "mamba_d_ssm": 512, "head_dim": 64,
        "embedding_multiplier": 2.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.5, "attention_in_multiplier": 2.0,
        "attention_out_multiplier": 0.5, "ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.5,
        "mlp_multipliers": [2.0, 0.5], "ssm_multipliers": [2.0, 0.5, 0.25, 4.0, 1.0]}, hub={"rope_theta": 250000.0}),
    "gemma": Case("gemma", TIED | {"head_dim": 256, "rope_parameters": rope(10000.0)}),
    "gemma2": Case("gemma2", TIED | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": WINDOW,
        "rope_parameters": rope(10000.0)}),
    "gemma3": Case("gemma3_text", TIED | {"num_hidden_layers": 6, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "rope_parameters": {"sliding_attention": rope(10000.0), "full_attention": rope(1000000.0)}}),
    "gemma3n": Case("gemma3n_text", GEMMA_3N | TIED, change=with_unread),
    "gemma4/e2b": Case("gemma4_text", GEMMA_4 | TIED | {"num_kv_shared_layers": 3, "hidden_size_per_layer_input": 32,
        "use_double_wide_mlp": True}),
    "gemma4/26b-a4b": Case("gemma4_text", GEMMA_4 | TIED | {"num_experts": 8, "top_k_experts": 3,
        "moe_intermediate_size": EXPERT_SIZE, "enable_moe_block": True, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1}),
    "glm4": Case("glm4", {"head_dim": 64, "attention_bias": True, "rope_parameters": rope(partial_rotary_factor=0.5)}),
    "glm4moe": Case("glm4_moe", WIDE | ROUTED | {"n_shared_experts": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True,
        "rope_parameters": rope(partial_rotary_factor=0.5), "num_nextn_predict_layers": 1}, change=further_layer),
    "gpt-oss": Case("gpt_oss", LOCAL | {"head_dim": 64, "sliding_window": WINDOW,
        "rope_parameters": yarn(rope_theta=150000.0, truncate=False)}),
    "gptneox": Case("gpt_neox", NEOX, hub={"rotary_pct": 0.25}),
    "gptneox/serial": Case("gpt_neox", NEOX | {"use_parallel_residual": False}, hub={"rotary_pct": 0.25}),
    "granite": Case("granite", FACTORS | TIED),
    "granitehybrid": Case("granitemoehybrid", FACTORS | MAMBA | LOCAL | GRANITE_HYBRID | TIED, hub=GRANITE_HUB),
    "granitehybrid/dense": Case("granitemoehybrid", FACTORS | MAMBA | GRANITE_HYBRID | TIED | {"num_local_experts": 0,
        "num_experts_per_tok": 0}, hub=GRANITE_HUB),
    "granitemoe": Case("granitemoe", FACTORS | LOCAL | TIED),
    "granite_swa": Case("granite_swa", FACTORS | TIED | {"num_hidden_layers": 5, "sliding_window": WINDOW,
        "layer_rope_theta": [0.0, 250000.0, 250000.0, 250000.0, 0.0]}, hub={"no_rope_layers": [0, 1, 1, 1, 0]}),
    "granite_swa/moe": Case("granitemoe_swa", FACTORS | LOCAL | {"num_hidden_layers": 5, "sliding_window": WINDOW,
        "shared_intermediate_size": 256}),
    "hunyuan-dense": Case("hunyuan_v1_dense", TIED | {"head_dim": 64, "max_position_embeddings": 262144,
        "rope_parameters": HUNYUAN_ROPE}),
    "hunyuan-moe": Case("hunyuan_v1_moe", TIED | WIDE | {"num_attention_heads": 2, "num_key_value_heads": 1,
        "num_experts": 8, "moe_topk": 3, "max_position_embeddings": 32768, "rope_parameters": HUNYUAN_ROPE},
        hub={name: [value] * LAYERS for name, value in _HUNYUAN_EACH.items()} | {"attention_head_dim": 128,
        "use_qk_norm": True, "rope_theta": 10000.0}),
    "hy_v3": Case("hy_v3", WIDE | EXPERTS | {"num_shared_experts": 1, "router_scaling_factor": 2.5,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, change=hy_names),
    "hy_v3/further": Case("hy_v3", WIDE | EXPERTS | {"num_shared_experts": 2, "router_scaling_factor": 1.5,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, hub={"num_nextn_predict_layers": 1},
        change=lambda state: hy_names(further_layer(state))),
    "jais2": Case("jais2", {"head_dim": 64, "layer_norm_eps": 3e-6}),
    "kimi-linear": Case("kimi_linear", _LATENT_HEADS | {"num_key_value_heads": HEADS,
        "moe_intermediate_size": EXPERT_SIZE, "num_experts": 8, "num_experts_per_token": 3, "num_shared_experts": 1,
        "linear_head_dim": 32, "linear_num_heads": HEADS, "layer_types": HYBRID,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "model_max_length": 4096,
        "routed_scaling_factor": 2.446},
        hub={"linear_attn_config": _KIMI_ATTENTION, "first_k_dense_replace": 1, "moe_router_activation_func": "sigmoid",
        "rope_theta": 10000.0}, change=kimi_names),
    "laguna/xs": Case("laguna", EXPERTS | SHARED | {"head_dim": 64, "sliding_window": WINDOW, "gating": "per-head",
        "layer_types": SLIDING_FIRST_FULL, "num_attention_heads_per_layer": [4, 6, 6, 6],
        "moe_routed_scaling_factor": 2.5, "rope_parameters": {"full_attention": yarn(partial_rotary_factor=0.5),
        "sliding_attention": rope(10000.0, partial_rotary_factor=1.0)}}, change=laguna_names),
    # As published. llama.cpp ignores the factor.
    "laguna/factor": Case("laguna", EXPERTS | SHARED | {"head_dim": 64, "sliding_window": WINDOW, "gating": "per-head",
        "layer_types": SLIDING_FIRST_FULL, "num_attention_heads_per_layer": [4, 6, 6, 6],
        "moe_routed_scaling_factor": 2.5, "rope_parameters": {"full_attention": yarn(partial_rotary_factor=0.5,
        attention_factor=1.0), "sliding_attention": rope(10000.0, partial_rotary_factor=1.0)}}, change=laguna_names),
    "laguna/m": Case("laguna", EXPERTS | SHARED | {"head_dim": 64, "gating": "per-element", "sliding_window": 512,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "rope_parameters": {"full_attention": rope(
        partial_rotary_factor=0.5), "sliding_attention": rope(10000.0, partial_rotary_factor=1.0)}},
        hub={"sliding_window": None, "num_attention_heads_per_layer": None}, change=laguna_names),
    "lfm2": Case("lfm2", CONVOLUTIONS | TIED | {"conv_L_cache": 3, "block_auto_adjust_ff_dim": False}),
    "lfm2moe": Case("lfm2_moe", EXPERTS | CONVOLUTIONS | TIED | {"num_dense_layers": 1, "norm_topk_prob": True,
        "use_expert_bias": True}),
    "llama": Case("llama", TIED | {"rope_parameters": rope(500000.0, rope_type="llama3") | LLAMA_3}),
    "llama/biased": Case("llama", WIDE | {"attention_bias": True, "mlp_bias": True}),
    "llama/fused": Case("llama", WIDE, options=("--fuse-qkv",)),
    "llama/mixtral": Case("mixtral", LOCAL | {"num_experts_per_tok": 2, "sliding_window": None}),
    "llama4/scout": Case("llama4_text", WIDE | LOCAL | {"num_experts_per_tok": 1, "intermediate_size_mlp": 256,
        "interleave_moe_layer_step": 1, "rope_parameters": rope(500000.0, rope_type="llama3") | LLAMA_3 | {
        "factor": 16.0, "high_freq_factor": 1.0}}),
    "llama4/maverick": Case("llama4_text", WIDE | LOCAL | {"num_local_experts": 128, "num_experts_per_tok": 1,
        "intermediate_size_mlp": 256, "interleave_moe_layer_step": 2, "use_qk_norm": False,
        "rope_parameters": rope(500000.0)}),
    "mamba2": Case("mamba2", {"num_heads": 8, "head_dim": 64, "state_size": 32, "n_groups": 2, "expand": 2,
        "chunk_size": 16, "layer_norm_epsilon": 3e-6}, hub={"intermediate_size": None}),
    # Layers with a window have a RoPE base of their own; llama.cpp uses one base for all layers.
    "mellum": Case("mellum", WIDE | SLIDING | {"num_local_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": EXPERT_SIZE, "rope_parameters": {"full_attention": yarn(),
        "sliding_attention": rope(10000.0)}}),
    "mellum/one-base": Case("mellum", WIDE | SLIDING | {"num_local_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": EXPERT_SIZE, "rope_parameters": {"full_attention": yarn(
        attention_factor=0.1 * math.log(8) + 1), "sliding_attention": rope()}}),
    "mimo2": Case("mimo_v2_flash", MIMO_2 | ROUTED, hub=MIMO_2_HUB, change=mimo_predictors),
    "minicpm3": Case("minicpm3", MINICPM_3 | {"rope_parameters": rope(10000.0)}),
    "minicpm3/longrope": Case("minicpm3", MINICPM_3 | {"rope_parameters": rope(10000.0, rope_type="longrope",
        original_max_position_embeddings=4096, short_factor=[1.0 + 0.1 * i for i in range(16)],
        long_factor=[1.0 + 3.0 * i for i in range(16)])}),
    "minimax-m2": Case("minimax_m2", WIDE | LOCAL | {"rope_parameters": rope(partial_rotary_factor=0.5)},
        hub={"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True, "rope_theta": 250000.0}),
    "mistral3": Case("ministral3", WIDE | {"rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1, original_max_position_embeddings=16)}),
    "mistral4": Case("mistral3", LATENT | {"model_type": "mistral4", "q_lora_rank": 64, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 0, "norm_topk_prob": True, "rope_parameters": yarn(mscale=1.0, mscale_all_dim=1.0,
        llama_4_scaling_beta=0.1, partial_rotary_factor=0.5, original_max_position_embeddings=16)}, vision=PIXTRAL),
    "nemotron": Case("nemotron", {"head_dim": 64, "norm_eps": 3e-6,
        "rope_parameters": rope(10000.0, partial_rotary_factor=0.5)}),
    "nemotron_h": Case("nemotron_h",
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
        hub=NEMOTRON_HUB | {"hybrid_override_pattern": "M-*-",
        "num_experts_per_tok": None, "n_routed_experts": None, "n_group": None, "topk_group": None}),
    "nemotron_h_moe": Case("nemotron_h", NEMOTRON_MOE, hub=NEMOTRON_HUB | {"hybrid_override_pattern": "ME*E"}),
    "nemotron_h_moe/super": Case("nemotron_h", NEMOTRON_MOE | {"moe_latent_size": 256, "hidden_size": 512},
        hub=NEMOTRON_HUB | {"hybrid_override_pattern": "ME*E"}),
    "olmo2": Case("olmo2", {}),
    "olmo2/olmo3": Case("olmo3", SLIDING),
    "olmoe": Case("olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": EXPERT_SIZE,
        "norm_topk_prob": False}),
    "phi2": Case("phi", {"num_key_value_heads": HEADS, "intermediate_size": 4 * HIDDEN, "layer_norm_eps": 3e-6,
        "rope_parameters": rope(10000.0, partial_rotary_factor=0.5)}),
    "phi3": Case("phi3", {"original_max_position_embeddings": 4096}),
    "phi3/longrope": Case("phi3", {"original_max_position_embeddings": 1024, "rope_parameters": phi_rope(1024)}),
    "phi3/longrope-long": Case("phi3", {"original_max_position_embeddings": 64, "rope_parameters": phi_rope(64)}),
    "qwen2": Case("qwen2", TIED),
    "qwen2vl": Case("qwen2_5_vl", {"rope_parameters": rope(mrope_section=[8, 12, 12])},
        vision=_VISION_SIZES | {"out_hidden_size": HIDDEN}),
    "qwen2moe": Case("qwen2_moe", EXPERTS | SHARED | {"norm_topk_prob": False}),
    "qwen3": Case("qwen3", WIDE | TIED),
    "qwen3/yarn": Case("qwen3", WIDE | {"rope_parameters": yarn()}),
    "qwen35": Case("qwen3_5_text", DELTA | QWEN_3_5, hub={"mtp_num_hidden_layers": 1}, change=qwen_predictor),
    "qwen35moe": Case("qwen3_5_moe_text", DELTA | EXPERTS | SHARED | QWEN_3_5, hub={"mtp_num_hidden_layers": 1},
        change=qwen_predictor, options=("--fuse-gate-up-exps",)),
    "qwen3moe": Case("qwen3_moe", WIDE | EXPERTS | {"norm_topk_prob": True}),
    "qwen3next": Case("qwen3_next", DELTA | EXPERTS | SHARED | {"norm_topk_prob": True,
        "rope_parameters": rope(partial_rotary_factor=0.25)}, change=qwen_predictor),
    "qwen3vl": Case("qwen3_vl", WIDE | QWEN_VL, vision=VISION),
    "qwen3vlmoe": Case("qwen3_vl_moe", WIDE | EXPERTS | QWEN_VL, vision=VISION, change=transposed_experts),
    "seed_oss": Case("seed_oss", WIDE | {"attention_bias": True, "attention_out_bias": False}),
    "smollm3": Case("smollm3", {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "stablelm": Case("stablelm", {"layer_norm_eps": 3e-6, "use_qkv_bias": True,
        "rope_parameters": rope(10000.0, partial_rotary_factor=0.25)}),
    "starcoder2": Case("starcoder2", TIED | {"norm_epsilon": 3e-6, "sliding_window": None, "use_bias": True}),
}  # fmt: skip
"""The cases by name: an architecture of `diskprefix.runtime.files.gguf.known_families`, or architecture/variant."""
RECURRENT = """
    falcon-h1 granitehybrid granitehybrid/dense kimi-linear lfm2 lfm2moe mamba2 nemotron_h nemotron_h_moe
    nemotron_h_moe/super qwen35 qwen35moe qwen3next
"""
"""The cases with recurrent layers. Each also has a slow variant."""


def slow(case: Case) -> Case:
    """Returns the slow variant. Each of its tokens uses all experts: among 2,000 tokens, rounding would choose other
    experts for some."""
    chosen = {name: 8 for name, count in case.sizes.items() if name.startswith("num_experts_per_tok") and count}
    return replace(case, sizes=case.sizes | chosen, is_slow=True)


CASES |= {f"{name}/slow": slow(CASES[name]) for name in RECURRENT.split()}
