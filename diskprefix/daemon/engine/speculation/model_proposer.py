"""Proposes tokens with a draft model. The draft model first needs its own state of the prompt. It is restored, computed
while the engine is idle, or computed during a reply if this reply and the next turns will save that time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from diskprefix.daemon.engine.running_request import Reply
from diskprefix.daemon.engine.scheduler import MAX_ROWS
from diskprefix.daemon.engine.speculation.draft_model import DraftModel, DraftSequence
from diskprefix.daemon.engine.speculation.drafting import MIN_SPEEDUP, ChainProposer, Draft
from diskprefix.daemon.engine.speculation.step_times import StepTimes
from diskprefix.runtime.plan.drafts import likeliest

FEW = 16
"""The maximum number of known tokens that are computed with the first guess."""


class ModelProposer(ChainProposer):
    """Proposes tokens with a draft model, as far as that makes decoding faster."""

    name, what = "model", "the draft model"
    _FIRST_COST = 0.2
    _FIRST_REPLY = 128.0
    """The assumed length of a reply in tokens, before any reply has ended."""
    _TURNS = 2
    """The number of turns that share the cost of computing the state: this one, and at least one more."""

    def __init__(self, model: DraftModel, times: StepTimes, clock: Callable[[], float]) -> None:
        super().__init__(times, clock)
        self.model = model
        self.row_s = 0.0
        """The seconds per known token in a forward of many tokens."""
        self._reply_tokens = self._FIRST_REPLY
        """The mean length of recent replies in tokens."""

    def accept_tokens(self, reply: Reply) -> None:
        """Takes back the state of wrong guesses."""
        self.model.take_back_guesses(reply)

    def drop_reply(self, reply: Reply, *, keep: bool) -> None:
        """Ends the draft model's sequence of a reply. `keep`: the next turn may continue from its end."""
        if reply.is_finished and reply.running.reply_limit:
            self._reply_tokens += self._WEIGHT * (len(reply.token_ids) - self._reply_tokens)
        self._end_reply(reply, keep=keep)

    def _end_reply(self, reply: Reply, *, keep: bool) -> None:
        self.model.end_reply(reply, keep=keep, pays=self.gain(self.rates, 1) >= MIN_SPEEDUP)

    def begin_reply(self, reply: Reply) -> None:
        """Begins to fetch stored state while the prompt is computed."""
        rates = reply.guesser.rates.get(self.name)
        if rates is not None and self.gain(rates, 1) >= MIN_SPEEDUP:
            self._sequence(reply)

    def _ready(self, replies: Sequence[Reply], num_decoding: int, most: int) -> list[Reply]:
        ready, behind = list[Reply](), list[Reply]()
        for reply in replies:
            if (sequence := self._sequence(reply)) is None:
                continue
            gain = self.gain(reply.guesser.rates[self.name], num_decoding)
            if self._is_ready(reply):
                ready.append(reply)
            elif self._pays(reply, reply.num_known - sequence.state.num_tokens, self._times.row_s * (1 - 1 / gain)):
                behind.append(reply)
        self._catch_up(behind)
        ready += [reply for reply in behind if self._is_ready(reply)]
        return [reply for reply in ready if self._take_pages_to(reply, reply.num_known + most - 1)]

    def _sequence(self, reply: Reply) -> DraftSequence | None:
        return self._guarded_call([reply], partial(self.model.ready_sequence, reply))

    def _is_ready(self, reply: Reply) -> bool:
        """Returns whether only a few known tokens must still be computed, and the whole prompt is computed."""
        if (sequence := self.model.sequences.get(reply)) is None:
            return False
        num_tokens = sequence.state.num_tokens
        return reply.num_known - num_tokens <= FEW and num_tokens >= reply.prompt_tokens

    def _pays(self, reply: Reply, num_left: int, saved_s: float) -> bool:
        """Returns whether computing `num_left` known tokens pays, if guesses save `saved_s` seconds per token."""
        num_sampled = len(reply.token_ids)
        expected = max(self._reply_tokens - num_sampled, num_sampled) + (self._TURNS - 1) * self._reply_tokens
        return num_left * self.row_s <= expected * saved_s

    def _catch_up(self, behind: Sequence[Reply]) -> None:
        """Computes known tokens of replies that are behind, in all at most `MAX_ROWS`."""
        step, room = list[tuple[Reply, npt.NDArray[np.int64]]](), MAX_ROWS
        for reply in behind:
            start = self.model.sequences[reply].state.num_tokens
            # The first guess comes from the logits of the last token.
            end = min(start + room, reply.num_known - 1)
            if start < reply.prompt_tokens:
                # The saved prompt ends at this position.
                end = min(end, reply.prompt_tokens)
            if end > start and self._take_pages_to(reply, end):
                step.append((reply, reply.ids(start, end)))
                room -= end - start
        started = self._clock()
        if not step or self._guarded_call([reply for reply, _ in step], partial(self._compute, step)) is None:
            return
        seconds, num_rows = self._clock() - started, MAX_ROWS - room
        if num_rows >= FEW:
            self.row_s += (seconds / num_rows - self.row_s) * (self._WEIGHT if self.row_s else 1.0)
        for reply, ids in step:
            self.model.record_prefill(self.model.sequences[reply], seconds * len(ids) / num_rows)

    def _take_pages_to(self, reply: Reply, num_tokens: int) -> bool:
        is_made = self.model.take_pages_to(self.model.sequences[reply], num_tokens)
        if not is_made:
            self._end_reply(reply, keep=True)
            self._give_up(reply)
        return is_made

    def _compute(self, step: Sequence[tuple[Reply, npt.NDArray[np.int64]]]) -> list[tuple[int, float]]:
        return likeliest(self.model.compute([(self.model.sequences[reply], ids) for reply, ids in step]))

    def _compute_guesses(self, drafts: Sequence[Draft]) -> list[tuple[int, float]]:
        return self._compute([(draft.reply, self._next_ids(draft)) for draft in drafts])

    def _next_ids(self, draft: Draft) -> npt.NDArray[np.int64]:
        """Returns the tokens to compute next: the last guess or, without any, the known tokens that are not
        computed."""
        if draft.tokens:
            return np.array(draft.tokens[-1:])
        return draft.reply.ids(self.model.sequences[draft.reply].state.num_tokens, draft.reply.num_known)

    def _is_like_others(self, drafts: Sequence[Draft]) -> bool:
        behind = (draft.reply.num_known - self.model.sequences[draft.reply].state.num_tokens for draft in drafts)
        return sum(behind) <= 2 * len(drafts)

    def _end_draft(self, draft: Draft) -> None:
        if (sequence := self.model.sequences.get(draft.reply)) is not None:
            sequence.num_known, sequence.drafted = draft.reply.num_known, list(draft.tokens)
            self.model.pages.set_ready(sequence.state, min(sequence.state.num_tokens, sequence.num_known))
        super()._end_draft(draft)

    def _give_up(self, reply: Reply) -> None:
        super()._give_up(reply)
        self.model.drop_reply(reply)
