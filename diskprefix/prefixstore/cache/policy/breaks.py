"""Finding breaks: places where a prompt differs from an earlier one although most of the rest is equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from diskprefix.tokens import TokenIds, common_prefix_length
from diskprefix.values import Break

_RUN = 32
"""The number of tokens in each run that is searched for after the break. A power of two."""
_MIN_TOKENS = 256
"""The minimum of lost tokens that is reported."""
_REORDERED = 3 / 4
"""The least share of pairs of adjacent tokens that two texts have in common, if one is the other in another
order. Of tools of BFCL it is 0.83 to 0.93 if the keys of all have another order, 0.80 to 0.90 if a number in each
changed, 0.57 at most if they are other tools."""
_MAX_PROMPTS = 8
_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def find_break(token_ids: TokenIds, recent: Iterable[TokenIds], known: int) -> Break | None:
    """Returns the break that costs most tokens; None if none of the `recent` prompts, newest first, shows a break. The
    first `known` tokens are restored anyway. A break counts if at least 256 more would be restored without it, and if
    at least half of the tokens after it in the earlier prompt follow here too, or nearly all in another order."""
    candidates = list(islice(costly_differences(token_ids, recent, known), _MAX_PROMPTS))
    if not candidates:
        return None
    hashes = np.sort(_hashes(token_ids))
    breaks = [
        Break(common, _num_shared(hashes, earlier[common:]) or _num_reordered(token_ids[common:], earlier[common:]))
        for common, earlier in candidates
    ]
    costly_breaks = [each for each in breaks if each.num_tokens and each.at + each.num_tokens >= known + _MIN_TOKENS]
    return max(costly_breaks, key=lambda each: each.at + each.num_tokens, default=None)


def costly_differences(
    token_ids: TokenIds, recent: Iterable[TokenIds], known: int = 0
) -> Iterator[tuple[int, TokenIds]]:
    """Yields the earlier prompts that differ so early that 256 tokens or more could be lost, each with the index of the
    first token that differs. The first `known` tokens are restored anyway."""
    for earlier in recent:
        common = common_prefix_length(token_ids, earlier)
        if min(len(token_ids), len(earlier)) >= max(known, common) + _MIN_TOKENS:
            yield common, earlier


def common_end(token_ids: TokenIds, earlier: TokenIds) -> int:
    """Returns the length of the common end of two prompts that differ in one place before it; 0 if this place has more
    than a quarter of the longer prompt's tokens."""
    common = common_prefix_length(token_ids, earlier)
    end = common_prefix_length(token_ids[common:][::-1], earlier[common:][::-1])
    return end if 4 * (common + end) >= 3 * max(len(token_ids), len(earlier)) else 0


def _num_shared(hashes: npt.NDArray[np.uint64], earlier: TokenIds) -> int:
    """Returns the number of tokens of `earlier` in runs whose hashes are among the ascending `hashes`; 0 if these are
    fewer than half of its runs. Equal runs count once: text that repeats itself says little."""
    runs = np.unique(_hashes(earlier)[::_RUN])
    nearest = hashes[np.minimum(np.searchsorted(hashes, runs), len(hashes) - 1)]
    num_shared = int(np.count_nonzero(nearest == runs))
    return num_shared * _RUN if 2 * num_shared >= len(runs) else 0


def _num_reordered(token_ids: TokenIds, earlier: TokenIds) -> int:
    """Returns about how many tokens two texts have in common, of as many as the shorter one has; 0 if they are too few.
    Keys in another order, or a change in each of many tools, leave no long run."""
    length = min(len(token_ids), len(earlier))
    ours, theirs = (np.unique(_hashes(ids[:length], 2)) for ids in (token_ids, earlier))
    share = len(np.intersect1d(ours, theirs, assume_unique=True)) / max(len(ours), len(theirs))
    return int(share * length) if share >= _REORDERED else 0


def _hashes(token_ids: TokenIds, run: int = _RUN) -> npt.NDArray[np.uint64]:
    """Returns a polynomial hash of every run of `run` tokens, a power of two, by doubling the length of the runs."""
    hashes, factor, length = token_ids.astype(np.uint64), _FACTOR, 1
    # Bound: the length doubles.
    while length < run:
        hashes = hashes[:-length] * np.uint64(factor) + hashes[length:]
        factor, length = factor * factor & _MASK, 2 * length
    return hashes
