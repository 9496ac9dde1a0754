"""KV state to measure a store with: of a real model, from a file, or made up so that it compresses alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from diskprefix.engine.forward import prefill
from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Layout
from diskprefix.model.exact.rehearsal import rehearse
from diskprefix.model.load.loader import load_model
from diskprefix.settings import Settings
from diskprefix.tokens import as_token_ids
from tests.synthetic_model import dense_layout

BLOCK_SIZE = 256
REAL_TEXT = Path(__file__).parents[1] / "prompts" / "agent_system.md"
MODEL_TOKENS = 4096
_CHANNEL_SPREAD = 0.5
"""Channels of keys and values differ in size. With so much spread (standard deviation, in powers of two) normal numbers
compress as those of SmolLM2 do: 1.42 to 1, those 1.41."""

SMOLLM2 = dense_layout(layers=30, heads=3, head_dim=64, dtype=torch.bfloat16, vocab_size=49152)
"""The embedded model's: 23 040 bytes a token."""


@dataclass(frozen=True, eq=False)
class KVSample:
    """Raw payloads of full blocks, C-contiguous. `is_real`: a model computed them."""

    origin: str
    is_real: bool
    layout: Layout
    blocks: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.blocks))


def synthetic_sample(num_blocks: int, layout: Layout = SMOLLM2, *, seed: int = 0) -> KVSample:
    """Normal numbers in bf16, each channel with a scale of its own."""
    rng = np.random.default_rng(seed)
    (group,) = layout.groups
    shape = (len(group.specs), group.heads, BLOCK_SIZE, group.head_dim)
    scales = np.exp2(rng.normal(0.0, _CHANNEL_SPREAD, (*shape[:2], 1, shape[3]))).astype(np.float32)
    blocks = []
    for _ in range(num_blocks):
        values = rng.standard_normal(shape, dtype=np.float32) * scales
        blocks.append((values.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8).data)
    return KVSample("made up", False, layout, tuple(blocks))


def sample_from_model(report: Callable[[str], None]) -> KVSample:
    """Returns the KV that the embedded model computes for the text of the demo's system prompt. Raises `ModelError`."""
    loaded = load_model(Settings(device="cpu", block_size=BLOCK_SIZE), report)
    layout = rehearse(loaded.model)
    text = REAL_TEXT.read_text(encoding="utf-8")
    token_ids = as_token_ids(loaded.tokenizer(text)["input_ids"][:MODEL_TOKENS])
    token_ids = token_ids[: len(token_ids) - len(token_ids) % BLOCK_SIZE]
    arena = KVArena(layout, torch.device("cpu"))
    arena.reserve(len(token_ids))
    report(f"computing the state of {len(token_ids)} tokens")
    with torch.inference_mode():
        prefill(
            loaded.model,
            arena,
            token_ids,
            start=0,
            block_size=BLOCK_SIZE,
            after_step=lambda _: None,
        )
    blocks = tuple(arena.read_tokens(start, BLOCK_SIZE) for start in range(0, len(token_ids), BLOCK_SIZE))
    return KVSample(loaded.name, True, layout, blocks)
