"""The share of prompts that come again, by their kind, and by the time until they do.

A *trial* begins with each use of a block, and ends when a later prompt uses the block again. Blocks are of one kind if
they were new in prompts with about as many new blocks that both continued a conversation, or both did not; or if they
came again about as often. Nearly all trials of an agent's turns end within seconds, those of system messages that are
used in turn at one and the same age, and those of one-off questions never.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

_MAX_SIZE, _MAX_USES = 15, 4
_NUM_KINDS = 2 * (_MAX_SIZE + 1) + _MAX_USES
_BINS_OF_DOUBLING = 8
_NUM_BINS = 30 * _BINS_OF_DOUBLING
"""Ages from a second to 34 years, in bins of 9 %: if all blocks come again at about the same age, those that are stored
for nearly as long must not count as coming again."""
_PRIOR = 16.0
"""The prompts of a kind after which its own share counts half, and the share of all kinds half. Before any trial, half
of all blocks are expected to come again, at any order of magnitude of ages alike."""
_RECENT = 4096
"""After so many prompts of a kind, older ones count half."""


def kind_of_new(num_blocks: int, *, continues: bool) -> int:
    """Returns the kind of the blocks that are new in a prompt: from one power of two of blocks up to the next."""
    return min(num_blocks.bit_length(), _MAX_SIZE) + (_MAX_SIZE + 1) * continues


def kind_of_used(uses: int) -> int:
    """Returns the kind of a block that came again `uses` times, at least once."""
    return 2 * (_MAX_SIZE + 1) + min(uses.bit_length(), _MAX_USES) - 1


class ReuseTimes:
    """Counts trials and their ages. Not thread-safe."""

    def __init__(self) -> None:
        self._num_prompts = np.zeros(_NUM_KINDS)
        self._begun = np.zeros(_NUM_KINDS)
        self._ended: NDArray[np.float64] = np.zeros((_NUM_KINDS, _NUM_BINS))

    def begin_trials(self, kind: int, num_blocks: int) -> None:
        """Counts the trials of blocks of one kind that a prompt uses."""
        self._num_prompts[kind] += 1
        self._begun[kind] += num_blocks
        if self._num_prompts[kind] > _RECENT:
            for counts in (self._num_prompts, self._begun, self._ended):
                counts[kind] /= 2

    def end_trials(self, kind: int, age_s: float, num_blocks: int) -> None:
        """Counts blocks that came again `age_s` seconds after their last use."""
        self._ended[kind, min(int(_bins(age_s)), _NUM_BINS - 1)] += num_blocks

    def num_prompts(self, kind: int) -> int:
        """Returns the number of prompts that used blocks of a kind."""
        return int(self._num_prompts[kind])

    def measured_share(self, kind: int) -> float:
        """Returns the share of blocks of a kind that came again, 0 without any."""
        return float(self._ended[kind].sum() / self._begun[kind]) if self._begun[kind] else 0.0

    def share(self, kind: int, within_s: float = math.inf) -> float:
        """Returns the share of blocks of a kind that come again within this time."""
        of_all = self._shrunk(0.5 * min(_bins(within_s) / _NUM_BINS, 1.0), slice(None), within_s)
        return self._shrunk(of_all, slice(kind, kind + 1), within_s)

    def _shrunk(self, prior: float, kinds: slice, within_s: float) -> float:
        num_prompts, begun = float(self._num_prompts[kinds].sum()), float(self._begun[kinds].sum())
        if not begun:
            return prior
        bins = min(_bins(within_s), float(_NUM_BINS))
        whole = int(bins)
        ended = float(self._ended[kinds, :whole].sum())
        if whole < _NUM_BINS:
            ended += (bins - whole) * float(self._ended[kinds, whole].sum())
        return (num_prompts * ended / begun + _PRIOR * prior) / (num_prompts + _PRIOR)


def _bins(age_s: float) -> float:
    """Returns the number of bins below an age."""
    return _BINS_OF_DOUBLING * math.log2(max(age_s, 1.0)) if age_s < math.inf else math.inf
