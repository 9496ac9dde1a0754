"""The layout of a model that does not exist."""

from __future__ import annotations

import torch

from diskprefix.kv.layout import Group, LayerSpec, Layout, TensorSpec


def dense_layout(*, layers: int, heads: int, head_dim: int, dtype: torch.dtype, vocab_size: int) -> Layout:
    """Returns the layout of a model whose layers all have keys and values of one shape."""
    specs = (TensorSpec(i, part, heads, head_dim, dtype) for i in range(layers) for part in ("keys", "values"))
    return Layout((LayerSpec(),) * layers, (Group(tuple(specs)),), vocab_size, dtype)
