"""Two tiny trained models whose weights come in files that transformers does not read: stories260K and RWKV v4 660K.

Both are small enough to be read whole. What they become are folders that `from_pretrained` loads; without tokenizers,
which nothing here needs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, RwkvConfig, RwkvForCausalLM

from diskprefix.errors import ModelError
from diskprefix.model.load.gguf import quiet_transformers

Weights = dict[str, torch.Tensor]

_RWKV_MAGIC, _RWKV_VERSION = 0x67676D66, 100


@dataclass(frozen=True)
class WeightFile:
    """`file` is its name in the folder where such files are, or in one inside it."""

    name: str
    file: str
    read: Callable[[Path], PreTrainedModel]


def converted(weights: WeightFile, source: Path, folder: Path) -> Path | None:
    """Returns the model as a folder that transformers loads, made inside `folder`; None if the file is not in `source`.

    Raises `ModelError` if the file is not what it should be.
    """
    found = next(iter(sorted(source.rglob(weights.file))), None) if source.is_dir() else None
    if found is None:
        return None
    quiet_transformers()
    made = folder / weights.name
    try:
        weights.read(found).save_pretrained(made)
    except (struct.error, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{found} is not a weight file of {weights.name}: {error}") from error
    return made


def read_llama2c(path: Path) -> LlamaForCausalLM:
    """The first format of llama2.c: seven sizes, then all weights in fp32, the layers of each matrix together."""
    data = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, positions = struct.unpack_from("<7i", data)
    values = torch.from_numpy(np.frombuffer(data, dtype="<f4", offset=28).copy())
    head_dim, kv_dim, taken = dim // heads, dim // heads * kv_heads, 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal taken
        start, taken = taken, taken + int(np.prod(shape))
        return values[start:taken].view(shape)

    weights = {"model.embed_tokens.weight": take(vocab, dim)}
    by_layer = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": _half_split(take(layers, dim, dim), head_dim),
        "self_attn.k_proj": _half_split(take(layers, kv_dim, dim), head_dim),
        "self_attn.v_proj": take(layers, kv_dim, dim),
        "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    for name, stacked in by_layer.items():
        weights |= {f"model.layers.{i}.{name}.weight": stacked[i] for i in range(layers)}
    weights["model.norm.weight"] = take(dim)
    config = LlamaConfig(
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    return _with_weights(model, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})


def _half_split(stacked: torch.Tensor, head_dim: int) -> torch.Tensor:
    """From rotary pairs side by side to pairs half a head apart. Shape [layers, heads × head_dim, dim] in and out."""
    layers, rows, dim = stacked.shape
    pairs = stacked.view(layers, rows // head_dim, head_dim // 2, 2, dim)
    return pairs.transpose(2, 3).reshape(layers, rows, dim)


_RWKV_NAMES = (
    ("emb.", "rwkv.embeddings."),
    ("ln_out.", "rwkv.ln_out."),
    ("blocks.", "rwkv.blocks."),
    (".ln0.", ".pre_ln."),
    (".att.", ".attention."),
    (".ffn.", ".feed_forward."),
    (".time_mix_k", ".time_mix_key"),
    (".time_mix_v", ".time_mix_value"),
    (".time_mix_r", ".time_mix_receptance"),
)


def read_rwkv_cpp(path: Path) -> RwkvForCausalLM:
    """The format of rwkv.cpp, fp32: six sizes, then tensors with their names, the last dimension first."""
    data = path.read_bytes()
    magic, version, vocab, dim, layers, _ = struct.unpack_from("<6I", data)
    if (magic, version) != (_RWKV_MAGIC, _RWKV_VERSION):
        raise ValueError(f"magic {magic:#x}, version {version}")
    weights, start = {}, 24
    while start < len(data):
        dimensions, name_bytes, dtype = struct.unpack_from("<3I", data, start)
        if dtype:
            raise ValueError("its tensors are not fp32")
        shape = struct.unpack_from(f"<{dimensions}I", data, start + 12)[::-1]
        start += 12 + 4 * dimensions
        name = data[start : start + name_bytes].decode()
        count = int(np.prod(shape))
        values = np.frombuffer(data, dtype="<f4", count=count, offset=start + name_bytes).copy()
        weights[_renamed(name)] = _rwkv_tensor(name, torch.from_numpy(values).view(shape))
        start += name_bytes + 4 * count
    hidden = weights["rwkv.blocks.0.feed_forward.key.weight"].shape[0]
    config = RwkvConfig(
        vocab_size=vocab, hidden_size=dim, num_hidden_layers=layers, intermediate_size=hidden, rescale_every=0
    )
    return _with_weights(RwkvForCausalLM(config), weights)


def _renamed(name: str) -> str:
    for theirs, ours in _RWKV_NAMES:
        name = name.replace(theirs, ours)
    return name


def _rwkv_tensor(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name.endswith("time_decay"):
        # rwkv.cpp keeps what the model computes of it.
        return torch.log(-tensor)
    return tensor.view(1, 1, -1) if ".time_mix_" in name else tensor


def _with_weights(model: PreTrainedModel, weights: Weights) -> PreTrainedModel:
    model.load_state_dict(weights)
    return model.eval()


STORIES = WeightFile("stories260k", "stories260K.bin", read_llama2c)
RWKV = WeightFile("rwkv-v4-660k", "tiny-rwkv-4v0-660K-FP32.bin", read_rwkv_cpp)
