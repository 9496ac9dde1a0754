"""The memory that sequences of so many tokens take. It is estimated before a model is loaded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

STEP_TOKENS = 256
"""The rows of a step. A window has the pages from the first row of a step to the last one."""

MAX_TAKEN_BACK = 64
"""The maximum number of last tokens that may be taken back. A window keeps their pages."""


EIGHTS, EIGHTS_BYTES = 32, 34
"""The numbers in one item of q8, and its bytes."""


def num_pages(num_tokens: int, block_size: int, window: int | None = None) -> int:
    """Returns the maximum number of pages of one group that a sequence of so many tokens has. Pages that a window has
    passed are given back."""
    pages = -(-num_tokens // block_size)
    return pages if window is None else min(pages, (window + MAX_TAKEN_BACK + STEP_TOKENS - 2) // block_size + 2)


def longest_within(num_bytes: int, bytes_for: Callable[[int], int], max_tokens: int, step: int) -> int:
    """Returns the length of the longest sequence that fits in so many bytes: a multiple of `step`, or `max_tokens`.
    `bytes_for` returns the bytes of a sequence of so many tokens."""
    lengths = [*range(step, max_tokens, step), max_tokens]
    num_fitting: int = bisect_right(lengths, num_bytes, key=bytes_for)
    return lengths[num_fitting - 1] if num_fitting else 0
