"""The name under which a forward of transformers takes its cache.

transformers 5.24 renamed `past_key_values` and `cache_params` to `cache`. A forward with `**kwargs` ignores the names
that it does not know, so the signature is asked. Published code beside a model may have another name than transformers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
_STATES = (*CACHE_ARGUMENTS, "state", "mems", "past_buckets_states")
"""The last three are the names in RWKV, XLNet and Reformer."""


def cache_argument(function: Callable[..., Any]) -> str | None:
    """Returns the argument for the cache of a forward, or of another function that takes one; None if it takes none."""
    accepted = inspect.signature(function).parameters
    return next((name for name in CACHE_ARGUMENTS if name in accepted), None)


def cache_in(inputs: Mapping[str, Any]) -> str | None:
    """Returns the name of the cache among the arguments of a forward; None if there is none."""
    return next((name for name in CACHE_ARGUMENTS if inputs.get(name) is not None), None)


def renamed(inputs: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Returns arguments with the cache under the one name that `function` has for it, unchanged if it has none."""
    given, wanted = cache_in(inputs), cache_argument(function)
    if given is None or wanted is None:
        return dict(inputs)
    return {name: value for name, value in inputs.items() if name not in CACHE_ARGUMENTS} | {wanted: inputs[given]}


def takes_state(inputs: Mapping[str, Any], function: Callable[..., Any]) -> bool:
    """Returns whether `function` takes one of the arguments as the state of earlier tokens."""
    accepted = inspect.signature(function).parameters
    return any(name in accepted and inputs.get(name) is not None for name in _STATES)
