"""Which rows the next step computes. Free of torch and of clocks: it sees counts of tokens and measured times only.

A step has a row for each sequence that decodes. The rest of its rows, or as many as `Pace` allows, are for prompts,
then for guesses (`speculation`). Prompts share the engine by turns of their tenants: the tenant that had the fewest
rows comes first. Among the prompts of a tenant the one with the fewest tokens left comes first, so that a short request
overtakes a long one. A waiting prompt moves to the front with each row that overtakes it: after four times its own
length nothing new passes it. A step in which a prompt ends is filled with prompts that end too, but not with a part of
one: that would only delay the first token.

Sequences that do not pack take turns: the one that computed longest ago comes first, and all prompts count as one.

The pace: a step that computes prompts takes longer than one that only decodes, and each reply in it waits that long for
its token. Two times are measured: that of a step that only decodes, and what each row of a prompt adds. Now and then a
step has no prompts though some wait. Otherwise a machine that other programs slow down for a while would look like one
with slow rows, and prompts would wait for nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_ROWS = 256
"""Rows of a step. More rows make a prefill hardly faster."""
_AGING = 0.25
"""By how many tokens a prompt counts as shorter for each token that overtook it."""

LEAST_ROWS = 16
"""So that a prompt gets on whatever is measured."""
_KEPT = 6
"""Steps of each kind, of which the shortest counts: what disturbs a step only adds to it."""
_STEPS_BETWEEN = 6
"""Steps with prompts and replies between two that only decode."""


@dataclass(eq=False, kw_only=True)
class Sequence:
    """The tokens of one reply: its prompt, and behind it what was sampled so far.

    It is prefilled up to the last token that is known, then decoded: each step samples one more token. `arrived` orders
    sequences by age. A sequence that `packs` may share a forward with others and be cut anywhere. Another one is
    computed alone: its prompt in steps of `grid` tokens counted from position 0, then one token a step.
    """

    tenant: Hashable
    arrived: int
    prompt_tokens: int
    packs: bool = True
    grid: int = 256
    num_known: int = 0
    num_computed: int = 0
    overtaken: int = 0
    """Tokens of other prompts that were computed while this one waited for its turn."""
    draft: list[int] = field(default_factory=list)
    """Guessed tokens that are computed behind the last known one if a step has room for them."""
    last_step: int = 0
    """The number of the last step that this sequence took part in, where it is computed alone."""

    def __post_init__(self) -> None:
        self.num_known = max(self.num_known, self.prompt_tokens)

    @property
    def num_left(self) -> int:
        """Tokens that are known and not computed. A sequence to be scheduled has at least one."""
        return self.num_known - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_left == 1 and self.num_computed >= self.prompt_tokens

    def next_end(self, max_rows: int) -> int:
        """Returns where the next step of this sequence ends if it may have `max_rows` rows."""
        if self.packs:
            return min(self.num_computed + max_rows, self.num_known)
        if self.num_computed >= self.prompt_tokens:
            # What was decoded once is decoded again: the steps of a prefill would give other bits.
            return self.num_computed + 1
        return min(self.num_computed - self.num_computed % self.grid + self.grid, self.prompt_tokens)


S = TypeVar("S", bound=Sequence)


@dataclass(frozen=True)
class Chunk(Generic[S]):
    """Tokens `start` … `end` of a sequence, which one step computes. The last `num_drafted` of them are guesses."""

    sequence: S
    start: int
    end: int
    num_drafted: int = 0

    @property
    def num_rows(self) -> int:
        return self.end - self.start


class Scheduler(Generic[S]):
    """Sequences that have memory and tokens to be computed."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self.sequences: list[S] = []
        self._rows_of: dict[Hashable, int] = {}
        """The prompt rows that each tenant had, for those who have prompts here or had more rows than these."""
        self._num_steps = 0
        self._last_packed = 0
        """The last step of sequences that pack."""
        self._last_prompt = 0
        """The last step of a prompt that does not pack."""

    def add(self, sequence: S) -> None:
        """Has the sequence computed from the next step on, if it is not yet."""
        assert sequence.num_left > 0, "there must be something to compute"
        if sequence not in self.sequences:
            self.sequences.append(sequence)

    def remove(self, sequence: S) -> None:
        """Forgets the sequence, if it is known."""
        if sequence in self.sequences:
            self.sequences.remove(sequence)

    def schedule(self, most_beside: int | None = None) -> list[Chunk[S]]:
        """Returns what the next step computes, [] if there is nothing. No sequence is named twice.

        `most_beside`: how many rows prompts may have beside sequences that decode, None for all that are left.
        """
        self._count_turns()
        alone = self._next_alone()
        packed = [sequence for sequence in self.sequences if sequence.packs]
        if alone is not None and (not packed or self._last_turn(alone) <= self._last_packed):
            return [Chunk(alone, alone.num_computed, alone.next_end(self._max_rows))]
        return self._packed(packed, most_beside)

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
            self._rows_of[chunk.sequence.tenant] += chunk.num_rows
            if not chunk.sequence.packs:
                self._last_prompt = self._num_steps
        for chunk in step:
            if chunk.sequence.packs:
                self._last_packed = self._num_steps
            chunk.sequence.last_step = self._num_steps
            chunk.sequence.num_computed = chunk.end - chunk.num_drafted

    def _count_turns(self) -> None:
        """Begins to count for tenants who come with a prompt: nobody saves up turns while there is nothing to do, and
        nobody gets the first turn again by leaving for a moment."""
        tenants = {sequence.tenant for sequence in self.sequences if not sequence.is_decoding}
        counted = [rows for tenant, rows in self._rows_of.items() if tenant in tenants] or self._rows_of.values()
        least = min(counted, default=0)
        kept = {tenant: rows for tenant, rows in self._rows_of.items() if tenant in tenants or rows > least}
        self._rows_of = dict.fromkeys(tenants, least) | kept if tenants else {}

    def _next_alone(self) -> S | None:
        """Of the sequences that do not pack, the one whose turn it is."""
        alone = [sequence for sequence in self.sequences if not sequence.packs]
        turns = [sequence for sequence in alone if sequence.is_decoding]
        if prompts := [sequence for sequence in alone if not sequence.is_decoding]:
            turns.append(next(self._by_turns(prompts)))
        return min(turns, key=self._last_turn, default=None)

    def _last_turn(self, alone: S) -> int:
        """The last step of a sequence that does not pack; of a prompt, that of any."""
        return alone.last_step if alone.is_decoding else self._last_prompt

    def _packed(self, sequences: list[S], most_beside: int | None) -> list[Chunk[S]]:
        decoding = [sequence for sequence in sequences if sequence.is_decoding]
        prompts = [sequence for sequence in sequences if not sequence.is_decoding]
        # More than fit take turns, too, and leave some rows to prompts.
        most = self._max_rows - self._max_rows // 4 if prompts else self._max_rows
        decoding = sorted(decoding, key=lambda s: (s.last_step, s.arrived))[:most]
        step = [Chunk(sequence, sequence.num_computed, sequence.num_known) for sequence in decoding]
        room, has_end = self._max_rows - len(step), False
        if step and prompts and most_beside is not None:
            room = min(room, most_beside)
        for sequence in self._by_turns(prompts):
            if room <= 0:
                break
            chunk = Chunk(sequence, sequence.num_computed, sequence.next_end(room))
            if has_end and chunk.end < sequence.num_known:
                continue
            has_end = chunk.end == sequence.num_known
            step.append(chunk)
            room -= chunk.num_rows
        # Guesses take the rows that nobody else needs.
        for number, sequence in enumerate(decoding):
            num_drafted = min(len(sequence.draft), room)
            room -= num_drafted
            step[number] = Chunk(sequence, sequence.num_computed, sequence.num_known + num_drafted, num_drafted)
        return step

    def _by_turns(self, prompts: list[S]) -> Iterator[S]:
        """Yields the prompts in the order in which they are to be computed."""
        rows_of, left = dict(self._rows_of), list(prompts)
        while left:
            best = min(left, key=lambda s: (rows_of[s.tenant], s.num_left - _AGING * s.overtaken, s.arrived))
            left.remove(best)
            yield best
            rows_of[best.tenant] += best.num_left


class Pace:
    """Measures the steps of one engine. For its thread."""

    def __init__(self, target_s: float) -> None:
        """`target_s`: how long a step with replies and prompts may take, in seconds; 0 for any time."""
        self._target_s = target_s
        self._decoding_s: deque[float] = deque(maxlen=_KEPT)
        """Of steps without prompts."""
        self._row_s: deque[float] = deque(maxlen=_KEPT)
        """What a row of a prompt added."""
        self._num_mixed = 0
        """Steps with prompts and replies since one that only decoded."""

    def most_rows(self) -> int | None:
        """Returns how many rows of prompts the next step may have if it has replies, None for any number."""
        if not self._target_s or not self._row_s:
            return None
        if self._num_mixed >= _STEPS_BETWEEN:
            return 0
        decoding_s, row_s = self._least_decoding_s, min(self._row_s)
        # At least half of the time: where decoding alone takes long, prompts would wait for ever.
        for_prompts_s = max(self._target_s - decoding_s, decoding_s)
        return None if row_s <= 0 else max(LEAST_ROWS, int(for_prompts_s / row_s))

    def record_step(self, num_decoding: int, num_prompt_rows: int, seconds: float) -> None:
        """Adds a step of sequences that pack: `num_decoding` replies, and so many rows of prompts."""
        if not num_prompt_rows:
            self._decoding_s.append(seconds)
            self._num_mixed = 0
        elif num_prompt_rows >= LEAST_ROWS or not self._row_s:
            # Of fewer, what all steps differ by is more than the rows add.
            decoding_s = self._least_decoding_s if num_decoding else 0.0
            self._row_s.append(max(0.0, seconds - decoding_s) / num_prompt_rows)
        if num_prompt_rows and num_decoding:
            self._num_mixed += 1

    @property
    def _least_decoding_s(self) -> float:
        return min(self._decoding_s) if self._decoding_s else 0.0
