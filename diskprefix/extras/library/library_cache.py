"""The caches that a session returns: transformers' classes, filled with copies of the state."""

from __future__ import annotations

from transformers import DynamicCache, PreTrainedConfig

from diskprefix.errors import InvalidRequest
from diskprefix.kv.layers import StateLayer, TokenLayer
from diskprefix.kv.sequence import KVSequence


def filled(cache: DynamicCache, sequence: KVSequence) -> DynamicCache:
    """Copies all of a sequence's state to an empty cache of the same model. Returns the cache."""
    num_tokens = sequence.num_tokens
    for index, layer in enumerate(sequence.layers):
        if isinstance(layer, TokenLayer):
            # A layer with a window keeps a view of its arguments, so it does not get all tokens.
            start = 0 if layer.window is None else max(0, num_tokens - layer.window + 1)
            cache.update(layer.keys.gathered(start, num_tokens), layer.values.gathered(start, num_tokens), index)
            if layer.window is not None:
                cache.layers[index].cumulative_length = num_tokens
        if isinstance(layer, StateLayer):
            for number, state in layer.conv_states.items():
                if state is not None:
                    cache.update_conv_state(state, index, number)
            for number, state in layer.recurrent_states.items():
                if state is not None:
                    cache.update_recurrent_state(state, index, number)
    return cache


class StateSpaceCache(DynamicCache):  # type: ignore[misc]
    """The cache of a model with the argument `cache_params`. `generate` refuses it, because that would add the whole
    prompt to the state once more."""

    def __init__(self, config: PreTrainedConfig, num_tokens: int) -> None:
        super().__init__(config=config)
        self._num_tokens = num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 (as transformers' own)
        """Returns the number of tokens in the state, which transformers does not count."""
        return self._num_tokens

    @property
    def _is_user_defined(self) -> bool:
        return False

    @_is_user_defined.setter
    def _is_user_defined(self, _value: bool) -> None:
        """Raises `InvalidRequest`: transformers' `generate` sets this on each cache that it gets."""
        raise InvalidRequest(
            "cache_params: generate() cannot continue a state-space model's cache; call session.generate, or the "
            "model itself with the tokens from cache.get_seq_length() on",
            param="cache_params",
        )
