"""The memory that sequences take, by their tokens. Free of torch: a model's needs are estimated before it is loaded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable

STEP_TOKENS = 256
"""The rows of a step: while it computes, a window has the pages of its first row and those of its last one."""

MOST_TAKEN_BACK = 64
"""The last tokens of a sequence that may be taken back: a window keeps the pages for that."""


def num_pages(num_tokens: int, block_size: int, window: int | None = None) -> int:
    """Returns the most pages of one group that a sequence of so many tokens holds. Those behind a window are given
    back."""
    pages = -(-num_tokens // block_size)
    return pages if window is None else min(pages, (window + MOST_TAKEN_BACK + STEP_TOKENS - 2) // block_size + 2)


def longest_within(num_bytes: int, bytes_for: Callable[[int], int], most: int, step: int) -> int:
    """Returns the longest sequence, at most `most` tokens, that fits in so many bytes: a multiple of `step`, or `most`.
    `bytes_for` returns the bytes of the memory of a sequence."""
    lengths = [*range(step, most, step), most]
    num_fitting: int = bisect_right(lengths, num_bytes, key=bytes_for)
    return lengths[num_fitting - 1] if num_fitting else 0
