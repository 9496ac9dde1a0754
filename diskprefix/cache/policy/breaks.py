"""Finding what broke a prefix: where a prompt leaves an earlier one although most of what follows is the same."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import numpy as np
import numpy.typing as npt

from diskprefix.tokens import TokenIds, common_prefix_length
from diskprefix.values import Break

_WINDOW = 32
"""The length of the token runs that are searched for behind the break. A power of two."""
_LEAST_TOKENS = 256
"""Fewer lost tokens are not reported."""
_MOST_PROMPTS = 8
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def find_break(token_ids: TokenIds, recent: Iterable[TokenIds], known: int) -> Break | None:
    """Returns the break that costs most; None if none of the `recent` prompts, newest first, shows one. `known` tokens
    from the first one on are found anyway. A break counts if at least 256 more would be found without it, and if at
    least half of what followed in the earlier prompt follows here too."""
    commons = ((common_prefix_length(token_ids, earlier), earlier) for earlier in recent)
    costly = (
        (common, earlier)
        for common, earlier in commons
        if min(len(token_ids), len(earlier)) >= max(known, common) + _LEAST_TOKENS
    )
    candidates = list(islice(costly, _MOST_PROMPTS))
    if not candidates:
        return None
    hashes = np.sort(_hashes(token_ids))
    breaks = [Break(common, _num_shared(hashes, earlier[common:])) for common, earlier in candidates]
    found = [one for one in breaks if one.num_tokens and one.at + one.num_tokens >= known + _LEAST_TOKENS]
    return max(found, key=lambda one: one.at + one.num_tokens, default=None)


def same_behind(token_ids: TokenIds, earlier: TokenIds) -> int:
    """Returns how many tokens two prompts end with in common behind one place where they differ; 0 unless this place
    has at most a quarter of the longer one's tokens."""
    common = common_prefix_length(token_ids, earlier)
    behind = common_prefix_length(token_ids[common:][::-1], earlier[common:][::-1])
    return behind if 4 * (common + behind) >= 3 * max(len(token_ids), len(earlier)) else 0


def _num_shared(hashes: npt.NDArray[np.uint64], earlier: TokenIds) -> int:
    """Returns the number of tokens of `earlier` in runs that are among the ascending `hashes`; 0 if fewer than half of
    them. Equal runs count once: text that repeats itself says little."""
    wanted = np.unique(_hashes(earlier)[::_WINDOW])
    found = hashes[np.minimum(np.searchsorted(hashes, wanted), len(hashes) - 1)]
    num_shared = int(np.count_nonzero(found == wanted))
    return num_shared * _WINDOW if 2 * num_shared >= len(wanted) else 0


def _hashes(token_ids: TokenIds) -> npt.NDArray[np.uint64]:
    """Returns a polynomial hash of every run of `_WINDOW` tokens, by doubling the length of the runs."""
    hashes, factor, length = token_ids.astype(np.uint64), _FACTOR, 1
    while length < _WINDOW:
        hashes = hashes[:-length] * np.uint64(factor) + hashes[length:]
        factor, length = factor * factor & _MASK, 2 * length
    return hashes
