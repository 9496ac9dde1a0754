"""Proposes tokens of the layer that some models have for that (multi-token prediction). The forward of the first guess
completes the layer's memory (`model.drafts`), so there is nothing to prepare and nothing to take back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diskprefix.engine.drafting import ChainProposer, Draft
from diskprefix.engine.running_request import Reply
from diskprefix.engine.step_times import StepTimes
from diskprefix.kv.sequence import KVSequence
from diskprefix.model.drafts import DraftRow
from diskprefix.model.runtime import Runtime


class LayerProposer(ChainProposer):
    """Proposes tokens of the draft layer of a model, chained: its output is the hidden state of the next guess."""

    name, what = "mtp", "the model's draft layer"
    _FIRST_COST = 0.15

    def __init__(self, runtime: Runtime, times: StepTimes, clock: Callable[[], float]) -> None:
        super().__init__(times, clock)
        self._runtime = runtime

    def _ready(self, replies: Sequence[Reply], num_decoding: int, most: int) -> list[Reply]:
        del num_decoding, most
        return [
            reply for reply in replies if isinstance(reply.state, KVSequence) and reply.state.make_room(reply.num_known)
        ]

    def _compute_guesses(self, drafts: Sequence[Draft]) -> list[tuple[int, float]]:
        guesses, hidden = self._runtime.draft([_row(one) for one in drafts])
        for one, of_one in zip(drafts, hidden, strict=True):
            one.hidden = of_one
        return guesses


def _row(one: Draft) -> DraftRow:
    """Returns the row of the last known token, or of the last guess."""
    reply = one.reply
    assert isinstance(reply.state, KVSequence)
    last = one.tokens[-1] if one.tokens else int(reply.ids(reply.num_known - 1, reply.num_known)[0])
    return DraftRow(reply.state, last, reply.num_known - 1 + len(one.tokens), one.hidden)
