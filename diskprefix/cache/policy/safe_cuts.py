"""Where a prompt may be cut."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

import numpy as np

from diskprefix.nouns import Prompt
from diskprefix.tokens import TokenIds


def last_safe(prompt: Prompt, limit: int) -> int:
    """The last safe cut of `prompt` at or below `limit` (0 <= limit <= number of tokens); 0 if there is none."""
    if not prompt.boundaries:
        return limit
    index = bisect_right(prompt.boundaries, limit)
    return prompt.boundaries[index - 1] if index else 0


def raw_boundaries(token_ids: TokenIds | Sequence[int], marker_ids: Collection[int]) -> tuple[int, ...]:
    """The positions one past every marker, ascending, each at most len(token_ids).

    For a raw prompt all of them are safe: its author wrote it whole.
    """
    markers = np.isin(np.asarray(token_ids), list(marker_ids))
    return tuple((np.flatnonzero(markers) + 1).tolist())
