"""Chooses the rows that the next step computes. The choice depends on counts and measured times only, not on a clock.

A step has a row for each sequence that decodes. The other rows, or as many of them as `Pace` allows, are for prompts,
then for guesses (`speculation`). The share that had the fewest rows comes first, then its conversation that had the
fewest, and of its prompts the one with the fewest tokens left, so that a short request overtakes a long one. A waiting
prompt moves towards the front with each row that overtakes it: after four times its own length, no new prompt overtakes
it. A step in which a prompt ends is filled only with prompts that also end in it, because a part of another prompt
would delay the first token.

A prompt in the background (`is_background`), because no client waits for a reply, is computed only while there is no
other sequence, in small steps. Once a request waits for its state, it no longer gives way.

Sequences that do not pack take turns: the sequence that was computed longest ago comes first, and all prompts count as
one.

While prompts of others wait, a share with many replies has only some of them in each step, in turns.

The pace: a step with prompts takes longer than a step that only decodes, and each reply in the step waits that long for
its token. So the prompts of one share get a short time in each step. If more shares wait, each of the others gets
twice that time, because small steps compute fewer rows per second. Two times are measured: the fixed time of such a
step, and the time that each prompt row adds. When other programs slow the machine down, the fixed time grows. Then few
rows per step would make prompts wait without a gain for replies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Generic, NamedTuple, TypeVar

from msgspec import Struct, field

MAX_ROWS = 256
"""The maximum number of rows of a step. More would hardly make a prefill faster."""
_AGING = 0.25
"""For each token that overtook a prompt, the prompt counts as this many tokens shorter."""

MAX_REPLIES = 4
"""The most replies of one share in a step while other shares have prompts."""

TARGET_S = 0.05
"""The maximum seconds of a step with replies and prompts, if the prompts are of one share: the pause of a reply for
the prompts of others. Each further share with prompts adds twice this time."""
MIN_ROWS = 16
"""The minimum number of prompt rows beside replies, so that a prompt always makes progress."""
IDLE_ROWS = 32
"""The maximum number of rows of a step in the background: a request that comes must wait for the step."""
NO_LIMIT = 1 << 62
_STEPS_BETWEEN, _LONG_S = 6, 1.0
"""Between two steps with twice the rows there are this many steps with prompts and replies. Where a step takes
`_LONG_S` seconds, the exceptional steps have half the rows."""
_FADING, _ORIGIN = 0.85, 0.001
"""The weight of each step relative to the next step, and the weight of an imaginary step with no rows and no time."""


class ScheduledReply(Struct, eq=False, kw_only=True):
    """The counts of one reply's tokens: the tokens of its prompt, and the tokens sampled so far.

    A sequence is prefilled up to its last known token, then decoded: each step samples one more token. `arrived` orders
    sequences by age. A sequence that `packs` may share a forward with others and be cut anywhere. Any other sequence is
    computed alone: its prompt in steps that end at multiples of `grid`, then one token per step.
    """

    share: str
    arrived: int
    prompt_tokens: int
    conversation: str = ""
    packs: bool = True
    is_background: bool = False
    grid: int = 256
    most_rows: int = NO_LIMIT
    """The most rows per step of this sequence, if it packs. It limits prompts that are scored, because all their rows
    have logits."""
    num_known: int = 0
    num_computed: int = 0
    overtaken: int = 0
    """The tokens of other prompts that were computed while this prompt waited."""
    stops: tuple[int, ...] = ()
    """Positions, ascending, at which a step of this sequence ends: states are copied there."""
    limit: int = NO_LIMIT
    """No step goes beyond this position, because rows of a picture are missing from there on."""
    spans: tuple[tuple[int, int], ...] = ()
    """Positions, each [begin, end), within which no step ends."""
    draft: list[int] = field(default_factory=list)
    """The guessed tokens to compute after the last known token if a step has room for them."""
    last_step: int = 0
    """The number of the last step with this sequence."""

    def __post_init__(self) -> None:
        self.num_known = max(self.num_known, self.prompt_tokens)

    @property
    def num_left(self) -> int:
        """The number of known tokens that are not computed. A scheduled sequence has at least one."""
        return self.num_known - self.num_computed

    @property
    def turn(self) -> tuple[str, str]:
        """The share and its conversation."""
        return self.share, self.conversation

    @property
    def is_decoding(self) -> bool:
        return self.num_left == 1 and self.num_computed >= self.prompt_tokens

    def next_end(self, max_rows: int) -> int:
        """Returns the end of this sequence's next chunk if it may have `max_rows` rows."""
        if self.packs:
            end = min(self.num_computed + min(max_rows, self.most_rows), self.num_known)
        elif self.num_computed >= self.prompt_tokens:
            # Tokens that were decoded before a preemption are decoded again: a prefill would give other bits.
            end = self.num_computed + 1
        else:
            end = min(self.num_computed - self.num_computed % self.grid + self.grid, self.prompt_tokens)
        end = min(self.limit, next((stop for stop in self.stops if self.num_computed < stop < end), end))
        for begin, stop in self.spans:
            if begin < end < stop:
                return begin if begin > self.num_computed else stop
        return end


class Shares(NamedTuple):
    """The number of shares with replies that decode, and of shares with prompts."""

    replying: int
    waiting: int


S = TypeVar("S", bound=ScheduledReply)
K = TypeVar("K", bound=Hashable)


class Chunk(Struct, Generic[S], frozen=True):
    """The tokens [start, end) of a sequence in one step. The last `num_drafted` of them are guesses."""

    sequence: S
    start: int
    end: int
    num_drafted: int = 0

    @property
    def num_rows(self) -> int:
        return self.end - self.start


class Scheduler(Generic[S]):
    """Chooses the rows of each step, among sequences that have memory and tokens to compute."""

    def __init__(self, max_rows: int = MAX_ROWS) -> None:
        self._max_rows = max_rows
        self.sequences: list[S] = []
        self._rows_of: dict[str, float] = {}
        """The prompt rows of each share. Only shares that have prompts, or that had more rows than these, are
        counted."""
        self._rows_of_conversation: dict[tuple[str, str], float] = {}
        """The same of each conversation of a share that has prompts."""
        self._num_steps = 0
        self._last_packed = 0
        """The number of the last step with sequences that pack."""
        self._last_prompt = 0
        """The number of the last step with a prompt that does not pack."""

    def add_sequence(self, sequence: S) -> None:
        """Adds a sequence to the next steps, unless it is among them already."""
        assert sequence.num_left > 0, "there must be something to compute"
        if sequence not in self.sequences:
            self.sequences.append(sequence)

    def remove_sequence(self, sequence: S) -> None:
        """Removes a sequence from the next steps, if it is among them."""
        if sequence in self.sequences:
            self.sequences.remove(sequence)

    @property
    def shares(self) -> Shares:
        """The shares of the sequences."""
        replying, waiting = (
            {s.share for s in self.sequences if s.is_decoding == is_reply} for is_reply in (True, False)
        )
        return Shares(len(replying), len(waiting))

    def next_replies(self) -> list[S]:
        """Returns the sequences that decode in the next packed step: all of them, or as many as fit, in turns. While
        another share has prompts, at most `MAX_REPLIES` of each share."""
        packed = [sequence for sequence in self._present if sequence.packs]
        waiting = {sequence.share for sequence in packed if not sequence.is_decoding}
        decoding = [sequence for sequence in packed if sequence.is_decoding]
        decoding.sort(key=lambda s: (s.last_step, s.arrived))
        if not waiting:
            return decoding[: self._max_rows]
        num_of, chosen = Counter[str](), list[S]()
        for sequence in decoding:
            num_of[sequence.share] += 1
            if num_of[sequence.share] <= MAX_REPLIES or waiting == {sequence.share}:
                chosen.append(sequence)
        # If not all of them fit, they take turns, and leave a quarter of the rows to prompts.
        return chosen[: self._max_rows - self._max_rows // 4]

    def schedule(self, max_prompt_rows: int | None = None) -> list[Chunk[S]]:
        """Returns the chunks of the next step, one for each sequence in it; [] if there is nothing to compute.

        `max_prompt_rows` is the maximum number of prompt rows beside sequences that decode; None for all remaining
        rows.
        """
        self._count_turns()
        alone = self._next_alone()
        packed = [sequence for sequence in self._present if sequence.packs]
        if alone is not None and (not packed or self._last_turn(alone) <= self._last_packed):
            return [Chunk(alone, alone.num_computed, alone.next_end(self._max_rows))]
        return self._packed(packed, max_prompt_rows)

    def advance(self, step: list[Chunk[S]]) -> None:
        """Records that `step` was computed."""
        self._num_steps += 1
        prefilled = [chunk for chunk in step if not chunk.sequence.is_decoding]
        num_rows = sum(chunk.num_rows for chunk in prefilled)
        taking_part = {id(chunk.sequence) for chunk in step}
        for sequence in self.sequences:
            if id(sequence) not in taking_part and not sequence.is_decoding:
                sequence.overtaken += num_rows
        for chunk in prefilled:
            self._rows_of[chunk.sequence.share] += chunk.num_rows
            self._rows_of_conversation[chunk.sequence.turn] += chunk.num_rows
            if not chunk.sequence.packs:
                self._last_prompt = self._num_steps
        for chunk in step:
            if chunk.sequence.packs:
                self._last_packed = self._num_steps
            chunk.sequence.last_step = self._num_steps
            chunk.sequence.num_computed = chunk.end - chunk.num_drafted

    @property
    def _present(self) -> list[S]:
        """The sequences of the next step."""
        return [sequence for sequence in self.sequences if not sequence.is_background] or self.sequences

    def _count_turns(self) -> None:
        """Begins to count rows for new shares with a prompt, and for their conversations."""
        prompts = [sequence for sequence in self.sequences if not sequence.is_decoding]
        self._rows_of = fair_counts(self._rows_of, {sequence.share for sequence in prompts})
        self._rows_of_conversation = fair_counts(self._rows_of_conversation, {sequence.turn for sequence in prompts})

    def _next_alone(self) -> S | None:
        """Returns the next sequence that does not pack."""
        alone = [sequence for sequence in self._present if not sequence.packs]
        turns = [sequence for sequence in alone if sequence.is_decoding]
        if prompts := [sequence for sequence in alone if not sequence.is_decoding]:
            turns.append(next(self._by_turns(prompts)))
        return min(turns, key=self._last_turn, default=None)

    def _last_turn(self, alone: S) -> int:
        """Returns the number of the last step of a sequence that does not pack. All prompts count as one."""
        return alone.last_step if alone.is_decoding else self._last_prompt

    def _packed(self, sequences: list[S], max_prompt_rows: int | None) -> list[Chunk[S]]:
        decoding = self.next_replies()
        prompts = [sequence for sequence in sequences if not sequence.is_decoding]
        step = [Chunk(sequence, sequence.num_computed, sequence.num_known) for sequence in decoding]
        is_background = all(sequence.is_background for sequence in sequences)
        room, has_end = (IDLE_ROWS if is_background else self._max_rows) - len(step), False
        if step and prompts and max_prompt_rows is not None:
            room = min(room, max_prompt_rows)
        for sequence in self._by_turns(prompts):
            if room <= 0:
                break
            chunk = Chunk(sequence, sequence.num_computed, sequence.next_end(room))
            if has_end and chunk.end < sequence.num_known:
                continue
            has_end = chunk.end == sequence.num_known
            step.append(chunk)
            # A picture is computed whole, so it may take more rows than the room.
            room = max(0, room - chunk.num_rows)
        # Guesses take the remaining rows.
        for number, sequence in enumerate(decoding):
            num_drafted = min(len(sequence.draft), room)
            room -= num_drafted
            step[number] = Chunk(sequence, sequence.num_computed, sequence.num_known + num_drafted, num_drafted)
        return step

    def _by_turns(self, prompts: list[S]) -> Iterator[S]:
        """Yields the prompts in the order in which they are computed."""
        rows_of, of_conversation, left = dict(self._rows_of), dict(self._rows_of_conversation), list(prompts)

        def turn(prompt: S) -> tuple[float, float, float, int]:
            num_left = prompt.num_left - _AGING * prompt.overtaken
            return rows_of[prompt.share], of_conversation[prompt.turn], num_left, prompt.arrived

        while left:
            best = min(left, key=turn)
            left.remove(best)
            yield best
            rows_of[best.share] += best.num_left
            of_conversation[best.turn] += best.num_left


def fair_counts(counts: Mapping[K, float], waiting: Collection[K]) -> dict[K, float]:
    """Returns the counts of rows or seconds by which those that wait take turns, from the `counts` until now. One that
    comes begins with the fewest: it neither saves up turns while it does not wait, nor gets the first turn again by
    leaving for a moment."""
    if not waiting:
        return {}
    known = [count for key, count in counts.items() if key in waiting] or counts.values()
    fewest = min(known, default=0)
    remaining = {key: count for key, count in counts.items() if key in waiting or count > fewest}
    return dict.fromkeys(waiting, fewest) | remaining


class Pace:
    """Measures the steps of one engine, and limits the rows of prompts beside replies. For the engine's thread.

    A line is fitted to the recent steps with prompts: the fixed time of a step, and the time that each row adds. Now
    and then a step has twice the rows, so that the two times can be distinguished.
    """

    def __init__(self, target_s: float = TARGET_S) -> None:
        """`target_s` is the maximum number of seconds of a step with replies and prompts."""
        self._target_s = target_s
        self._sums = [0.0] * 5
        """Sums over the recent steps: number, rows, seconds, squares of rows, products of rows and seconds."""
        self._num_mixed = 0
        """The number of steps with prompts and replies since the last exceptional step."""
        self._max_rows = MAX_ROWS
        """The limit for the rows of the next step: twice the rows of the last step, in case the line is wrong."""

    def max_prompt_rows(self, shares: Shares) -> int | None:
        """Returns the maximum number of prompt rows in the next step if it has replies; None for any number.

        Where a step takes longer than the target, each of the `shares` has an equal part of the time, and the prompts
        have at least half of it.
        """
        number, rows, seconds, squares, products = self._sums
        if not number:
            return None
        # If all steps had the same rows, the line begins at the origin.
        number += _ORIGIN
        spread = number * squares - rows * rows
        row_s = min(max((number * products - rows * seconds) / spread, 0.0), seconds / rows)
        fixed_s = (seconds - row_s * rows) / number
        pause_s = self._target_s * max(1, 2 * shares.waiting - 1)
        # With a long fixed time, the target alone would make prompts wait forever, and replies would gain little.
        for_prompts_s = max(pause_s - fixed_s, fixed_s * max(1.0, shares.waiting / max(1, shares.replying)))
        max_rows = self._max_rows
        if row_s > for_prompts_s / max_rows:
            max_rows = int(for_prompts_s / row_s)
        max_rows = max(MIN_ROWS, max_rows)
        if self._num_mixed < _STEPS_BETWEEN:
            return max_rows
        return 2 * max_rows if seconds < _LONG_S * number else max_rows // 2

    def record_step(self, num_decoding: int, rows: int, seconds: float) -> None:
        """Records a step of sequences that pack: the number that decoded, the rows of prompts, and the seconds."""
        if not rows:
            return
        step = (1, rows, seconds, rows * rows, rows * seconds)
        self._sums = [_FADING * old + new for old, new in zip(self._sums, step, strict=True)]
        if not num_decoding:
            self._max_rows = MAX_ROWS
        elif self._num_mixed < _STEPS_BETWEEN:
            self._num_mixed += 1
            self._max_rows = 2 * max(MIN_ROWS, rows)
        else:
            self._num_mixed = 0
