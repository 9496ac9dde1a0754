"""The n-grams of layers of Qwen4: which rows of a table the last tokens name, from the options of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice
from math import isqrt
from typing import Any

from diskprefix.runtime.plan.config import NGramConfig
from diskprefix.runtime.plan.families.declared import option

_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""The numbers of SplitMix64."""
_MASK = (1 << 64) - 1
_OF_LAYER = 10007
"""The seeds of two tables differ by it."""


def ngrams_of(config: Any, layer: int) -> NGramConfig | None:
    """Returns the n-grams of a layer, None if it has none."""
    layers = option(config, "ple_layer_ids") or []
    # The layers are counted from 1.
    if layer + 1 not in layers:
        return None
    number, size = sorted(set(layers)).index(layer + 1), config.ngram_size
    heads, end = (size - 1) * config.heads_per_ngram, config.eos_token_id
    sizes = [*islice(_primes_from(config.ngram_vocab_size_base), number * heads, (number + 1) * heads)]
    return NGramConfig(
        end_token=end[0] if isinstance(end, list) else end,
        multipliers=tuple(_multipliers(config.vocab_size, size, config.seed + _OF_LAYER * number)),
        sizes=tuple(sizes),
        offsets=tuple(accumulate(sizes[:-1], initial=0)),
    )


def _multipliers(vocab_size: int, size: int, seed: int) -> Iterator[int]:
    """Yields odd numbers whose products with tokens have at most 63 bits."""
    limit = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)
    for number in range(1, size + 1):
        yield 2 * (_split_mix(seed + _GAMMA * number) % limit) + 1


def _split_mix(state: int) -> int:
    state = (state + _GAMMA) & _MASK
    state = ((state ^ (state >> 30)) * _FIRST) & _MASK
    state = ((state ^ (state >> 27)) * _SECOND) & _MASK
    return state ^ (state >> 31)


def _primes_from(first: int) -> Iterator[int]:
    number = max(2, first)
    while True:
        if all(number % divisor for divisor in (2, *range(3, isqrt(number) + 1, 2)) if divisor < number):
            yield number
        number += 1
