"""Which rows the next step computes. Free of torch and of clocks: it sees counts of tokens only.

A step has a row for each sequence that decodes, and the rest of its rows are for prompts. Prompts share the engine by
turns of their tenants: the tenant that had the fewest rows comes first. Among the prompts of a tenant the one with the
fewest tokens left comes first, so that a short request overtakes a long one. What waits gets nearer to the front with
each row that overtakes it: after four times its own length nothing new passes it any more. A step in which a prompt
ends is filled with prompts that end too, but not with a part of one: that would only delay the first token.

Sequences that do not pack take turns: the one that computed longest ago, where all prompts together are one.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from diskprefix.engine.sequence import Sequence

MAX_ROWS = 256
"""Rows of a step. More rows make a prefill hardly faster, and others wait longer for their tokens."""
_AGING = 0.25
"""By how many tokens a prompt counts as shorter for each token that overtook it."""

S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True)
class Chunk(Generic[S]):
    """Tokens `start` … `end` of a sequence, which one step computes."""

    sequence: S
    start: int
    end: int

    @property
    def num_rows(self) -> int:
        return self.end - self.start


class Scheduler(Generic[S]):
    """Sequences that have memory and tokens to be computed."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self.sequences: list[S] = []
        self._rows_of: dict[Hashable, int] = {}
        """The prompt rows that each tenant had, for those who have prompts here."""
        self._num_steps = 0
        self._last_prefill = 0

    def add(self, sequence: S) -> None:
        """Has the sequence computed from the next step on, if it is not yet."""
        assert sequence.num_left > 0, "there must be something to compute"
        if sequence in self.sequences:
            return
        if sequence.tenant not in self._rows_of:
            # Nobody saves up turns while there is nothing to do.
            self._rows_of[sequence.tenant] = min(self._rows_of.values(), default=0)
        self.sequences.append(sequence)

    def remove(self, sequence: S) -> None:
        """Forgets the sequence, if it is known."""
        if sequence not in self.sequences:
            return
        self.sequences.remove(sequence)
        if all(other.tenant != sequence.tenant for other in self.sequences):
            del self._rows_of[sequence.tenant]

    def schedule(self) -> list[Chunk[S]]:
        """Returns what the next step computes, [] if there is nothing. No sequence is named twice."""
        alone = self._next_alone()
        packed = [sequence for sequence in self.sequences if sequence.packs]
        if alone is not None and (not packed or alone.last_step <= self._last_packed):
            return [Chunk(alone, alone.num_computed, alone.next_end(self._max_rows))]
        return self._packed(packed)

    def advance(self, step: list[Chunk[S]]) -> None:
        """Notes that `step` was computed."""
        self._num_steps += 1
        prefilled = [chunk for chunk in step if not chunk.sequence.is_decoding]
        num_rows = sum(chunk.num_rows for chunk in prefilled)
        taking_part = {id(chunk.sequence) for chunk in step}
        for sequence in self.sequences:
            if id(sequence) not in taking_part and not sequence.is_decoding:
                sequence.overtaken += num_rows
        for chunk in prefilled:
            if chunk.sequence.tenant in self._rows_of:
                self._rows_of[chunk.sequence.tenant] += chunk.num_rows
        for chunk in step:
            chunk.sequence.last_step = self._num_steps
            chunk.sequence.num_computed = chunk.end

    @property
    def _last_packed(self) -> int:
        return max((sequence.last_step for sequence in self.sequences if sequence.packs), default=0)

    def _next_alone(self) -> S | None:
        """Of the sequences that do not pack, the one whose turn it is."""
        alone = [sequence for sequence in self.sequences if not sequence.packs]
        turns = [sequence for sequence in alone if sequence.is_decoding]
        prompts = [sequence for sequence in alone if not sequence.is_decoding]
        if prompts:
            turns.append(next(self._by_turns(prompts)))
        last_prefill = max((sequence.last_step for sequence in prompts), default=0)
        return min(turns, key=lambda s: s.last_step if s.is_decoding else last_prefill, default=None)

    def _packed(self, sequences: list[S]) -> list[Chunk[S]]:
        decoding = [sequence for sequence in sequences if sequence.is_decoding]
        # More than fit take turns, too.
        decoding = sorted(decoding, key=lambda s: (s.last_step, s.arrived))[: self._max_rows]
        step = [Chunk(sequence, sequence.num_computed, sequence.num_known) for sequence in decoding]
        room, has_end = self._max_rows - len(step), False
        for sequence in self._by_turns([sequence for sequence in sequences if not sequence.is_decoding]):
            if room <= 0:
                break
            chunk = Chunk(sequence, sequence.num_computed, sequence.next_end(room))
            if has_end and chunk.end < sequence.num_known:
                continue
            has_end = chunk.end == sequence.num_known
            step.append(chunk)
            room -= chunk.num_rows
        return step

    def _by_turns(self, prompts: list[S]) -> Iterator[S]:
        """Yields the prompts in the order in which they are to be computed."""
        rows_of, left = dict(self._rows_of), list(prompts)
        while left:
            best = min(left, key=lambda s: (rows_of[s.tenant], s.num_left - _AGING * s.overtaken, s.arrived))
            left.remove(best)
            yield best
            rows_of[best.tenant] += best.num_left
