"""The sources of transformers' parameters in most architectures.

The names of tensors are llama.cpp's (`gguf-py/gguf/tensor_mapping.py`). An architecture has its own sources for
parameters that differ.
"""

from __future__ import annotations

from diskprefix.runtime.files.gguf.sources import (
    Sources,
    TensorSource,
    attention_part,
    changed,
    joined,
    log_of_negative,
    of_experts,
)


def _experts(owner: str) -> Sources:
    return {
        f"{owner}.experts.gate_up_proj": ("ffn_gate_up_exps", of_experts("ffn_gate_exps", "ffn_up_exps")),
        f"{owner}.experts.up_proj": "ffn_up_exps",
        f"{owner}.experts.down_proj": "ffn_down_exps",
        f"{owner}.gate": "ffn_gate_inp",
        f"{owner}.gate.wg": "ffn_gate_inp",
        f"{owner}.router": "ffn_gate_inp",
    }


def _shared_experts(owner: str) -> Sources:
    return {f"{owner}.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")}


def _mamba(owner: str) -> Sources:
    """Returns the sources of a layer of Mamba 2."""
    return {
        f"{owner}.A_log": changed("ssm_a", log_of_negative),
        f"{owner}.D": "ssm_d",
        f"{owner}.dt_bias": "ssm_dt.bias",
        f"{owner}.conv1d": "ssm_conv1d",
        f"{owner}.in_proj": "ssm_in",
        f"{owner}.norm": "ssm_norm",
        f"{owner}.out_proj": "ssm_out",
    }


def _all(parameters: str, tensor: str) -> Sources:
    """Returns the same source for several parameters."""
    return dict.fromkeys(parameters.split(), tensor)


NAMES: Sources = {
    # Outside of the layers.
    **_all("model.embed_tokens model.embeddings backbone.embeddings", "token_embd"),
    **_all("model.norm model.norm_f backbone.norm_f model.final_layernorm", "output_norm"),
    "model.embedding_norm": ("token_embd_norm", "output_norm"),
    "lm_head": ("output", "token_embd"),
    # Norms.
    **_all("input_layernorm operator_norm attention_layernorm norm", "attn_norm"),
    "post_attention_layernorm": ("ffn_norm", "post_attention_norm"),
    **_all("pre_feedforward_layernorm pre_ff_layernorm feedforward_layernorm ffn_norm", "ffn_norm"),
    **_all("post_feedforward_layernorm post_mlp_layernorm", "post_ffw_norm"),
    # Attention.
    "self_attn.q_proj": ("attn_q", attention_part(0)),
    "self_attn.k_proj": ("attn_k", attention_part(1)),
    "self_attn.v_proj": ("attn_v", attention_part(2)),
    "self_attn.qkv_proj": ("attn_qkv", joined("attn_q", "attn_k", "attn_v")),
    **_all("self_attn.o_proj self_attn.out_proj self_attn.dense mixer.o_proj", "attn_output"),
    "self_attn.attn_sub_norm": "attn_sub_norm",
    **_all("self_attn.q_norm self_attn.q_layernorm self_attn.query_layernorm", "attn_q_norm"),
    **_all("self_attn.k_norm self_attn.k_layernorm self_attn.key_layernorm", "attn_k_norm"),
    "self_attn.sinks": "attn_sinks.weight",
    # Feed-forward parts.
    **_all("mlp.gate_proj feed_forward.gate_proj feed_forward.w1", "ffn_gate"),
    **_all("mlp.up_proj feed_forward.up_proj feed_forward.w3 mlp.c_fc mlp.fc1 mixer.up_proj", "ffn_up"),
    **_all("mlp.down_proj feed_forward.down_proj feed_forward.w2 mlp.c_proj mlp.fc2 mixer.down_proj", "ffn_down"),
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "mlp.gate_up_proj": ("ffn_up", joined("ffn_gate", "ffn_up")),
    # Mixtures.
    **_experts("mlp"),
    **_experts("feed_forward"),
    **_experts("block_sparse_moe"),
    **_experts("mixer"),
    **_shared_experts("mlp.shared_expert"),
    **_shared_experts("mlp.shared_experts"),
    **_shared_experts("mlp.shared_mlp"),
    **_shared_experts("mixer.shared_experts"),
    **_shared_experts("feed_forward.shared_expert"),
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    "shared_mlp.input_linear": (joined("ffn_gate_shexp", "ffn_up_shexp"), joined("ffn_gate", "ffn_up")),
    "shared_mlp.output_linear": ("ffn_down_shexp", "ffn_down"),
    **_all("mlp.gate.e_score_correction_bias mlp.gate.moe_statics.e_score_correction_bias", "exp_probs_b.bias"),
    **_all(
        "mlp.e_score_correction_bias mixer.gate.e_score_correction_bias feed_forward.expert_bias", "exp_probs_b.bias"
    ),
    # Inputs of each layer.
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    # Layers with a state.
    "conv.conv": "shortconv.conv",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    **_mamba("mamba"),
    **_mamba("mixer"),
    # The draft layer.
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "eh_proj": "nextn.eh_proj",
    # As in llama.cpp, the model's last norm replaces a missing one.
    "post_norm": ("nextn.shared_head_norm", "layer_output_norm", TensorSource(("output_norm",), is_of_model=True)),
    # Attention in the layers of Nemotron-H.
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
}
