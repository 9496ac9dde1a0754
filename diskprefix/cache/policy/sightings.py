"""Sightings of prompts that are older than the window, which tell whether a new prompt is worth keeping.

The window holds recent prompts token by token. An `AdmissionFilter` remembers far more prompts, by the names of their
blocks only. Each prompt is a trial, which succeeds when most of its new part is seen again. Prompts with about as many
new blocks are alike: for the turns of an agent nearly every trial succeeds, for one-off questions none does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diskprefix.tokens import TokenIds

_GENERATION = 1 << 16
"""The most names in one of the two generations: 16 million tokens with blocks of 256."""
_TRIALS = 1 << 12
"""Trials that are remembered."""
_ENDS = 1 << 12
"""Prompts whose last tokens, which fill no block, are remembered."""
_ENDS_OF_A_BLOCK = 16
"""Prompts with the same last block whose last tokens are remembered: turns of a conversation, and requests beside it
that ask for a title or a summary."""
_ENOUGH_TRIALS = 10
"""Fewer trials of similar prompts say nothing."""
_LIKELY = 2 / 5
"""Prompts of a kind are kept at once if a larger share of them came again, because computing takes far longer than
writing. With 1/2, an agent restored 1.7 points less (`openhands-mock` of `tools/bench`)."""

_NAME_BYTES, _TRIAL_BYTES, _END_BYTES = 128, 384, 640
"""The approximate size of one of these in memory, with its place in a table; of an end without its tokens."""


@dataclass(frozen=True)
class Sighting:
    """Knowledge about a prompt from earlier ones.

    `num_blocks` of its first blocks were seen before. Of `trials` similar prompts, `again` came again. `continues`: it
    is an earlier prompt with more behind it. `is_trusting`: a prompt is kept while too few similar prompts were seen to
    know.
    """

    num_blocks: int = 0
    trials: int = 0
    again: int = 0
    continues: bool = False
    is_trusting: bool = False

    @property
    def is_learning(self) -> bool:
        """The prompt is kept to find out whether similar prompts come again."""
        return self.is_trusting and self.trials < _ENOUGH_TRIALS

    @property
    def is_likely_repeat(self) -> bool:
        """Similar prompts come again often enough to keep this one at once."""
        return self.trials >= _ENOUGH_TRIALS and self.again > _LIKELY * self.trials


class AdmissionFilter:
    """Remembers the prompts of one root by the names of their blocks. A name stands for a whole prefix, as names are
    chained. Not thread-safe: one thread looks and adds.

    `is_trusting`: the first prompts of each kind are kept, to find out whether they come again. This is not for roots
    that clients choose: each new one would be trusted again.
    """

    def __init__(self, *, is_trusting: bool) -> None:
        self._is_trusting = is_trusting
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._trials: OrderedDict[bytes, tuple[int, bool]] = OrderedDict()
        """The kind of each prompt and whether it came again, by the block that shows that most of it did."""
        self._counts: dict[int, list[int]] = {}
        """For each kind of prompt: the number of trials, and of those that came again."""
        self._ends: OrderedDict[bytes, tuple[TokenIds, ...]] = OrderedDict()
        """The tokens of prompts after their last full block, by that block, those of the latest prompt first."""
        self._num_ends = 0
        self._end_bytes = 0

    def __len__(self) -> int:
        """The number of names; those in both generations count twice."""
        return len(self._young) + len(self._old)

    @property
    def num_bytes(self) -> int:
        """The approximate size in memory."""
        return _NAME_BYTES * len(self) + _TRIAL_BYTES * len(self._trials) + self._end_bytes

    def look(self, token_ids: TokenIds, names: Sequence[bytes], block_size: int) -> Sighting:
        """Returns the knowledge about a prompt. `names` are those of its full blocks of `block_size` tokens, in
        order."""
        num_seen = self._num_seen(names)
        trials, again = self._counts.get(_kind(len(names) - num_seen), (0, 0))
        continues = self._continues(token_ids, names[:num_seen], block_size)
        return Sighting(num_seen, trials, again, continues, self._is_trusting)

    def add(self, token_ids: TokenIds, names: Sequence[bytes], block_size: int) -> None:
        """Adds a prompt. The arguments are those of `look`."""
        if names:
            self._add_end(token_ids, names, block_size)
        num_seen = self._num_seen(names)
        for name in names[:num_seen]:
            kind, again = self._trials.get(name, (0, True))
            if not again:
                self._trials[name] = kind, True
                self._counts[kind][1] += 1
        if num_new := len(names) - num_seen:
            self._begin_trial(names[num_seen + 3 * num_new // 4], _kind(num_new))
        self._young.update(names)
        if len(self._young) >= _GENERATION:
            self._young, self._old = set(), self._young

    def _add_end(self, token_ids: TokenIds, names: Sequence[bytes], block_size: int) -> None:
        earlier = self._ends.pop(names[-1], ())
        # A copy: the caller's array may be a view of a buffer that is used again.
        end = token_ids[len(names) * block_size :].copy()
        others = [other for other in earlier if not np.array_equal(other, end)]
        self._ends[names[-1]] = ends = (end, *others[: _ENDS_OF_A_BLOCK - 1])
        self._end_bytes += _bytes_of(ends) - _bytes_of(earlier)
        self._num_ends += len(ends) - len(earlier)
        while self._num_ends > _ENDS:
            _, oldest = self._ends.popitem(last=False)
            self._end_bytes -= _bytes_of(oldest)
            self._num_ends -= len(oldest)

    def _continues(self, token_ids: TokenIds, names: Sequence[bytes], block_size: int) -> bool:
        """Returns whether the prompt begins with a whole earlier prompt. `names` are those of its first blocks."""
        for num_blocks, name in enumerate(names, start=1):
            start = num_blocks * block_size
            for end in self._ends.get(name, ()):
                if np.array_equal(token_ids[start : start + len(end)], end):
                    return True
        return False

    def _num_seen(self, names: Sequence[bytes]) -> int:
        young, old = self._young, self._old
        return next((n for n, name in enumerate(names) if name not in young and name not in old), len(names))

    def _begin_trial(self, name: bytes, kind: int) -> None:
        if name in self._trials:
            return
        self._trials[name] = kind, False
        self._counts.setdefault(kind, [0, 0])[0] += 1
        if len(self._trials) > _TRIALS:
            _, (oldest, again) = self._trials.popitem(last=False)
            self._counts[oldest][0] -= 1
            self._counts[oldest][1] -= again


def _bytes_of(ends: Sequence[TokenIds]) -> int:
    return sum(_END_BYTES + end.nbytes for end in ends)


def _kind(num_new: int) -> int:
    """Returns the kind of a prompt: numbers of new blocks that differ by less than a factor of two are of one kind."""
    return num_new.bit_length()
