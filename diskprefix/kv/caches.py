"""What a model takes for its cache: transformers' `Cache` over our layers, or what a model has of its own kind.

    dynamic   what transformers' own `DynamicCache` does
    minimax   a `MiniMaxCache`: the states of its linear attention are in a list of their own
    rwkv      no cache, but a list of five tensors in and out, [1, hidden_size, layers] each
    xlstm     an `xLSTMCache`: three tensors for each layer

`argument` is what the forward takes. `take` keeps what the forward returned, where it did not write to our memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers.cache_utils import Cache

from diskprefix.kv.layers import StateLayer, TokenLayer

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ArenaCache(Cache):  # type: ignore[misc]
    """For `dynamic`. Where a layer does not count tokens, `num_tokens` does."""

    def __init__(self, layers: list[Any], num_tokens: Callable[[], int]) -> None:
        Cache.__init__(self, layers=layers)
        self._num_tokens = num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        layer = self.layers[layer_idx]
        return layer.length if isinstance(layer, TokenLayer) else self._num_tokens()

    def argument(self, _model: PreTrainedModel) -> ArenaCache:
        return self

    def take(self, _output: Any) -> None:
        """Nothing to do: the layers were written in place."""


class RwkvStates:
    """For `rwkv`. One layer of ours holds the five tensors."""

    def __init__(self, layer: StateLayer) -> None:
        self._layer = layer

    def argument(self, _model: PreTrainedModel) -> list[torch.Tensor] | None:
        """None at the beginning: the first states are not zeros, and the model knows them."""
        return self._bound() if self._layer.has_previous_state[0] else None

    def take(self, output: Any) -> None:
        for bound, state in zip(self._bound(), output.state, strict=True):
            if state is not bound:
                bound.copy_(state)
        self._layer.set_has_state(True)

    def _bound(self) -> list[torch.Tensor]:
        return [state for state in self._layer.recurrent_states.values() if state is not None]


class XlstmStates:
    """For `xlstm`: a layer of ours for each of its own, with three tensors."""

    def __init__(self, layers: list[StateLayer]) -> None:
        self._layers = layers

    def argument(self, model: PreTrainedModel) -> Any:
        from transformers.models.xlstm.modeling_xlstm import xLSTMCache

        cache = xLSTMCache(model.config, 1, dtype=model.dtype, device=model.device)
        for index, layer in enumerate(self._layers):
            states = [state for state in layer.recurrent_states.values() if state is not None]
            if not layer.has_previous_state[0]:
                for state, first in zip(states, cache.rnn_state[index], strict=True):
                    state.copy_(first)
            cache.rnn_state[index] = tuple(states)
        return cache

    def take(self, _output: Any) -> None:
        for layer in self._layers:
            layer.set_has_state(True)


ModelCache: TypeAlias = ArenaCache | RwkvStates | XlstmStates
