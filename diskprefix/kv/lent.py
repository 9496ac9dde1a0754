"""Caches over the memory of a `KVArena` that a user of the library may use until they are taken back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from diskprefix.errors import InvalidRequest
from diskprefix.kv.caches import ArenaCache


def lend(cache: ArenaCache, *, is_state_space: bool) -> ArenaCache:
    """Returns a copy of `cache` over the same memory. `is_state_space`: the model takes it as `cache_params`."""
    lent = copy.copy(cache)
    if is_state_space:
        lent.__class__ = _StateSpaceCache
    lent.layers = list(cache.layers)
    return lent


def take_back(lent: ArenaCache) -> None:
    """Makes a lent cache unusable, as its memory is about to be overwritten."""
    lent.layers = _Expired()


class _StateSpaceCache(ArenaCache):
    """transformers' `generate` would add the whole prompt to its state once more."""

    @property
    def _is_user_defined(self) -> bool:
        return False

    @_is_user_defined.setter
    def _is_user_defined(self, _value: bool) -> None:
        """transformers' `generate` sets this on each cache that it is given."""
        raise InvalidRequest(
            "cache_params: generate() cannot continue a state-space model's cache; call session.generate, or the "
            "model itself with the tokens from cache.get_seq_length() on",
            param="cache_params",
        )


class _Expired(Sequence[Any]):
    """The layers of a cache that was taken back. Every use raises `InvalidRequest`."""

    def __getitem__(self, index: object) -> Any:
        raise InvalidRequest(
            "past_key_values: this cache is no longer usable, as its session was used again or closed; call prefill "
            "again, or keep a copy.deepcopy of the cache next time",
            param="past_key_values",
        )

    def __len__(self) -> int:
        return int(self[0])
