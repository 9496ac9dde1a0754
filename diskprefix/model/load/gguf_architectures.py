"""Architectures of GGUF files that transformers does not read: the configuration, and the parameter of each tensor.

`deepseek2` is what llama.cpp writes of DeepSeek V2 and V3 and all that have their layers: Kimi K2, GLM 4.7 Flash,
Moonlight, Youtu. Nothing in such a file is permuted. Newer files hold the matrix that expands latents as two: the part
of the keys, turned, and that of the values. Of `gpt-oss`, transformers reads only a part.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
from transformers.integrations.gguf.gguf_conversion_mapping import (
    DENSE_DECODER_RENAMINGS,
    GGUF_ARCHS,
    ConcatenateRows,
)

from diskprefix.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_LATENT, _GPT_OSS = "deepseek2", "gpt-oss"
_SOFTMAX, _SIGMOID = 1, 2
"""How a router makes weights of its scores, as the file counts it."""
_RENAMED = {
    "attn_norm": "input_layernorm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_RENAMED_OF_GPT_OSS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}


def know_architectures() -> None:
    """Tells transformers how these architectures are read."""
    GGUF_CONFIG_ARCHS.update({_LATENT: _latent_config, _GPT_OSS: _gpt_oss_config})
    GGUF_ARCHS.update({_LATENT: _latent_weights, _GPT_OSS: _gpt_oss_weights})


class FileValues:
    """The values in a file's metadata that belong to its architecture."""

    def __init__(self, architecture: str, metadata: Mapping[str, Any], names: Collection[str]) -> None:
        self._architecture, self._metadata, self._names = architecture, metadata, names

    def __call__(self, name: str) -> Any:
        """Returns a value. Raises `ModelError` if it is not there."""
        found = self.get(name)
        if found is None:
            raise ModelError(f"the file lacks {self._architecture}.{name}")
        return found

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(f"{self._architecture}.{name}", default)

    def common(self) -> dict[str, Any]:
        """Returns what all configurations have. Raises `ModelError` if something is not there."""
        tokens = {"bos": "bos", "eos": "eos", "pad": "padding"}
        return {
            "vocab_size": self._metadata["tokenizer.ggml.tokens"],
            "hidden_size": self("embedding_length"),
            "num_hidden_layers": self("block_count") - self.get("nextn_predict_layers", 0),
            "num_attention_heads": self("attention.head_count"),
            "max_position_embeddings": self("context_length"),
            "rms_norm_eps": self("attention.layer_norm_rms_epsilon"),
            "rope_parameters": {"rope_type": "default", "rope_theta": self("rope.freq_base")},
            "tie_word_embeddings": "output.weight" not in self._names,
            **{f"{kind}_token_id": self._metadata.get(f"tokenizer.ggml.{of}_token_id") for kind, of in tokens.items()},
        }


def _latent_config(metadata: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Returns the configuration that `metadata` and the `names` of the tensors describe. Raises `ModelError` if a value
    is not there, or if transformers has no model that computes so."""
    value = FileValues(_LATENT, metadata, names)
    optional = value.get
    if optional("attention.temperature_scale"):
        raise ModelError("queries that are scaled by their position (Mistral Large 3) are not served")
    rotary_dim, found = value("rope.dimension_count"), value.common()
    # Newer files have the sizes of heads under these names, and those of the latents under the older ones.
    key_dim = optional("attention.key_length_mla") or value("attention.key_length")
    value_dim = optional("attention.value_length_mla") or value("attention.value_length")
    found |= {
        "intermediate_size": value("feed_forward_length"),
        "num_key_value_heads": found["num_attention_heads"],
        "q_lora_rank": optional("attention.q_lora_rank"),
        "kv_lora_rank": value("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary_dim,
        "qk_nope_head_dim": key_dim - rotary_dim,
        "v_head_dim": value_dim,
        "first_k_dense_replace": optional("leading_dense_block_count", 0),
    }
    num_experts, is_normed = optional("expert_count", 0), bool(optional("expert_weights_norm", False))
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in names)
    # Files without this value are older than the models that need another one than this.
    gate = optional("expert_gating_func") or (_SIGMOID if has_bias else _SOFTMAX)
    if num_experts:
        groups, used_groups = optional("expert_group_count", 1), optional("expert_group_used_count", 1)
        found |= {
            "n_routed_experts": num_experts,
            "num_experts_per_tok": value("expert_used_count"),
            "n_shared_experts": optional("expert_shared_count", 0),
            "moe_intermediate_size": value("expert_feed_forward_length"),
            "routed_scaling_factor": optional("expert_weights_scale", 1.0),
            "norm_topk_prob": is_normed,
            "n_group": groups,
            "topk_group": used_groups,
            "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        }
    else:
        found["first_k_dense_replace"] = found["num_hidden_layers"]
    if num_experts and gate == _SOFTMAX and not is_normed:
        return found | {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}
    if num_experts and gate != _SIGMOID:
        raise ModelError(f"experts that are weighted so are not served: expert_gating_func {gate}, normed: {is_normed}")
    return found | {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}


def _gpt_oss_config(metadata: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    value = FileValues(_GPT_OSS, metadata, names)
    found = value.common()
    # How all of its models scale positions, as far as no file says.
    found["rope_parameters"]["truncate"] = False
    return found | {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "intermediate_size": value.get("expert_feed_forward_length") or value("feed_forward_length"),
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": value.get("attention.key_length", 64),
        "sliding_window": value.get("attention.sliding_window", 128),
        "num_local_experts": value("expert_count"),
        "num_experts_per_tok": value("expert_used_count"),
    }


def _gpt_oss_weights(_: PreTrainedConfig) -> list[Any]:
    """Returns how transformers names and changes the tensors. Its experts have gate and up turn about, and matrices are
    turned."""
    kinds = {"weight": "", "bias": "_bias"}
    return [
        *_renamings(_RENAMED_OF_GPT_OSS),
        WeightRenaming(r"\.attn_sinks\.weight", ".self_attn.sinks"),
        *(
            WeightConverter(
                [rf"\.ffn_gate_exps\.{kind}", rf"\.ffn_up_exps\.{kind}"],
                f".mlp.experts.gate_up_proj{end}",
                operations=[TurnedExperts()],
            )
            for kind, end in kinds.items()
        ),
        *(
            WeightConverter([rf"\.ffn_down_exps\.{kind}"], f".mlp.experts.down_proj{end}", operations=[TurnedExperts()])
            for kind, end in kinds.items()
        ),
    ]


def _renamings(names: Mapping[str, str]) -> list[Any]:
    return [
        *DENSE_DECODER_RENAMINGS,
        WeightRenaming(r"^output_norm\.", "model.norm."),
        *(WeightRenaming(rf"\.{name}\.", f".{parameter}.") for name, parameter in names.items()),
    ]


def _latent_weights(_: PreTrainedConfig) -> list[Any]:
    """Returns how transformers names and changes the tensors."""
    return [
        *_renamings(_RENAMED),
        WeightRenaming(r"\.exp_probs_b\.bias", ".mlp.gate.e_score_correction_bias"),
        WeightRenaming(r"\.ffn_down_exps\.weight", ".mlp.experts.down_proj"),
        WeightConverter(
            [r"\.ffn_gate_exps\.weight", r"\.ffn_up_exps\.weight"],
            ".mlp.experts.gate_up_proj",
            operations=[ConcatenateRows(dim=1)],
        ),
        WeightConverter(
            [r"\.attn_k_b\.weight", r"\.attn_v_b\.weight"],
            ".self_attn.kv_b_proj.weight",
            operations=[JoinedExpansion()],
        ),
    ]


class JoinedExpansion(ConversionOps):  # type: ignore[misc]
    """Makes the matrix that expands latents, [heads × (key_dim + value_dim), latent_dim], of [heads, latent_dim,
    key_dim] and [heads, value_dim, latent_dim]."""

    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        (keys,), (values,) = (input_dict[pattern] for pattern in source_patterns)
        return {target_patterns[0]: torch.cat([keys.transpose(1, 2), values], dim=1).flatten(0, 1)}


class TurnedExperts(ConversionOps):  # type: ignore[misc]
    """Puts the rows of its tensors [experts, rows, ..] in turn, and exchanges rows and columns of matrices."""

    def convert(
        self,
        input_dict: dict[str, list[torch.Tensor]],
        source_patterns: list[str],
        target_patterns: list[str],
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        parts = [input_dict[pattern][0] for pattern in source_patterns]
        rows = torch.stack(parts, dim=2).flatten(1, 2) if len(parts) > 1 else parts[0]
        return {target_patterns[0]: rows.transpose(1, 2) if rows.ndim > 2 else rows}
