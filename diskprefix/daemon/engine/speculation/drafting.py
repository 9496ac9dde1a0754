"""Proposers of the next tokens of replies. Some make a chain: one token after the other, for all replies in one
forward, with a draft model or the draft layer of the served model, as long as another guess makes decoding faster."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, repeat
from operator import mul
from typing import TypeVar

import numpy as np

from diskprefix.daemon.engine.device import raise_if_lost
from diskprefix.daemon.engine.running_request import Reply
from diskprefix.daemon.engine.speculation.guesser import MAX_GUESSES, Rates
from diskprefix.daemon.engine.speculation.step_times import StepTimes, speedup
from diskprefix.printable import first_line

log = logging.getLogger("diskprefix")
_T = TypeVar("_T")

MIN_SPEEDUP = 1.05
_BORDERS = (0.3, 0.5, 0.7, 0.85, 0.95)
"""The probabilities that separate the kinds of guesses."""
_OF_ANY = len(_BORDERS) + 1
"""The kind of all guesses together."""


class Draft:
    """The guesses for one reply in one step."""

    def __init__(self, reply: Reply, rates: Rates, most: int) -> None:
        self.reply = reply
        self.tokens: list[int] = []
        """The guesses."""
        self.hidden: np.ndarray | None = None
        """The hidden state that the draft layer returned for the last guess."""
        self.kinds: list[tuple[int, int]] = []
        self.chance = 1.0
        """The chance that all guesses are right."""
        self.may_continue = True
        self._rates, self._most = rates, min(most, reply.room_for_draft)

    @property
    def chance_of_next(self) -> float:
        """The chance that all guesses and one more are right."""
        return self.chance * self._rates.values[_OF_ANY]

    def add_token(self, token: int, probability: float) -> None:
        """Adds a guess. If its probability is not finite, the forward failed: adds nothing, and ends the chain."""
        if not math.isfinite(probability):
            self.may_continue = False
            return
        kind = bisect_right(_BORDERS, probability)
        self.tokens.append(token)
        self.kinds.append((kind, _OF_ANY))
        self.chance *= self._rates.values[kind]
        self.may_continue = len(self.tokens) < self._most


class Proposer:
    """Proposes the next tokens of replies."""

    name: str
    what: str
    """The source of the guesses, for people."""
    _FIRST: Sequence[float]
    """The assumed rate of each kind of guess before any is measured."""

    def __init__(self) -> None:
        self.rates = Rates(self._FIRST)
        """The rates over all replies."""

    def begin_reply(self, reply: Reply) -> None:
        """Prepares for guesses of a reply whose prompt is about to be computed."""

    def accept_tokens(self, reply: Reply) -> None:
        """Takes the tokens that a reply has sampled since the last call. Drops wrong guesses."""

    def propose(self, replies: Sequence[Reply], num_decoding: int) -> None:
        """Passes guesses to the replies' guessers. `num_decoding` replies share the next step."""
        raise NotImplementedError

    def drop_reply(self, reply: Reply, *, keep: bool) -> None:
        """Forgets a reply. `keep`: the next turn may continue from its end."""


class ChainProposer(Proposer, ABC):
    """Proposes chains of tokens. Subclasses compute the next token of each reply's chain."""

    _FIRST = (0.2, 0.4, 0.6, 0.75, 0.9, 0.97, 0.7)
    """The rates by probability, and last the rate of any guess."""
    _WEIGHT, _FADING = 0.1, 1 / 2048
    _FIRST_COST: float
    """The time of a guess before it is measured, as a share of a step of one row."""

    def __init__(self, times: StepTimes, clock: Callable[[], float]) -> None:
        super().__init__()
        self.guess_s = 0.0
        """The measured seconds of a guess; 0 before the first measurement."""
        self._times, self._clock = times, clock

    def gain(self, rates: Rates, num_decoding: int) -> float:
        """Returns the factor by which guesses with these rates speed up decoding."""
        chances = accumulate(repeat(rates.values[_OF_ANY], MAX_GUESSES), mul)
        return speedup(self._times, num_decoding, chances, self._cost)

    def propose(self, replies: Sequence[Reply], num_decoding: int) -> None:
        """Computes guesses as long as they make decoding faster."""
        if not replies:
            self.rates.fade()
            self.guess_s -= self._FADING * self.guess_s
            return
        most = max(1, MAX_GUESSES // num_decoding)
        ready = self._ready(replies, num_decoding, most)
        drafts = [Draft(reply, reply.guesser.rates[self.name], most) for reply in ready]
        self._guess(drafts, num_decoding)
        for draft in drafts:
            self._end_draft(draft)

    def _guess(self, continuing: list[Draft], num_decoding: int) -> None:
        times, cost, tokens, num_rows, spent = self._times, self._cost, float(num_decoding), num_decoding, 0.0
        # Bound: each round adds a guess to each draft, and a draft has at most `_most` guesses.
        while continuing:
            is_measured, started = spent > 0 or self._is_like_others(continuing), self._clock()
            guesses = self._guarded_call(
                [draft.reply for draft in continuing], partial(self._compute_guesses, continuing)
            )
            if guesses is None:
                return
            if is_measured:
                seconds = self._clock() - started
                self.guess_s += (seconds - self.guess_s) * (self._WEIGHT if self.guess_s else 1.0)
            for draft, guess in zip(continuing, guesses, strict=True):
                draft.add_token(*guess)
                tokens += draft.chance
            num_rows, spent = num_rows + len(continuing), spent + cost
            continuing = [draft for draft in continuing if draft.may_continue]
            if continuing:
                time, count = times.relative_time(num_rows), len(continuing)
                added = (times.relative_time(num_rows + count) - time + cost) / count
                continuing = [draft for draft in continuing if draft.chance_of_next * (time + spent) > added * tokens]

    @property
    def _cost(self) -> float:
        """The time of a guess as a share of a step of one row."""
        row_s = self._times.row_s
        return self.guess_s / row_s if self.guess_s > 0 and row_s > 0 else self._FIRST_COST

    def _guarded_call(self, replies: Sequence[Reply], compute: Callable[[], _T]) -> _T | None:
        """Returns the result of `compute`. If it fails, returns None, and the replies go on without guesses. Raises
        `DeviceLost`."""
        try:
            return compute()
        except Exception as error:  # noqa: BLE001 (guesses that fail must fail no request)
            raise_if_lost(error)
            for reply in replies:
                name = reply.running.request.id
                log.warning("[engine] %s goes on without %s guesses: %s", name, self.name, first_line(error))
                self._give_up(reply)
            return None

    def _give_up(self, reply: Reply) -> None:
        """Stops guessing for a reply."""
        reply.guesser.give_up(self.name)

    @abstractmethod
    def _ready(self, replies: Sequence[Reply], num_decoding: int, most: int) -> list[Reply]:
        """Returns the replies that guesses can be computed for, at most `most` each."""

    @abstractmethod
    def _compute_guesses(self, drafts: Sequence[Draft]) -> list[tuple[int, float]]:
        """Returns the next guess for each draft, with its probability."""

    def _is_like_others(self, drafts: Sequence[Draft]) -> bool:
        """Returns whether the first forward of a step takes as long as the others."""
        del drafts
        return True

    def _end_draft(self, draft: Draft) -> None:
        """Passes the guesses of this step to the reply's guesser."""
        guesser = draft.reply.guesser
        if draft.tokens and self.name in guesser.rates:
            guesser.set_guesses(self.name, draft.tokens, draft.kinds)
