"""The memory of this machine: how fast it is read, and how much of it a token reads."""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch

from diskprefix.runtime.files.gguf.gguf_file import block_of, part_paths, read_tensors, within_block

_EMBEDDINGS, _LAYER_EMBEDDINGS = "token_embd.weight", "per_layer_token_embd.weight"
"""A token reads one row of them, but all of the former if it is the output's weight, too."""


def read_bandwidth() -> float:
    """Returns the read bandwidth of memory with all threads, in GB/s: the best of seven runs. Decoding a token of a
    dense model reads about as many bytes as its file has."""
    memory, best_s = torch.ones(1 << 27, dtype=torch.int64), math.inf
    for _ in range(7):
        begun = time.perf_counter()
        memory.sum()
        best_s = min(best_s, time.perf_counter() - begun)
    return memory.nbytes / best_s / 1e9


def bytes_of_a_token(file: Path) -> int:
    """Returns how many bytes of a `.gguf` file's weights decoding a token reads: without embeddings that are not the
    output's, draft layers, and the experts that are not chosen. Raises `ModelError`."""
    header, tensors = read_tensors(part_paths(file))
    prefix = header.shown("general.architecture")
    blocks, drafts, experts, used = (
        header.values.get(f"{prefix}.{key}", 0)
        for key in ("block_count", "nextn_predict_layers", "expert_count", "expert_used_count")
    )
    left_out, total = {_LAYER_EMBEDDINGS}, 0.0
    if any(tensor.name == "output.weight" for tensor in tensors):
        left_out.add(_EMBEDDINGS)
    for tensor in tensors:
        if tensor.name in left_out or (drafts and block_of(tensor.name) >= blocks - drafts):
            continue
        share = used / experts if experts and within_block(tensor.name).endswith("_exps") else 1.0
        total += math.prod(tensor.stored_shape) * tensor.dtype.itemsize * share
    return round(total)
