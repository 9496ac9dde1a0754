"""KV state to measure a store with, made up so that it compresses as that of a real model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from diskprefix.kv.layout import Layout
from tests.synthetic_model import dense_layout

BLOCK_SIZE = 256
_CHANNEL_SPREAD = 0.5
"""Channels of keys and values differ in size. With so much spread (standard deviation, in powers of two) normal numbers
compress as those of SmolLM2 do: 1.42 to 1, those 1.41."""

SMOLLM2 = dense_layout(layers=30, heads=3, head_dim=64, dtype=torch.bfloat16, vocab_size=49152)
"""The embedded model's: 23 040 bytes a token."""


@dataclass(frozen=True, eq=False)
class KVSample:
    """Raw payloads of full blocks, C-contiguous."""

    layout: Layout
    blocks: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.blocks))


def synthetic_sample(num_blocks: int) -> KVSample:
    """Returns normal numbers in bf16, each channel with a scale of its own."""
    rng = np.random.default_rng(0)
    (group,) = SMOLLM2.groups
    shape = (len(group.specs), group.heads, BLOCK_SIZE, group.head_dim)
    scales = np.exp2(rng.normal(0.0, _CHANNEL_SPREAD, (*shape[:2], 1, shape[3]))).astype(np.float32)
    blocks = []
    for _ in range(num_blocks):
        values = rng.standard_normal(shape, dtype=np.float32) * scales
        blocks.append((values.view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint8).data)
    return KVSample(SMOLLM2, tuple(blocks))
