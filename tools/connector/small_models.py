"""Small models with made-up weights, for lives of vLLM. Runs in vLLM's environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias

VOCABULARY, CONTEXT = 2048, 2048

Kind: TypeAlias = Literal["llama", "hybrid"]
DTYPES: dict[Kind, str] = {"llama": "float32", "hybrid": "bfloat16"}


def make(kind: Kind, folder: Path) -> None:
    """Writes a Llama of two layers, or a Qwen3-Next: three gated delta nets, then one layer of attention."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3NextConfig

    torch.manual_seed(1)
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,
    }
    config = LlamaConfig(num_hidden_layers=2, **sizes) if kind == "llama" else Qwen3NextConfig(**_HYBRID, **sizes)
    AutoModelForCausalLM.from_config(config).to(getattr(torch, DTYPES[kind])).save_pretrained(folder)


_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
