"""A tiny trained model whose weights come in a file that transformers does not read: stories260K.

It becomes a folder that `from_pretrained` loads, without a tokenizer, which nothing here needs.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from diskprefix.errors import ModelError
from diskprefix.model.load.gguf import quiet_transformers

STORIES, FILE = "stories260k", "stories260K.bin"


def converted(source: Path, folder: Path) -> Path | None:
    """Returns the model as a folder that transformers loads, made inside `folder`; None if the file is not in `source`
    or in a folder inside it.

    Raises `ModelError` if the file is not what it should be.
    """
    found = next(iter(sorted(source.rglob(FILE))), None) if source.is_dir() else None
    if found is None:
        return None
    quiet_transformers()
    made = folder / STORIES
    try:
        read_llama2c(found).save_pretrained(made)
    except (struct.error, ValueError, KeyError, RuntimeError) as error:
        raise ModelError(f"{found} is not a weight file of {STORIES}: {error}") from error
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
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    return model.eval()


def _half_split(stacked: torch.Tensor, head_dim: int) -> torch.Tensor:
    """From rotary pairs side by side to pairs half a head apart. Shape [layers, heads × head_dim, dim] in and out."""
    layers, rows, dim = stacked.shape
    pairs = stacked.view(layers, rows // head_dim, head_dim // 2, 2, dim)
    return pairs.transpose(2, 3).reshape(layers, rows, dim)
