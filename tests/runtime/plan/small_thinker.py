"""SmallThinker in float32, as its equations are written: transformers has no class of it.

The equations are those of llama.cpp's graph (`src/models/smallthinker.cpp`): routers read what a layer is given, before
attention and without a norm; experts have ReLU; the first of each four layers has neither a window nor positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from torch.nn.functional import relu

from tests.runtime.plan import tiny
from tests.runtime.plan.gguf_files import Tensors, written

WIDTH, HEADS, KV_HEADS, HEAD, LAYERS, EXPERTS, CHOSEN, INNER = 64, 4, 2, 16, 5, 8, 3, 32
BASE, EPSILON, WINDOW = 250000.0, 3e-3, 16


class Sizes:
    """What `written` asks of a configuration."""

    num_hidden_layers, max_position_embeddings, hidden_size, intermediate_size = LAYERS, 4096, WIDTH, INNER
    num_attention_heads, num_key_value_heads = HEADS, KV_HEADS


def values(*, has_windows: bool, is_sigmoid: bool) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes beside the usual sizes."""
    windows = {"attention.sliding_window": WINDOW} if has_windows else {}
    return windows | {
        "attention.layer_norm_rms_epsilon": EPSILON,
        "attention.key_length": HEAD,
        "attention.value_length": HEAD,
        "rope.freq_base": BASE,
        "expert_count": EXPERTS,
        "expert_used_count": CHOSEN,
        "expert_feed_forward_length": INNER,
        "expert_gating_func": 2 if is_sigmoid else 1,
    }


def tensors() -> Tensors:
    """Random tensors of numbers that bfloat16 has, by llama.cpp's names."""
    random = torch.Generator().manual_seed(0)
    vocab, keys = len(tiny.tokens()), KV_HEADS * HEAD
    shapes: dict[str, tuple[int, ...]] = {"output_norm": (WIDTH,)}
    shapes |= dict.fromkeys(("token_embd", "output"), (vocab, WIDTH))
    for i in range(LAYERS):
        block = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "attn_q": (HEADS * HEAD, WIDTH)}
        block |= {"attn_k": (keys, WIDTH), "attn_v": (keys, WIDTH), "attn_output": (WIDTH, HEADS * HEAD)}
        block |= {"ffn_gate_inp": (EXPERTS, WIDTH), "ffn_down_exps": (EXPERTS, WIDTH, INNER)}
        block |= {f"ffn_{part}_exps": (EXPERTS, INNER, WIDTH) for part in ("gate", "up")}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in block.items()}
    made = Tensors()
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=random)
        scale = 1.0 if name == "token_embd" else 1.2 * shape[-1] ** -0.5
        made[f"{name}.weight"] = (1 + 0.2 * noise if len(shape) == 1 else scale * noise).bfloat16().float()
    return made


def write(path: Path, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32, **options: bool) -> Path:
    return written(path, "smallthinker", Sizes, values(**options), tensors(), kind)


def logits(tokens: torch.Tensor, *, has_windows: bool, is_sigmoid: bool) -> torch.Tensor:
    """Returns the logits of each token, [tokens, vocab]."""
    given = tensors()
    hidden = given["token_embd.weight"][tokens]
    positions = torch.arange(len(tokens))
    distance = positions[:, None] - positions
    for i in range(LAYERS):
        of = {name.split(".")[2]: tensor for name, tensor in given.items() if name.startswith(f"blk.{i}.")}
        scores = hidden @ of["ffn_gate_inp"].T
        is_local = has_windows and i % 4 > 0
        seen = (distance >= 0) & (distance < WINDOW if is_local else True)
        hidden = hidden + attended(of, norm(hidden, of["attn_norm"]), seen, rotates=is_local or not has_windows)
        hidden = hidden + mixed(of, norm(hidden, of["ffn_norm"]), scores, is_sigmoid=is_sigmoid)
    return norm(hidden, given["output_norm.weight"]) @ given["output.weight"].T


def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rows * (rows.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight


def attended(of: Tensors, rows: torch.Tensor, seen: torch.Tensor, *, rotates: bool) -> torch.Tensor:
    queries, keys, values = (
        (rows @ of[f"attn_{part}"].T).view(len(rows), -1, HEAD).transpose(0, 1) for part in ("q", "k", "v")
    )
    if rotates:
        queries, keys = rotated(queries), rotated(keys)
    keys, values = (part.repeat_interleave(HEADS // KV_HEADS, dim=0) for part in (keys, values))
    scores = (queries @ keys.mT / HEAD**0.5).masked_fill(~seen, -torch.inf)
    of_heads = (scores.softmax(-1) @ values).transpose(0, 1).reshape(len(rows), -1)
    out: torch.Tensor = of_heads @ of["attn_output"].T
    return out


def rotated(heads: torch.Tensor) -> torch.Tensor:
    angles: torch.Tensor = torch.arange(heads.shape[1])[:, None] * BASE ** -(torch.arange(HEAD // 2) / (HEAD // 2))
    first, second = heads.chunk(2, -1)
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def mixed(of: Tensors, rows: torch.Tensor, scores: torch.Tensor, *, is_sigmoid: bool) -> torch.Tensor:
    """Returns what the best experts of each row give, by weights whose sum is 1."""
    weights, chosen = (scores.sigmoid() if is_sigmoid else scores.softmax(-1)).topk(CHOSEN)
    weights = weights / weights.sum(-1, keepdim=True)
    gates, ups = (torch.einsum("rw,ehw->reh", rows, of[f"ffn_{part}_exps"]) for part in ("gate", "up"))
    of_experts = torch.einsum("reh,ewh->rew", relu(gates) * ups, of["ffn_down_exps"])
    return (weights[..., None] * of_experts.take_along_dim(chosen[..., None], 1)).sum(1)
