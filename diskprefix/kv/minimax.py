"""The cache of MiniMax over our layers. Its linear attention keeps its states in a list of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.models.minimax.modeling_minimax import MiniMaxCache

from diskprefix.kv.caches import ArenaCache


class MiniMaxArenaCache(ArenaCache, MiniMaxCache):  # type: ignore[misc]
    """The cache of MiniMax. Its linear states are the recurrent states of our linear layers."""

    def __init__(self, layers: list[Any], num_tokens: Callable[[], int]) -> None:
        ArenaCache.__init__(self, layers, num_tokens)
        self.linear_cache: list[torch.Tensor] = []

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        layer = self.layers[layer_idx]
        state: torch.Tensor | None = layer.recurrent_states[0]
        return state if layer.has_previous_state[0] else None

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        layer = self.layers[layer_idx]
        layer.recurrent_states[0].copy_(linear_cache)
        layer.set_has_state(True)
