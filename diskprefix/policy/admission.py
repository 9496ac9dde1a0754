"""Which blocks of prompts were seen before, far beyond the window, and how often prompts like this one come again.

The window holds recent prompts token by token. Here each block is a name only, so that a document that is asked about
again after a thousand other requests is known, and so is a conversation that goes on after them: for that, of each
prompt its last tokens are kept, which fill no block.

And each prompt is a trial: did most of what was new in it come again? The share of trials that did, among those with
about as many new tokens, says whether the next such prompt is worth keeping the first time it comes: always for an
agent, whose turns continue each other, and never for one-off questions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diskprefix.prompt import Prompt, last_safe
from diskprefix.tokens import TokenIds, common_prefix_length

_GENERATION = 1 << 16
"""Names in one of the two generations: 16 million tokens with blocks of 256. Some megabytes."""
_TRIALS = 1 << 12
_ENOUGH_TRIALS = 10
"""Trials of a kind before they say anything."""
_WORTHWHILE = 2 / 5
"""What comes again in so many cases is worth keeping at once: it takes far longer to compute than to write. With one in
four, a trace of documents that are asked about again and again had 2 % more restored and 6 % more written."""
_REWRITTEN = 32
"""Tokens with which templates have the model reply, at most."""
_ENDS = 1 << 12
"""Blocks whose prompts' ends are kept, and so many of each."""
_ENDS_OF_A_BLOCK = 4
BRANCHES = 2
"""A conversation goes on in one way, or is tried once more. What goes on in more ways is a beginning that many have."""


@dataclass(frozen=True)
class Sighting:
    """What is known of a prompt: `num_blocks` of its first blocks were seen before; of `trials` prompts with about as
    many new blocks, `again` had most of them come again. `continues`: it is an earlier prompt, gone on. `is_trusting`:
    what is not known of a prompt yet speaks for it."""

    num_blocks: int = 0
    trials: int = 0
    again: int = 0
    continues: bool = False
    is_trusting: bool = False

    @property
    def is_untried(self) -> bool:
        """Whether too few prompts like it came to say anything, and so it is kept to find out."""
        return self.is_trusting and self.trials < _ENOUGH_TRIALS

    @property
    def is_likely_again(self) -> bool:
        """Whether prompts like it come again often enough to be kept at once."""
        return self.trials >= _ENOUGH_TRIALS and self.again > _WORTHWHILE * self.trials


@dataclass
class _Trial:
    kind: int
    again: bool = False


@dataclass
class _End:
    """What a prompt has behind its last full block, and how many different prompts continue it."""

    token_ids: TokenIds
    num_continued: int = 0


class AdmissionFilter:
    """The names of blocks that were seen, of one root. Names are chained, so each stands for a whole prefix. Not
    thread-safe: one thread looks and adds.

    `is_trusting`: the first prompts of each kind are kept to find out whether they come again. Not where clients choose
    the roots: each would be trusted anew.
    """

    def __init__(self, *, is_trusting: bool) -> None:
        self._is_trusting = is_trusting
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()
        self._trials: OrderedDict[bytes, _Trial] = OrderedDict()
        """By the block that tells whether most of a prompt's new blocks came again."""
        self._counts: dict[int, list[int]] = {}
        """Kind → trials, and those that came again."""
        self._ends: OrderedDict[bytes, list[_End]] = OrderedDict()
        """By the last full block of prompts."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def look(self, prompt: Prompt, names: Sequence[bytes], block_size: int) -> Sighting:
        """What is known of a prompt whose full blocks, of `block_size` tokens, have these names, in order."""
        num_seen = self._num_seen(names)
        trials, again = self._counts.get(_kind(len(names) - num_seen), (0, 0))
        end = self._continued_by(prompt, names[:num_seen], block_size)
        continues = end is not None and end.num_continued < BRANCHES
        return Sighting(num_seen, trials, again, continues, self._is_trusting)

    def add(self, token_ids: TokenIds, names: Sequence[bytes], block_size: int) -> None:
        """Remember a prompt."""
        if names:
            self._add_end(Prompt(token_ids), names, block_size)
        num_seen = self._num_seen(names)
        for name in names[:num_seen]:
            trial = self._trials.get(name)
            if trial is not None and not trial.again:
                trial.again = True
                self._counts[trial.kind][1] += 1
        if num_new := len(names) - num_seen:
            self._begin_trial(names[num_seen + 3 * num_new // 4], _kind(num_new))
        self._young.update(names)
        if len(self._young) >= _GENERATION:
            self._young, self._old = set(), self._young

    def _add_end(self, prompt: Prompt, names: Sequence[bytes], block_size: int) -> None:
        # A copy: the caller's array may be a view of a buffer that is used again.
        own = prompt.token_ids[len(names) * block_size :].copy()
        ends = self._ends.setdefault(names[-1], [])
        self._ends.move_to_end(names[-1])
        if any(np.array_equal(end.token_ids, own) for end in ends):
            return
        # Without its boundaries: only what is there in full counts.
        if (continued := self._continued_by(prompt, names, block_size, most_rewritten=0)) is not None:
            continued.num_continued += 1
        ends.append(_End(own))
        del ends[:-_ENDS_OF_A_BLOCK]
        if len(self._ends) > _ENDS:
            self._ends.popitem(last=False)

    def _continued_by(
        self, prompt: Prompt, names: Sequence[bytes], block_size: int, most_rewritten: int = _REWRITTEN
    ) -> _End | None:
        """The end of the longest earlier prompt that this one continues; its first blocks have these names."""
        for number in range(len(names), 0, -1):
            position, ends = number * block_size, self._ends.get(names[number - 1], ())
            found = [end for end in ends if is_continued(prompt, position, end.token_ids, most_rewritten)]
            if found:
                return max(found, key=lambda end: _num_shared(prompt, position, end.token_ids))
        return None

    def _num_seen(self, names: Sequence[bytes]) -> int:
        young, old = self._young, self._old
        return next((n for n, name in enumerate(names) if name not in young and name not in old), len(names))

    def _begin_trial(self, name: bytes, kind: int) -> None:
        if name in self._trials:
            return
        self._trials[name] = _Trial(kind)
        self._counts.setdefault(kind, [0, 0])[0] += 1
        if len(self._trials) > _TRIALS:
            _, oldest = self._trials.popitem(last=False)
            counts = self._counts[oldest.kind]
            counts[0] -= 1
            counts[1] -= oldest.again


def is_continued(prompt: Prompt, position: int, end: TokenIds, most_rewritten: int = _REWRITTEN) -> bool:
    """Whether `prompt` is an earlier one, gone on: nothing that was said there is missing. They share the first
    `position` tokens; `end` is what the earlier one has behind them.

    What the template wrote at its very end, to have the model reply, may have been rewritten: at most `most_rewritten`
    tokens without a marker, behind the last boundary that both have.
    """
    common = _num_shared(prompt, position, end)
    rewritten = end[common:]
    if not len(rewritten):
        return True
    if len(rewritten) > most_rewritten or last_safe(prompt, position + common) <= prompt.system_end:
        return False
    markers = prompt.token_ids[np.asarray(prompt.boundaries, dtype=np.intp) - 1]
    return not np.isin(rewritten, markers).any()


def _num_shared(prompt: Prompt, position: int, end: TokenIds) -> int:
    return common_prefix_length(prompt.token_ids[position : position + len(end)], end)


def _kind(num_new: int) -> int:
    """Prompts whose new parts are of about the same length, within a factor of two, are alike."""
    return num_new.bit_length()
