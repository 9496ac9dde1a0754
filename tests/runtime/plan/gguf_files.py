"""GGUF files as llama.cpp's converter writes them from models of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.runtime.plan import tiny

F32 = gguf.GGMLQuantizationType.F32
Tensors = dict[str, torch.Tensor]
"""By the names of llama.cpp."""
HEADS, KV_HEADS = 4, 2
BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": len(tiny.tokens()),
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
RMS = {"attention.layer_norm_rms_epsilon": 3e-3}
EPSILON = {"rms_norm_eps": 3e-3}


def rope(base: float = 250000.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": base, **more}


def made(model_type: str, sizes: dict[str, Any]) -> PreTrainedModel:
    """A random model in float32, of numbers that bfloat16 has. No bias and no norm is what it starts with."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **(BASE | sizes))
    return filled(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def filled(model: PreTrainedModel) -> PreTrainedModel:
    for name, tensor in model.state_dict().items():
        if name.endswith("act_fn.eps"):
            # No plan computes with another bound.
            continue
        if name.endswith(("_min", "_max")):
            tensor.fill_(-2.5 if name.endswith("_min") else 2.25)
        elif tensor.ndim < 2:
            tensor += 0.2 * torch.randn_like(tensor)
        else:
            tensor.normal_(0, 1 if "embed" in name else 1.2 * tensor.shape[-1] ** -0.5)
        tensor.copy_(tensor.bfloat16())
    model.tie_weights()
    return model.eval()


def paired(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


names_of = cache(gguf.get_tensor_name_map)


NAMED_AS = {"bailingmoe2": "glm4moe", "mellum": "qwen3moe", "cohere2moe": "glm4moe", "granite_swa": "granitehybrid"}
"""Architectures that the library does not know, and those whose tensors have the same names."""
UNKNOWN = {
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "self_attn.sinks": "attn_sinks",
    "shared_mlp.input_linear": "ffn_up_shexp",
}
"""Names of transformers' parameters that the library does not know, because published folders have others."""


def kind_of(architecture: str) -> gguf.MODEL_ARCH:
    wanted = NAMED_AS.get(architecture, architecture)
    return next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == wanted)


def tensors_of(model: PreTrainedModel, architecture: str, *, is_split: bool = True) -> Tensors:
    has_head = not model.config.tie_word_embeddings
    state = {name: one for name, one in model.state_dict().items() if has_head or name != "lm_head.weight"}
    return stored(state, architecture, model.config.num_hidden_layers, is_split=is_split)


def stored(state: Mapping[str, torch.Tensor], architecture: str, num_layers: int, *, is_split: bool = True) -> Tensors:
    """Returns the tensors of a file, views where it has the same numbers. `is_split`: as newer files have the matrix
    that expands latents."""
    names, found, experts = names_of(kind_of(architecture), num_layers), Tensors(), dict[str, list[torch.Tensor]]()
    for name, tensor in state.items():
        stem, _, end = name.rpartition(".")
        if end not in ("weight", "bias"):
            stem, end = name, "weight"
        before, _, part = stem.rpartition(".")
        at = f"blk.{stem.split('.')[2]}." if "layers" in stem else ""
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(part, 0)
        if architecture in ("arcee", "granite_swa", "llama", "mistral3") and heads:
            tensor = paired(tensor, heads)
        if architecture in ("gemma", "gemma2", "gemma3", "qwen35", "qwen35moe", "qwen3next") and "norm" in stem:
            tensor = tensor + 1
        if architecture == "nemotron" and "norm" in stem and end == "weight":
            tensor = tensor + 1
        if part == "query_key_value":
            tensor = tensor.reshape(HEADS, 3, -1, *tensor.shape[1:]).swapaxes(0, 1).reshape(tensor.shape)
        if "act_fn" in stem:
            experts.setdefault(f"xielu.{part}", []).append(tensor.reshape(()))
        elif (inner := ".".join(stem.split(".")[3:])) in UNKNOWN:
            found[f"{at}{UNKNOWN[inner]}.{end}"] = tensor
        elif part == "kv_b_proj" and is_split and architecture != "minicpm3":
            keys, values = tensor.view(HEADS, -1, tensor.shape[-1]).chunk(2, dim=1)
            found |= {f"{at}attn_k_b.weight": keys.transpose(1, 2), f"{at}attn_v_b.weight": values}
        elif part in ("e_score_correction_bias", "expert_bias"):
            found[f"{at}exp_probs_b.bias"] = tensor
        elif part == "gate_up_proj" and "experts" in before:
            gate, up = tensor.chunk(2, dim=1)
            found |= {f"{at}ffn_gate_exps.weight": gate, f"{at}ffn_up_exps.weight": up}
        elif before.rpartition(".")[2].isdecimal() and "experts" in before:
            experts.setdefault(f"{at}ffn_{part.removesuffix('_proj')}_exps.weight", []).append(tensor)
        else:
            found[f"{names.get_name(stem)}.{end}"] = tensor
    if architecture == "bailingmoe2":
        for at in [name.removesuffix("attn_q.weight") for name in found if name.endswith("attn_q.weight")]:
            found[f"{at}attn_qkv.weight"] = torch.cat([found.pop(f"{at}attn_{part}.weight") for part in "qkv"])
            found[f"{at}ffn_norm.weight"] = found.pop(f"{at}post_attention_norm.weight")
    return found | {name: torch.stack(one) for name, one in experts.items()}


def written(
    path: Path,
    architecture: str,
    config: Any,
    values: dict[str, Any],
    tensors: Tensors,
    kind: gguf.GGMLQuantizationType = F32,
    more: Sequence[str] = (),
    raw: Mapping[str, tuple[gguf.GGMLQuantizationType, np.ndarray[Any, Any]]] | None = None,
) -> Path:
    """Writes a file whose matrices have this type. `values` replace metadata, or leave them out. `more` are special
    tokens. `raw` are further tensors by their types and bytes. An encoder has neither `config` nor tokens."""
    writer = gguf.GGUFWriter(path, architecture)
    common: dict[str, Any] = (
        {}
        if config is None
        else {
            "block_count": config.num_hidden_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": getattr(config, "num_key_value_heads", None),
        }
    )
    for key, value in (common | values).items():
        if value is not None:
            tiny.add_value(writer, f"{architecture}.{key}", value)
    if config is not None:
        tiny.add_tokenizer(writer, more=more)
        writer.add_pad_token_id(2)
    for name, tensor in tensors.items():
        numbers = np.ascontiguousarray(tensor.numpy())
        if name.startswith("xielu."):
            writer.add_array(name, numbers.tolist())
            continue
        type_ = kind if is_quantised(name, tensor) else F32
        writer.add_tensor(name, gguf.quantize(numbers, type_), raw_dtype=type_)
    for name, (type_, content) in (raw or {}).items():
        writer.add_tensor(name, content, raw_dtype=type_)
    tiny.finish(writer)
    return path


def is_quantised(name: str, tensor: torch.Tensor) -> bool:
    return tensor.ndim > 1 and tensor.shape[-1] % 32 == 0 and "ffn_gate_inp" not in name


# DeepSeek's layers: latent attention and mixtures of experts.

WIDTH, ROTARY, LATENT = 32, 16, 64
"""Of a key without its rotated part and of a value, of that part, and of what a token leaves."""
DEEPSEEK = {
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": LATENT,
    "qk_nope_head_dim": WIDTH,
    "qk_rope_head_dim": ROTARY,
    "v_head_dim": WIDTH,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-6,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64}
YARN |= {"beta_fast": 32, "beta_slow": 1}
OF_YARN: dict[str, Any] = {"type": "yarn", "factor": 40.0, "original_context_length": 64}
OF_DEEPSEEK: dict[str, Any] = {
    "attention.layer_norm_rms_epsilon": 1e-6,
    "attention.kv_lora_rank": LATENT,
    "rope.dimension_count": ROTARY,
    "rope.freq_base": 10000.0,
    "vocab_size": BASE["vocab_size"],
    "leading_dense_block_count": 1,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 2,
}
MIXTURE = {"expert_count": 8, "expert_used_count": 3}
OLD: dict[str, Any] = {
    "attention.head_count_kv": HEADS,
    "attention.key_length": WIDTH + ROTARY,
    "attention.value_length": WIDTH,
}
NEW: dict[str, Any] = {
    "attention.head_count_kv": 1,
    "attention.key_length": LATENT + ROTARY,
    "attention.value_length": LATENT,
}
NEW |= {"attention.key_length_mla": WIDTH + ROTARY, "attention.value_length_mla": WIDTH}


def of_yarn(multiplier: float) -> dict[str, Any]:
    return {f"rope.scaling.{name}": one for name, one in (OF_YARN | {"yarn_log_multiplier": multiplier}).items()}


# By name: what the configuration has, the metadata for that, and how routers of newer files say that they weigh.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    "V2-Lite": (
        {"model_type": "deepseek_v2", "q_lora_rank": None, "topk_method": "greedy"}
        | {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        MIXTURE | of_yarn(0.0707) | {"expert_weights_scale": 1.0},
        1,
    ),
    "V2": (
        {"model_type": "deepseek_v2", "q_lora_rank": 32, "topk_method": "group_limited_greedy"}
        | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 16.0},
        MIXTURE
        | {"attention.q_lora_rank": 32, "expert_weights_scale": 16.0}
        | {"expert_group_count": 4, "expert_group_used_count": 2},
        1,
    ),
    "V3": (
        {"model_type": "deepseek_v3", "q_lora_rank": 32, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.5, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        MIXTURE
        | of_yarn(0.1)
        | {"attention.q_lora_rank": 32, "expert_weights_scale": 2.5, "expert_weights_norm": True}
        | {"expert_group_count": 2, "expert_group_used_count": 1},
        2,
    ),
    "dense": (
        {"model_type": "deepseek_v3", "q_lora_rank": 32, "first_k_dense_replace": 3},
        {"attention.q_lora_rank": 32, "leading_dense_block_count": 3},
        None,
    ),
}


def deepseek(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    # The tokens at which texts begin and end are those of the class.
    sizes = {name: BASE[name] for name in BASE if not name.endswith("token_id")} | DEEPSEEK | KINDS[kind][0]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**sizes), dtype=torch.float32).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith(("e_score_correction_bias", "norm.weight")):
            tensor.data += torch.randn_like(tensor) * 0.1
        elif tensor.ndim > 1:
            tensor.data.normal_(0, 0.1)
    return model


def write_deepseek(
    path: Path, kind: str, model: PreTrainedModel | None = None, *, is_split: bool = True, **values: Any
) -> Path:
    """Writes a newer file, or an older one where not `is_split`. `values` replace metadata, with __ for a dot."""
    model, (_, of_kind, gating) = model or deepseek(kind), KINDS[kind]
    found = OF_DEEPSEEK | of_kind | (NEW | {"expert_gating_func": gating} if is_split else OLD)
    found |= {key.replace("__", "."): value for key, value in values.items()}
    tensors = tensors_of(model, "deepseek2", is_split=is_split)
    return written(path, "deepseek2", model.config, found, tensors, type_of(model))


def type_of(model: PreTrainedModel) -> gguf.GGMLQuantizationType:
    """Q5_0 is what llama.cpp gives DeepSeek V2 Lite's experts in Q4_K_M, and transformers does not know it."""
    types = gguf.GGMLQuantizationType
    return types.Q5_0 if model.config.q_lora_rank is None else types.Q8_0
