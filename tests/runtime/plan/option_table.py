"""Makes `families/option_defaults.json` of transformers' classes: `python -m tests.runtime.plan.option_table` writes
it."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from diskprefix.runtime.plan.families.type_table import TABLE
from diskprefix.runtime.plan.families.types.known_types import TYPES

_READ = """
    activation_function activation_sparsity_pattern add_cross_attention altup_active_idx altup_correct_scale
    altup_num_inputs attention_in_multiplier attention_multiplier attention_out_multiplier attention_value_scale
    attn_logit_softcapping attn_scale attn_temperature_tuning clip_qkv decoder_sparse_step dim_model_base
    do_layer_norm_before embedding_multiplier enable_moe_block expert_selection_fn final_logit_softcapping
    first_k_dense_replace floor_scale hc_count head_dim heads_per_ngram hidden_act hidden_activation hidden_size
    hidden_size_per_layer_input indexer_budget indexer_compress_ratio indexer_head_dim indexer_n_heads
    key_multiplier kv_lora_rank layer_norm_eps layer_norm_epsilon layer_rope_theta layer_types
    linear_allow_neg_eigval lm_head_multiplier logit_scale logits_scaling mamba_hidden_act mamba_norm_before_gate
    mlp_hidden_act mlp_layer_types mlp_multipliers mlp_only_layers moe_latent_size moe_layer_end_index
    moe_layer_interval moe_layer_start_index moe_layers moe_norm_min moe_num_shared_experts
    moe_routed_scaling_factor moe_router_logit_softcapping moe_router_scaling_factor moe_topk mup_enabled n_group
    n_shared_experts ngram_size ngram_vocab_size_base no_rope_layers norm_eps norm_epsilon norm_topk_prob
    num_attention_heads num_dense_layers num_experts_per_tok num_heads num_hidden_layers num_kv_shared_layers
    num_local_experts num_shared_experts output_gate_type pad_token_id ple_conv_kernel_size ple_embed_dim
    ple_layer_ids position_embedding_type prefix_dense_sliding_window_pattern q_lora_rank qk_layernorm
    qk_nope_head_dim qk_rope_head_dim query_pre_attn_scalar residual_in_fp32 residual_multiplier rms_norm_eps
    rope_interleave rope_parameters rope_scaling rope_theta route_scale routed_scaling_factor router_jitter_noise
    router_scaling_factor scale_attn_by_inverse_layer_idx scale_attn_weights scale_depth scale_emb scale_embedding
    seed shared_expert_combination_strategy shared_expert_intermediate_size shared_intermediate_size
    ssm_in_multiplier ssm_multipliers ssm_out_multiplier swiglu_alpha swiglu_limit swiglu_limits
    swiglu_limits_shared time_step_limit top_k_experts topk_group topk_method use_parallel_residual use_post_norm
    use_qk_norm v_head_dim vocab_size word_embed_proj_dim
"""
"""Options that `of_model`, the rotary positions or `without_plan` read."""
_SEEN = """
    attention_bias attention_chunk_size attention_k_eq_v attention_out_bias attn_layer_indices
    block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of conv_L_cache conv_bias conv_kernel
    enable_bias expand ffn_dim full_attn_idxs gating global_attn_every_n_layers hc_lowrank indexer_kv_heads
    interleave_moe_layer_step intermediate_size intermediate_size_mlp laurel_rank layer_norm_elementwise_affine
    layers_block_type linear_conv_kernel_dim linear_head_dim linear_key_head_dim linear_num_heads
    linear_num_key_heads linear_num_value_heads linear_value_head_dim lm_head_bias
    make_ngram_vocab_size_divisible_by mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state
    mamba_expand mamba_head_dim mamba_n_groups mamba_n_heads mamba_num_heads mamba_proj_bias mamba_rms_norm
    max_position_embeddings max_window_layers mlp_bias model_max_length moe_intermediate_size moe_k moe_num_experts
    moe_renormalize moe_shared_expert_intermediate_size multi_query n_embd n_groups n_head n_inner n_layer
    n_positions n_routed_experts no_rope_layer_interval num_attention_heads_per_layer num_expert_group num_experts
    num_experts_per_token num_key_value_heads num_nextn_predict_layers num_sliding_attention_heads
    original_max_position_embeddings prefix_dense_intermediate_size projectors_bias qkv_bias share_expert_dim
    sliding_window sliding_window_pattern split_ngram_parts ssm_state_size state_size tie_word_embeddings use_bias
    use_conv_bias use_double_wide_mlp use_expert_bias use_qkv_bias use_sliding_window vocab_size_per_layer_input
"""
"""Options that shapes of weights, the weights that there are, or the layout of the state say."""
_WITHOUT_EFFECT = """
    activation_dropout allow_global_per_layer_attribute_access altup_coef_clip architectures attention_dropout
    attention_probs_dropout_prob attention_softmax_in_fp32 attn_pdrop bos_token_id chunk_size classifier_dropout
    dropout dtype embd_pdrop embedding_dropout embedding_initializer_range eod_token_id eos_token_id
    hidden_dropout hidden_dropout_prob id2label ignore_keys_at_rope_validation init_std initializer_range
    input_jitter_noise is_decoder label2id layerdrop linear_a_log_max linear_a_log_min linear_dt_init_floor
    linear_dt_max linear_dt_min mamba_chunk_size mamba_ssm_cache_dtype moe_shared_expert_overlap mtp_layer_types
    mtp_layers_block_type mtp_mlp_layer_types num_logits_to_keep output_hidden_states output_router_logits pooling
    pretraining_tp problem_type reorder_and_upcast_attn rescale_prenorm_residual resid_pdrop residual_dropout
    return_dict router_aux_loss_coef scale_attention_softmax_in_fp32 sep_token_id summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj time_step_floor time_step_max
    time_step_min time_step_rank transformers_version use_cache use_mamba_kernels z_loss_coefficient
"""
"""Options of training and of text, and those that transformers' modules do not read."""
KNOWN = frozenset(f"{_READ} {_SEEN}".split())
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())
_OF_ALL = ("chunk_size_feed_forward", "is_encoder_decoder")
"""Options that all types have and no plan has."""
_LETTERS = {int: "i", float: "f", bool: "b", str: "s", list: "l", tuple: "l", dict: "d", type(None): "n"}


WITHOUT_CLASS: dict[str, dict[str, Any]] = {
    # Published folders name a class that comes with them.
    "bailing_moe": {
        "options": {
            "first_k_dense_replace:i": 0,
            "head_dim:in": None,
            "hidden_act:s": "silu",
            "hidden_size:i": 2048,
            "intermediate_size:i": 5120,
            "max_position_embeddings:i": 32768,
            "moe_intermediate_size:i": 512,
            "n_group:i": 8,
            "norm_topk_prob:b": True,
            "num_attention_heads:i": 16,
            "num_experts:i": 256,
            "num_experts_per_tok:i": 8,
            "num_hidden_layers:i": 20,
            "num_key_value_heads:i": 4,
            "num_shared_experts:i": 1,
            "pad_token_id:in": None,
            "rms_norm_eps:f": 1e-6,
            "rope_parameters:dn": None,
            "routed_scaling_factor:f": 1.0,
            "tie_word_embeddings:b": False,
            "topk_group:i": 4,
            "use_bias:b": False,
            "use_qk_norm:b": True,
            "use_qkv_bias:b": False,
            "vocab_size:i": 157184,
        },
        "theta": 600000.0,
        "class": "BailingMoeV2ForCausalLM",
    },
    "smallthinker": {
        "options": {
            "expert_selection_fn:s": "sigmoid",
            "head_dim:i": 128,
            "hidden_act:s": "relu",
            "hidden_size:i": 2560,
            "layer_types:ln": None,
            "max_position_embeddings:i": 16384,
            "moe_intermediate_size:i": 768,
            "num_attention_heads:i": 28,
            "num_experts:i": 64,
            "num_experts_per_tok:i": 6,
            "num_hidden_layers:i": 52,
            "num_key_value_heads:i": 4,
            "pad_token_id:in": None,
            "rms_norm_eps:f": 1e-6,
            "rope_parameters:dn": None,
            "sliding_window:in": 4096,
            "tie_word_embeddings:b": False,
            "vocab_size:i": 151936,
        }
    },
}
"""Types of which transformers has no class, and what the table has of them. Without a class of their own, their `.gguf`
files alone are served."""
WHOLES = """
    aria aya_vision cohere2_vision cohere_compass gemma3 gemma4 gemma4_unified got_ocr2 hyperclovax_vision_v2
    idefics2 idefics3 internvl lfm2_vl lighton_ocr llama4 llava llava_next llava_next_video llava_onevision mistral3
    ovis2 qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe qwen4_exp smolvlm video_llava vipllava
"""
"""The types of models with encoders whose decoder has a plan, as far as users ask for them."""


def table() -> dict[str, dict[str, Any]]:
    """What the package has of each type of model that has a plan: the options that plans read or that must not be set,
    with the types that each may have, its default, and other names."""
    return {
        name: WITHOUT_CLASS[name] | {"without_class": True}
        if name in WITHOUT_CLASS
        else _of_class(CONFIG_MAPPING[name])
        | ({"class": of_text} if (of_text := MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name)) else {})
        for name in sorted(TYPES)
    } | {name: _of_whole(CONFIG_MAPPING[name], MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[name]) for name in WHOLES.split()}


def _of_whole(kind: Any, of_class: str) -> dict[str, Any]:
    """What the package has of a model with encoders: its tokens, the type of its text, what its encoder adds."""
    found = {
        f"{one.name}:{''.join(sorted(_letters(one.type)))}": one.default
        for one in sorted(fields(kind), key=lambda one: one.name)
        if "_token_i" in one.name or one.name == "tie_word_embeddings"
    }
    text = kind.sub_configs_defaults["text_config"]
    entry = {"options": found, "text": text.model_type, "class": of_class, "names": dict(kind.attribute_map)}
    if text.config_class.__name__ == "AutoConfig":
        entry["any_text"] = True
    tied = {"model_type": text.model_type, "tie_word_embeddings": True}
    if not getattr(kind(), "tie_word_embeddings", True) and kind(text_config=tied).tie_word_embeddings:
        entry["tied_by_text"] = True
    if kind(num_hidden_layers=3).get_text_config(decoder=True).num_hidden_layers == 3:
        entry["flat"] = True
    if levels := getattr(kind().vision_config, "deepstack_visual_indexes", None):
        entry["levels"] = list(levels)
    return entry


def _of_class(kind: Any) -> dict[str, Any]:
    # A plan of n-grams reads the token that ends them.
    own = {"eos_token_id"} if "ngram_size" in {one.name for one in fields(kind)} else set()
    options = {
        kind.attribute_map.get(one.name, one.name): one
        for one in sorted(fields(kind), key=lambda one: one.name not in kind.attribute_map)
    }
    options = {
        name: one
        for name, one in options.items()
        if name not in {*WITHOUT_EFFECT - own, *_OF_ALL} and not name.startswith("_")
    }
    found = {
        # The classes do not check what is given by another name than the field's.
        f"{name}:{''.join(sorted(_letters(one.type) | {'n'} if name != one.name else _letters(one.type)))}": _plain(
            one.default
        )
        for name, one in sorted(options.items())
    }
    entry: dict[str, Any] = {"options": found}
    if unread := sorted(options.keys() - KNOWN - own):
        entry["unread"] = " ".join(unread)
    if kind.attribute_map:
        entry["names"] = dict(kind.attribute_map)
    if kind.default_theta != 10000.0 and not isinstance(kind.default_theta, Mapping):
        entry["theta"] = kind.default_theta
    return entry


def _letters(annotation: Any) -> set[str]:
    if get_origin(annotation) in (Union, types.UnionType):
        return {letter for one in get_args(annotation) for letter in _letters(one)}
    if get_origin(annotation) is Literal:
        return {"s"}
    of = get_origin(annotation) or annotation
    return {_LETTERS.get(of, "d" if isinstance(of, type) else "s")}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def text() -> str:
    """One line a type."""
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in table().items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    TABLE.write_text(text(), encoding="utf-8")
