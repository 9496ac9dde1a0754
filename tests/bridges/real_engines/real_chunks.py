"""Real KV in chunks of 256 tokens, as LMCache lays them out: computed once, and kept in a file."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diskprefix.prefixstore.store.codec.planes import Bytes

CHUNK_TOKENS = 256
PROMPT_CHUNKS = 4
"""The chunks of a prompt."""
_MOST_TEXT = 200_000
"""Characters of one file, so that texts of several kinds are used."""


class RealChunks(NamedTuple):
    """Chunks, uint8 of shape [chunks, chunk_bytes], of tensors in bfloat16 of the shape `shape`: keys and values,
    layers, tokens, heads times the size of a head."""

    content: Bytes
    shape: tuple[int, int, int, int]

    @property
    def heads(self) -> tuple[int, int]:
        """The heads and their size, as of a Llama of this size."""
        return self.shape[3] // 64, 64


def real_chunks(model: Path, texts: Path, file: Path, num_chunks: int) -> RealChunks:
    """Returns the KV that a model computes of the texts in a folder. Computes it unless `file` has it already."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (2, config.num_hidden_layers, CHUNK_TOKENS, config.num_key_value_heads * dim)
    chunk_bytes = 2 * int(np.prod(shape))
    if not file.exists() or file.stat().st_size < num_chunks * chunk_bytes:
        # Threads of torch that share processors with others wait for each other most of the time.
        torch.set_num_threads(1)
        decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        tokens = _tokens(AutoTokenizer.from_pretrained(model), texts)
        partial = file.with_suffix(".part")
        with partial.open("wb") as written, torch.inference_mode():
            for _ in range(-(-num_chunks // PROMPT_CHUNKS)):
                ids = torch.tensor([list(islice(tokens, PROMPT_CHUNKS * CHUNK_TOKENS))])
                cache = decoder(ids, use_cache=True, logits_to_keep=1).past_key_values
                # [2, layers, tokens, heads times dim]
                kv = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers], 1)
                kv = kv.transpose(2, 3).flatten(3)
                for start in range(0, kv.shape[2], CHUNK_TOKENS):
                    chunk = kv[:, :, start : start + CHUNK_TOKENS].contiguous()
                    assert chunk.shape == shape
                    written.write(chunk.view(torch.uint8).numpy().tobytes())
        partial.rename(file)
    content = np.fromfile(file, np.uint8, num_chunks * chunk_bytes).reshape(num_chunks, chunk_bytes)
    return RealChunks(content, shape)


def _tokens(tokenizer: object, texts: Path) -> Iterator[int]:
    """Yields the token ids of all texts, of each file from its beginning. Raises `StopIteration` at their end."""
    files = sorted(
        path for path in texts.rglob("*") if path.suffix in {".txt", ".md", ".json", ".jsonl", ".py", ".traj"}
    )
    read = (path.read_text(encoding="utf-8", errors="replace")[:_MOST_TEXT] for path in files)
    return chain.from_iterable(tokenizer.encode(text) for text in read if text)  # type: ignore[attr-defined]
