"""Chooses the guessed tokens that are computed behind the last known one, in the same forward: those that make
decoding faster, which may be none. README.md says why the reply stays the same.

A right guess saves a step, and each row takes time, which is measured. Each reply counts how often its guesses are
right, also while none is computed, because each sampled token shows if it was guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from diskprefix.engine.drafting import MIN_SPEEDUP, ChainProposer, Proposer
from diskprefix.engine.guesser import Guesser
from diskprefix.engine.running_request import Reply
from diskprefix.engine.step_times import StepTimes, speedup, worth_computing

_HYSTERESIS = 1.5
"""A reply without computed guesses begins to compute free ones when they seem this many times as good as needed."""


class Speculation:
    """Decides which guesses each step of an engine computes. The guesses of `free` take no time, those of `chains` do.
    `chains` use the same `times`."""

    def __init__(
        self, free: Proposer | None, chains: Sequence[ChainProposer], times: StepTimes, clock: Callable[[], float]
    ) -> None:
        self.times = times
        self._free, self._chains, self._clock = free, chains, clock
        self.proposers: list[Proposer] = [*([] if free is None else [free]), *chains]

    def guesser(self, max_computed: int) -> Guesser:
        """Returns the guesser of a new reply. `max_computed` as in `Guesser`."""
        return Guesser(max_computed, {one.name: one.rates.of_reply() for one in self.proposers})

    def begin(self, reply: Reply) -> None:
        """Prepares for the guesses of a reply whose prompt is about to be computed."""
        for proposer in self.proposers:
            proposer.begin(reply)

    def plan(self, decoding: Sequence[Reply]) -> None:
        """Sets the `draft` of each sequence in the next step: the guesses to compute. All of them have a row in it."""
        is_plain = self.times.needs_plain_step(_names(decoding))
        guessing = [reply for reply in decoding if reply.guesser.rates]
        for reply in guessing:
            reply.guesser.forget()
            for proposer in self.proposers:
                proposer.accept(reply)
        if self._free is not None:
            self._free.propose(guessing, len(decoding))
        may_ask = bool(self._chains) and not is_plain
        best = {reply: self._best_chain(reply, len(decoding)) for reply in guessing if may_ask}
        for chain in self._chains if decoding else ():
            asked = [reply for reply, other in best.items() if other is chain]
            started = self._clock()
            chain.propose(asked, len(decoding))
            for reply in asked:
                reply.running.draft_s += (self._clock() - started) / len(asked)
        chances = [[] if is_plain else self._chances(reply) for reply in decoding]
        for reply, count in zip(decoding, worth_computing(chances, self.times), strict=True):
            reply.draft = reply.guesser.token_ids[:count]
            reply.guesser.is_computing = count > 0

    def record_step(self, decoding: Sequence[Reply], num_rows: int, num_drafted: int, seconds: float) -> None:
        """Records the time of a step that computed only the rows of these sequences, with guesses."""
        self.times.record_step(_names(decoding), num_rows, num_drafted, seconds)

    def drop(self, reply: Reply, *, keep: bool) -> None:
        """Forgets a reply. `keep`: the next turn may begin there."""
        for proposer in self.proposers:
            proposer.drop(reply, keep=keep)

    def _best_chain(self, reply: Reply, num_decoding: int) -> ChainProposer | None:
        """Returns the chain that makes a reply faster than its current guesses; None if there is none. A chain that
        does not pay is not asked until its rates have faded."""
        guesser, best_chain = reply.guesser, None
        if reply.room_for_draft < 1:
            return None
        best = speedup(self.times, num_decoding, guesser.chances())
        for chain in self._chains:
            if (rates := guesser.rates.get(chain.name)) is not None:
                gain = chain.gain(rates, num_decoding)
                if gain < MIN_SPEEDUP:
                    rates.fade()
                elif gain > best:
                    best_chain, best = chain, gain
        return best_chain

    def _chances(self, reply: Reply) -> list[float]:
        """Returns the chances of a reply's guesses for `worth_computing`."""
        guesser = reply.guesser
        is_free = self._free is not None and guesser.proposer == self._free.name
        part = 1 / _HYSTERESIS if is_free and not guesser.is_computing else 1.0
        return [part * chance for chance in guesser.chances()[: max(0, reply.room_for_draft)]]


def _names(sequences: Sequence[Reply]) -> Hashable:
    return frozenset(sequence.arrived for sequence in sequences)
