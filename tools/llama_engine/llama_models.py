"""The models of `tools/llama matrix`: those of `tools/bench files`, and those that the engine `llama` needs besides.

They are tiny ones of architectures whose memories only llama.cpp's library has: an indexer chooses the tokens that
attention reads, fewer than the prompt has.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from tools.benchmarks.file_models import (
    CASES,
    EXPERT_SIZE,
    HEADS,
    LATENT,
    LOCAL,
    PIXTRAL,
    ROUTED,
    VISION,
    WIDE,
    WINDOW,
    Case,
    State,
)


def hy_names(state: State) -> State:
    """Renames tensors as on the hub. transformers saves them with other names than it reads."""
    changes = {
        r"\.hc_pre\.(hc_attn_layer|hc_mlp_layer)\.": r".\1.hc_pre.",
        r"\.hc_pre\.hc_head\.": r".hc_head.",
        r"(\.mlp\..*)linear_gate": r"\1gate_proj",
    }
    of_hub = dict[str, torch.Tensor]()
    for name, tensor in state.items():
        for pattern, other in changes.items():
            name = re.sub(pattern, other, name)
        of_hub[name] = tensor
    return of_hub


def deepseek_names(state: State) -> State:
    """Renames tensors as on the hub. Experts get random numbers of 4 bits, two a byte, with a scale for 32 of them."""
    of_hub = dict[str, torch.Tensor]()
    for name, tensor in state.items():
        name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_").replace("embed_tokens.", "embed.")
        name = name.replace(".attn.norm.", ".attn.kv_norm.")
        if ".experts." in name:
            rows, columns = tensor.shape
            of_hub[name.replace(".weight", ".scale")] = torch.full((rows, columns // 32), 122, dtype=torch.uint8)
            tensor = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        of_hub[name] = tensor
    return of_hub


_LONG_ROPE = CASES["phi3/longrope"].sizes
_LONG_POSITIONS: Any = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131_072}
_INDEXER: Any = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 64}
_SPARSE = LATENT | _INDEXER | {"q_lora_rank": 64, "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
_SIGMOID = {"scoring_func": "sigmoid"}
_WINDOW_SIZES = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 64, "kv_lora_rank": 96,
    "head_dim": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}  # fmt: skip
_IN_WINDOW = {f"swa_{name}": size for name, size in _WINDOW_SIZES.items()}
_BLOCKS_HUB = {"sparse_num_index_heads": 2, "sparse_index_dim": 64, "sparse_block_size": 16, "sparse_topk_blocks": 4,
    "sparse_local_block": 1}  # fmt: skip
_KDA_HUB = {"head_dim": 32, "num_heads": HEADS, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}

LLAMA_CASES = CASES | {
    "deepseek32": Case("deepseek_v32", _SPARSE, hub=_SIGMOID),
    "deepseek4": Case("deepseek_v4", ROUTED | _INDEXER | {"head_dim": 128, "num_key_value_heads": 1, "q_lora_rank": 64,
        "n_shared_experts": 1, "sliding_window": WINDOW, "o_groups": 2, "o_lora_rank": 64, "rope_parameters": None,
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
        "compressed_sparse_attention"], "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]},
        hub={"compress_ratios": [0, 4, 128, 4], "num_hash_layers": 1, "qk_rope_head_dim": 16, "rope_parameters": None},
        change=deepseek_names),
    "dots3note": Case("dots3_note_text", _SPARSE | _IN_WINDOW | {"sliding_window": WINDOW, "rope_parameters": None,
        "shared_experts_intermediate_size": EXPERT_SIZE,
        "layer_types": ["indexed_attention", "sliding_attention", "sliding_attention", "indexed_attention"]},
        hub=_SIGMOID | _IN_WINDOW | {"sliding_window_size": WINDOW, "rope_parameters": None, "rope_theta": 10000.0,
        "swa_rope_theta": 10000.0, "first_k_dense_replace": 1}),
    "glm-dsa": Case("glm_moe_dsa", _SPARSE | {"indexer_types": ["full", "full", "shared", "shared"]}, hub=_SIGMOID),
    "glm5-next": Case("glm5_next", _SPARSE | {"qk_rope_head_dim": 0, "index_kpool": 4, "linear_head_dim": 32,
        "linear_num_heads": HEADS, "layer_types": ["linear_attention", "indexed_attention"] * 2,
        "indexer_types": ["full"] * 4, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        hub=_SIGMOID | {"architectures": ["Glm5NextForConditionalGeneration"], "mla_use_nope": True,
        "linear_attn_config": _KDA_HUB, "first_k_dense_replace": 1}, vision=VISION),
    "hy_v4": Case("hy_v4", _SPARSE | {"indexer_types": ["full", "shared", "full", "shared"]}, hub={}, change=hy_names),
    # The indexer is idle: its choice needs contexts of one sequence, and flash attention.
    "minimax-m3": Case("minimax_m3_vl", WIDE | LOCAL | {"dense_intermediate_size": 256, "rotary_dim": 64,
        "shared_intermediate_size": EXPERT_SIZE, "index_n_heads": 2, "index_head_dim": 64,
        "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
        hub=_SIGMOID | {"architectures": ["MiniMaxM3SparseForCausalLM"], "sparse_attention_config": _BLOCKS_HUB,
        "moe_layer_freq": [0, 1, 1, 1], "n_shared_experts": 1}, vision=PIXTRAL),
    # As Phi-3 with 131,072 positions: the library uses other factors once the memory has more than 4,096 cells.
    "phi3/longrope-128k": replace(
        CASES["phi3/longrope"],
        sizes=_LONG_ROPE
        | _LONG_POSITIONS
        | {"rope_parameters": _LONG_ROPE["rope_parameters"] | {"original_max_position_embeddings": 4096}},
    ),
}  # fmt: skip
"""The cases by name: an architecture, or architecture/variant."""
