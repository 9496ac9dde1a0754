"""Proposes tokens one after the other, for all replies in one forward: with a draft model, or with the draft layer of
the served model. It goes on as long as one more guess makes decoding faster."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import mul

import torch

from diskprefix.engine.guesser import MOST_ROWS, Rates
from diskprefix.engine.running_request import Reply
from diskprefix.engine.step_times import StepTimes, speedup

LEAST_SPEEDUP = 1.05
_BORDERS = (0.3, 0.5, 0.7, 0.85, 0.95)
"""Between the probabilities of two kinds of guesses."""
_OF_ANY = len(_BORDERS) + 1
"""The kind of all guesses together."""


class Draft:
    """The guesses for one reply in one step."""

    def __init__(self, reply: Reply, rates: Rates, most: int) -> None:
        self.reply = reply
        self.tokens: list[int] = []
        """The guesses."""
        self.hidden: torch.Tensor | None = None
        """What a draft layer gave for the last one."""
        self.kinds: list[tuple[int, int]] = []
        self.chance = 1.0
        """The chance that all guesses are right."""
        self.may_continue = True
        self._rates, self._most = rates, min(most, reply.room_for_draft)

    @property
    def chance_of_next(self) -> float:
        """The chance that one more guess is right, with all before it."""
        return self.chance * self._rates.values[_OF_ANY]

    def add(self, token: int, probability: float) -> None:
        """Adds a guess, unless its probability says that nothing finite was computed."""
        if not math.isfinite(probability):
            self.may_continue = False
            return
        kind = bisect_right(_BORDERS, probability)
        self.tokens.append(token)
        self.kinds.append((kind, _OF_ANY))
        self.chance *= self._rates.values[kind]
        self.may_continue = len(self.tokens) < self._most


class ChainProposer(ABC):
    """Proposes chains of tokens. Subclasses compute one more token for each reply."""

    name: str
    _FIRST = (0.2, 0.4, 0.6, 0.75, 0.9, 0.97, 0.7)
    """The rates by probability, and of any guess, before anything is known."""
    _WEIGHT, _FADING = 0.1, 1 / 2048
    _FIRST_COST: float
    """The time of a guess before it is measured, as a share of a step of one row."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rates = Rates(self._FIRST)
        self.guess_s = 0.0
        """The seconds of a guess."""
        self._clock = clock

    def gain(self, rates: Rates, times: StepTimes, num_decoding: int) -> float:
        """Returns how many times as fast guesses of these rates make decoding."""
        chances = accumulate(repeat(rates.values[_OF_ANY], MOST_ROWS), mul)
        return speedup(times, num_decoding, chances, self._cost(times))

    def propose(self, replies: Sequence[Reply], times: StepTimes, num_decoding: int) -> None:
        """See `speculation.Proposer`."""
        if not replies:
            self.rates.fade()
            self.guess_s -= self._FADING * self.guess_s
            return
        most = max(1, MOST_ROWS // num_decoding)
        drafts = [
            Draft(reply, reply.guesser.rates[self.name], most)
            for reply in self._ready(replies, times, num_decoding, most)
            if reply.guesser is not None
        ]
        self._guess(drafts, times, num_decoding)
        for one in drafts:
            self._end(one)
            guesser = one.reply.guesser
            if one.tokens and guesser is not None and self.name in guesser.rates:
                guesser.use(self.name, one.tokens, one.kinds)

    def accept(self, reply: Reply) -> None:
        """See `speculation.Proposer`."""
        del reply

    def drop(self, reply: Reply, *, keep: bool) -> None:
        """See `speculation.Proposer`."""
        del reply, keep

    def begin(self, reply: Reply, times: StepTimes) -> None:
        """Prepares for guesses of a reply whose prompt is about to be computed."""
        del reply, times

    def work_ahead(self, times: StepTimes) -> int:
        """Computes something for later replies, because nothing else runs. Returns its rows, 0 if there is nothing to
        do."""
        del times
        return 0

    def _guess(self, drafts: list[Draft], times: StepTimes, num_decoding: int) -> None:
        cost, tokens, num_rows, spent = self._cost(times), float(num_decoding), num_decoding, 0.0
        continuing = drafts
        while continuing:
            is_measured, started = spent > 0 or self._is_like_others(continuing), self._clock()
            found = self._computed(continuing)
            if found is None:
                return
            if is_measured:
                seconds = self._clock() - started
                self.guess_s += (seconds - self.guess_s) * (self._WEIGHT if self.guess_s else 1.0)
            for one, guess in zip(continuing, found, strict=True):
                one.add(*guess)
                tokens += one.chance
            num_rows, spent = num_rows + len(continuing), spent + cost
            continuing = [one for one in continuing if one.may_continue]
            if continuing:
                time, count = times.of(num_rows), len(continuing)
                added = (times.of(num_rows + count) - time + cost) / count
                continuing = [one for one in continuing if one.chance_of_next * (time + spent) > added * tokens]

    def _cost(self, times: StepTimes) -> float:
        """Returns the time of a guess as a share of a step of one row."""
        return self.guess_s / times.row_s if self.guess_s > 0 and times.row_s > 0 else self._FIRST_COST

    @abstractmethod
    def _ready(self, replies: Sequence[Reply], times: StepTimes, num_decoding: int, most: int) -> list[Reply]:
        """Returns the replies that guesses can be computed for, at most `most` each."""

    @abstractmethod
    def _computed(self, drafts: Sequence[Draft]) -> list[tuple[int, float]] | None:
        """Returns the next guess for each draft and its probability, None if that fails."""

    def _is_like_others(self, drafts: Sequence[Draft]) -> bool:
        """Returns whether the first forward of a step takes as long as others."""
        del drafts
        return True

    def _end(self, draft: Draft) -> None:
        """Ends the guesses of a reply in this step."""
        del draft
