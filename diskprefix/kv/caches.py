"""The cache that models take: transformers' `Cache` over our layers. `lend` gives one to a user of the library."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from diskprefix.errors import InvalidRequest
from diskprefix.kv.layers import TokenLayer
from diskprefix.kv.step import current_step


class StepCache(Cache):  # type: ignore[misc]
    """A cache that shows no state to recurrent layers in a step: they then compute one row as they compute many. The
    functions of `model.exact.recurrent` get the states."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        found: torch.Tensor | None = None if current_step() else super().get_conv_state(layer_idx, state_idx)
        return found

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        step = current_step()
        if step is None:
            found: torch.Tensor | None = super().get_recurrent_state(layer_idx, state_idx)
            return found
        step.states[:] = [self.layers[layer_idx].states_in(step, "recurrent", state_idx)]
        return None


class ArenaCache(StepCache):
    """A cache like transformers' own `DynamicCache`. `num_tokens` counts tokens for layers that do not."""

    def __init__(self, layers: list[Any], num_tokens: Callable[[], int]) -> None:
        Cache.__init__(self, layers=layers)
        self._num_tokens = num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        layer = self.layers[layer_idx]
        return layer.length if isinstance(layer, TokenLayer) else self._num_tokens()


def lend(cache: ArenaCache, *, is_state_space: bool) -> ArenaCache:
    """Returns a copy of `cache` over the same memory, for a user of the library until `expire`. `is_state_space`: the
    model takes it as `cache_params`."""
    lent = copy.copy(cache)
    if is_state_space:
        lent.__class__ = _StateSpaceCache
    lent.layers = list(cache.layers)
    return lent


def expire(lent: ArenaCache) -> None:
    """Makes a lent cache unusable. Its memory is about to be overwritten."""
    lent.layers = _Expired()


class _StateSpaceCache(ArenaCache):
    """A lent cache that `generate` refuses: it would add the whole prompt to the state once more."""

    @property
    def _is_user_defined(self) -> bool:
        return False

    @_is_user_defined.setter
    def _is_user_defined(self, _value: bool) -> None:
        """Raises `InvalidRequest`. `generate` of transformers sets this on each cache that it gets."""
        raise InvalidRequest(
            "cache_params: generate() cannot continue a state-space model's cache; call session.generate, or the "
            "model itself with the tokens from cache.get_seq_length() on",
            param="cache_params",
        )


class _Expired(Sequence[Any]):
    """The layers of a cache that has expired. Every use raises `InvalidRequest`."""

    def __getitem__(self, index: object) -> Any:
        raise InvalidRequest(
            "past_key_values: this cache is no longer usable, as its session was used again or closed; call prefill "
            "again, or keep a copy.deepcopy of the cache next time",
            param="past_key_values",
        )

    def __len__(self) -> int:
        return int(self[0])
