"""Chooses the guessed tokens that are computed after the last known token, in the same forward: only guesses that make
decoding faster, which may be none. README.md says why the reply does not change.

A right guess saves a step, but each row takes time, which is measured. Each reply counts how often its guesses are
right. It also counts while no guesses are computed, because each sampled token shows whether it was guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence

from diskprefix.daemon.engine.running_request import Reply
from diskprefix.daemon.engine.speculation.drafting import MIN_SPEEDUP, ChainProposer, Proposer
from diskprefix.daemon.engine.speculation.guesser import Guesser
from diskprefix.daemon.engine.speculation.step_times import StepTimes, speedup, worth_computing

_HYSTERESIS = 1.5
"""While a reply computes no guesses, its free guesses must be this many times as good as needed."""


class Speculation:
    """Decides which guesses each step of an engine computes. The guesses of `free` take no time, the guesses of
    `chains` do. `chains` use the same `times`."""

    def __init__(
        self, free: Proposer | None, chains: Sequence[ChainProposer], times: StepTimes, clock: Callable[[], float]
    ) -> None:
        self.times = times
        self._free, self._chains, self._clock = free, chains, clock
        self.proposers: list[Proposer] = [*([] if free is None else [free]), *chains]

    def guesser(self, max_computed: int, suppressed: Collection[int] = ()) -> Guesser:
        """Returns the guesser of a new reply. `max_computed` and `suppressed` as in `Guesser`."""
        rates = {proposer.name: proposer.rates.of_reply() for proposer in self.proposers}
        return Guesser(max_computed, rates, suppressed)

    def begin_reply(self, reply: Reply) -> None:
        """Prepares for the guesses of a reply whose prompt is about to be computed."""
        for proposer in self.proposers:
            proposer.begin_reply(reply)

    def plan(self, decoding: Sequence[Reply]) -> None:
        """Sets the `draft` of each sequence: the guesses to compute in the next step. Every sequence of `decoding` has
        a row in that step."""
        is_plain = self.times.needs_plain_step(_names(decoding))
        guessing = [reply for reply in decoding if reply.guesser.rates]
        for reply in guessing:
            reply.guesser.drop_guesses()
            for proposer in self.proposers:
                proposer.accept_tokens(reply)
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
        """Records the time of a step that computed only rows of these sequences, including guesses."""
        self.times.record_step(_names(decoding), num_rows, num_drafted, seconds)

    def drop_reply(self, reply: Reply, *, keep: bool) -> None:
        """Forgets a reply. `keep`: the next turn may continue from its end."""
        for proposer in self.proposers:
            proposer.drop_reply(reply, keep=keep)

    def _best_chain(self, reply: Reply, num_decoding: int) -> ChainProposer | None:
        """Returns the chain that makes a reply faster than its current guesses do; None if there is none. A chain that
        does not pay is not asked again until its rates have faded."""
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
