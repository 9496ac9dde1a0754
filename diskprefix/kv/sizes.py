"""The memory that sequences take, by their tokens. Free of torch: a model's needs are estimated before it is loaded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

TILE = 512
"""The tokens in a tile. Attention reads keys in tiles, counted from position 0 of a sequence, and the memory of a
sequence is a multiple of a tile."""
CAPACITY_STEP = 1024
"""Memory is allocated for a multiple of so many tokens."""
PAD_TOKENS = 64
"""Keeps the distance between heads off powers of two, which would map them to the same cache sets. Never used."""
_STEP_TOKENS = 256
"""The most rows of a step that do not enlarge the memory of a window."""
_SPARE_TILES = 1
"""The tiles above what is needed. With more, memory moves less often."""


def whole_tiles(num_tokens: int) -> int:
    """Returns the number rounded up to whole tiles."""
    return -(-num_tokens // TILE) * TILE


def window_room(window: int, block_size: int) -> int:
    """Returns the tokens that the sliding memory of a window has room for."""
    looked_at = max(window, block_size) + max(_STEP_TOKENS, block_size)
    # A tile more, as both ends are within a tile.
    return whole_tiles(looked_at) + TILE * (1 + _SPARE_TILES)


def longest_within(num_bytes: int, bytes_for: Callable[[int], int], most: int, step: int = CAPACITY_STEP) -> int:
    """Returns the longest sequence, at most `most` tokens, that fits in so many bytes: a multiple of `step`, or `most`.
    `bytes_for` returns the bytes of the memory of a sequence."""
    lengths = [*range(step, most, step), most]
    num_fitting: int = bisect_right(lengths, num_bytes, key=bytes_for)
    return lengths[num_fitting - 1] if num_fitting else 0
