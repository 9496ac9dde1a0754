"""The memory that a sequence takes, by its number of tokens. It is estimated before a model is loaded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

STEP_TOKENS = 256
"""The rows of a step. A window keeps pages for all rows of a step."""

MAX_TAKEN_BACK = 64
"""The maximum number of last tokens that may be taken back. A window keeps their pages."""


Q8_BLOCK, Q8_BLOCK_BYTES = 32, 34
"""The numbers in one item of q8, and its bytes."""


def num_pages(num_tokens: int, block_size: int, window: int | None = None) -> int:
    """Returns the maximum number of pages of one group for a sequence of `num_tokens`. Pages that a window has passed
    are given back."""
    pages = -(-num_tokens // block_size)
    return pages if window is None else min(pages, (window + MAX_TAKEN_BACK + STEP_TOKENS - 2) // block_size + 2)


def longest_within(num_bytes: int, bytes_for: Callable[[int], int], max_tokens: int, step: int) -> int:
    """Returns the length in tokens of the longest sequence that fits in `num_bytes`: a multiple of `step`, or
    `max_tokens`; 0 if none fits. `bytes_for` returns the bytes of a sequence of a given length."""
    lengths = [*range(step, max_tokens, step), max_tokens]
    num_fitting: int = bisect_right(lengths, num_bytes, key=bytes_for)
    return lengths[num_fitting - 1] if num_fitting else 0
