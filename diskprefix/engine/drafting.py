"""Decides which replies a draft model guesses, and how many tokens: as long as that makes decoding faster.

It guesses one token after the other, for all replies in one forward, whose time is measured. A prompt that is not
restored is first computed in parts, once the reply is so long that guesses would have saved the time that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from diskprefix.engine.draft_model import DraftModel, DraftSequence
from diskprefix.engine.guesser import MOST_ROWS, DraftRate
from diskprefix.engine.running_request import Reply
from diskprefix.engine.scheduler import MAX_ROWS

FEW = 16
"""The most known tokens that are computed with the first guess."""
_LEAST_SPEEDUP = 1.05


class DraftTimes:
    """The measured times of a draft model's forwards, in seconds."""

    _WEIGHT, _FADING = 0.1, 1 / 512
    _FIRST_COST = 0.2
    """The time of a guess before it is measured, as a share of a step."""

    def __init__(self) -> None:
        self.guess_s = 0.0
        self.row_s = 0.0
        """The time of a known token in a forward of many."""

    def cost(self, step_s: float) -> float:
        """Returns the time of a guess as a share of `step_s`."""
        return self.guess_s / step_s if self.guess_s > 0 and step_s > 0 else self._FIRST_COST

    def fade(self) -> None:
        """Lets the measured time fade, so that guesses are tried again."""
        self.guess_s -= self._FADING * self.guess_s

    def record_guess(self, seconds: float) -> None:
        self.guess_s += (seconds - self.guess_s) * (self._WEIGHT if self.guess_s else 1.0)

    def record_rows(self, num_rows: int, seconds: float) -> None:
        self.row_s += (seconds / num_rows - self.row_s) * (self._WEIGHT if self.row_s else 1.0)


class ModelDrafter:
    """Guesses with a draft model, as far as that pays."""

    def __init__(self, model: DraftModel, clock: Callable[[], float]) -> None:
        self.model = model
        self.rate = DraftRate()
        self.times = DraftTimes()
        self._clock = clock

    def draft(self, sequences: Sequence[Reply], num_decoding: int, row_cost: float, plain_s: float) -> None:
        """Gives guesses to the replies' guessers. `num_decoding` replies share the next step. `row_cost`: see
        `speculation.RowCost`. `plain_s` is the step's time in seconds without guesses, 0 if that is not known."""
        step_s = plain_s / (1 + row_cost * num_decoding)
        cost = self.times.cost(step_s)
        asked, behind = list[Reply](), list[Reply]()
        for reply in sequences:
            rate = reply.guesser.draft_rate if reply.guesser is not None else None
            if rate is None:
                continue
            gain = speedup(rate.value, num_decoding, row_cost, cost)
            if gain < _LEAST_SPEEDUP:
                rate.fade()
                continue
            try:
                sequence = self.model.ready_sequence(reply)
            except Exception as error:  # noqa: BLE001 (a request goes on without the draft model)
                self.model.give_up(reply, error)
                continue
            if sequence is None:
                continue
            self.model.take_back_guesses(reply)
            num_left = reply.num_known - sequence.state.num_tokens
            if num_left <= FEW and sequence.state.num_tokens >= reply.prompt_tokens:
                asked.append(reply)
            elif num_left * self.times.row_s <= len(reply.token_ids) * plain_s * (1 - 1 / gain):
                behind.append(reply)
        if not asked and not behind:
            self.rate.fade()
            self.times.fade()
        self._catch_up(behind)
        self._guess(asked, num_decoding, row_cost, cost)

    def _catch_up(self, behind: Sequence[Reply]) -> None:
        """Computes known tokens of some replies, at most as many as a step has rows."""
        step, room = list[tuple[Reply, torch.Tensor]](), MAX_ROWS
        for reply in behind:
            start = self.model.sequences[reply].state.num_tokens
            end = min(start + room, reply.num_known)
            if start < reply.prompt_tokens:
                # The saved prompt ends there.
                end = min(end, reply.prompt_tokens)
            if end > start and self._has_room(reply, end):
                step.append((reply, reply.ids(start, end)))
                room -= end - start
        if not step:
            return
        found = self._computed(step)
        if found is None:
            return
        _, seconds = found
        num_rows = MAX_ROWS - room
        if num_rows >= FEW:
            self.times.record_rows(num_rows, seconds)
        for reply, ids in step:
            self.model.record_prefill(reply, seconds * ids.shape[1] / num_rows)

    def _guess(self, asked: Sequence[Reply], num_decoding: int, row_cost: float, cost: float) -> None:
        """Guesses tokens of all these replies, as long as another guess seems to pay."""
        most = max(1, MOST_ROWS // num_decoding)
        have_room = [reply for reply in asked if self._has_room(reply, reply.num_known + most - 1)]
        drafts = [Draft(reply, self.model.sequences[reply], most) for reply in have_room]
        tokens, time = float(num_decoding), 1 + row_cost * num_decoding
        continuing = drafts
        while continuing:
            step = [(one.reply, one.next_ids()) for one in continuing]
            found = self._computed(step)
            if found is None:
                break
            guesses, seconds = found
            num_rows = sum(ids.shape[1] for _, ids in step)
            if num_rows <= 2 * len(continuing):
                self.times.record_guess(seconds)
            for one, guess in zip(continuing, guesses, strict=True):
                one.add(*guess)
                tokens, time = tokens + one.chance, time + row_cost
            time += cost
            continuing = [
                one
                for one in continuing
                if one.may_continue and one.chance_of_next * time > (row_cost + cost / len(continuing)) * tokens
            ]
        for one in drafts:
            if one.reply in self.model.sequences:
                one.end()

    def _has_room(self, reply: Reply, num_tokens: int) -> bool:
        has_room = self.model.has_room(reply, num_tokens)
        if not has_room and reply.guesser is not None:
            reply.guesser.draft_rate = None
            self.model.release(reply, keep=True)
        return has_room

    def _computed(self, step: Sequence[tuple[Reply, torch.Tensor]]) -> tuple[list[tuple[int, float]], float] | None:
        """Returns the guesses of a forward, as `likeliest` does, and its seconds; None if it fails."""
        started = self._clock()
        try:
            guesses = likeliest(self.model.compute(step))
        except Exception as error:  # noqa: BLE001 (requests go on without the draft model)
            for reply, _ in step:
                self.model.give_up(reply, error)
            return None
        return guesses, self._clock() - started


class Draft:
    """The guesses for one reply in one step."""

    def __init__(self, reply: Reply, sequence: DraftSequence, most: int) -> None:
        assert reply.guesser is not None
        assert reply.guesser.draft_rate is not None
        self.reply, self._sequence = reply, sequence
        self._guesser, self._rate = reply.guesser, reply.guesser.draft_rate
        self.tokens: list[tuple[int, float]] = []
        """The guesses, with their probabilities."""
        self.chance = 1.0
        """The chance that all guesses are right."""
        self.may_continue = True
        self._most = min(most, reply.room_for_draft)

    @property
    def chance_of_next(self) -> float:
        """The chance that one more guess is right, with all before it."""
        return self.chance * self._rate.value

    def next_ids(self) -> torch.Tensor:
        """Returns the tokens to compute next, int64 [1, n]: known ones that are not computed, or the last guess."""
        if not self.tokens:
            return self.reply.ids(self._sequence.state.num_tokens, self.reply.num_known)
        return torch.tensor([[self.tokens[-1][0]]])

    def add(self, token: int, probability: float) -> None:
        """Adds a guess, unless its probability says that the draft model computed nothing finite."""
        if not math.isfinite(probability):
            self.may_continue = False
            return
        rates = self._guesser.rates
        self.tokens.append((token, probability))
        self.chance *= rates.of(rates.of_draft(probability))
        self.may_continue = len(self.tokens) < self._most

    def end(self) -> None:
        """Gives the guesses to the reply's guesser."""
        sequence = self._sequence
        sequence.num_known, sequence.drafted = self.reply.num_known, [token for token, _ in self.tokens]
        sequence.state.num_ready = min(sequence.state.num_tokens, self.reply.num_known)
        if self.tokens:
            self._guesser.use_drafted(self.tokens)


def likeliest(logits: torch.Tensor) -> list[tuple[int, float]]:
    """Returns the likeliest token of each row of `logits`, [rows, vocab], and its probability, which is not finite if
    the logits are not. Waits for the device once: whether another guess pays depends on the probabilities."""
    scores = logits.float()
    best, token_ids = scores.max(dim=-1)
    probabilities = 1 / (scores - best[:, None]).exp().sum(dim=-1)
    # One copy for both: float32 has all integers up to 2**24.
    tokens, found = torch.stack([token_ids.float(), probabilities]).cpu().tolist()
    return [(int(token), probability) for token, probability in zip(tokens, found, strict=True)]


def speedup(rate: float, num_sequences: int, row_cost: float, draft_cost: float) -> float:
    """Returns how many times as fast decoding is with a draft model, at the best number of guesses. Each is right with
    the chance `rate`. `draft_cost` (one token for all sequences) and `row_cost` are shares of a step without rows."""
    plain = best = 1 / (1 + row_cost * num_sequences)
    tokens = chance = 1.0
    for count in range(1, MOST_ROWS // num_sequences + 1):
        chance *= rate
        tokens += chance
        best = max(best, tokens / (1 + row_cost * num_sequences * (1 + count) + draft_cost * count))
    return best / plain
