"""The cache that models take in a forward: transformers' `Cache` over our layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache

from diskprefix.kv.layers import TokenLayer
from diskprefix.kv.step import current_step


class StepCache(Cache):  # type: ignore[misc]
    """A cache that shows recurrent layers no state in a step, so that they compute one row like many. The functions of
    `model.exact.recurrent` get the states. `num_tokens` counts for layers that do not count tokens."""

    def __init__(self, layers: list[Any], num_tokens: Callable[[], int]) -> None:
        super().__init__(layers=layers)
        self._num_tokens = num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        layer = self.layers[layer_idx]
        return layer.length if isinstance(layer, TokenLayer) else self._num_tokens()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        state: torch.Tensor | None = None if current_step() else super().get_conv_state(layer_idx, state_idx)
        return state

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        step = current_step()
        if step is None:
            state: torch.Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
            return state
        step.states[:] = [self.layers[layer_idx].states_in(step, "recurrent", state_idx)]
        return None
