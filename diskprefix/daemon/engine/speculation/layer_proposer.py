"""Proposes tokens with the draft layer that some models have (multi-token prediction). The forward of the first guess
completes the layer's KV state (`model.drafts`), so nothing must be prepared or taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diskprefix.daemon.engine.running_request import Reply
from diskprefix.daemon.engine.speculation.drafting import ChainProposer, Draft
from diskprefix.daemon.engine.speculation.step_times import StepTimes
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Runtime
from diskprefix.runtime.plan.drafts import DraftRow


class LayerProposer(ChainProposer):
    """Proposes tokens with the draft layer of a model, in a chain: the layer's output is the hidden state for the next
    guess."""

    name, what = "mtp", "the model's draft layer"
    _FIRST_COST = 0.15

    def __init__(self, runtime: Runtime, times: StepTimes, clock: Callable[[], float]) -> None:
        super().__init__(times, clock)
        self._runtime = runtime

    def _ready(self, replies: Sequence[Reply], num_decoding: int, most: int) -> list[Reply]:
        del num_decoding, most
        return [
            reply
            for reply in replies
            if isinstance(reply.state, KVSequence) and reply.state.take_pages_to(reply.num_known)
        ]

    def _compute_guesses(self, drafts: Sequence[Draft]) -> list[tuple[int, float]]:
        guesses, hidden = self._runtime.draft([_row(draft) for draft in drafts])
        for draft, state in zip(drafts, hidden, strict=True):
            draft.hidden = state
        return guesses


def _row(draft: Draft) -> DraftRow:
    """Returns the row to compute: the last guess or, without any, the last known token."""
    reply = draft.reply
    assert isinstance(reply.state, KVSequence)
    last = draft.tokens[-1] if draft.tokens else int(reply.ids(reply.num_known - 1, reply.num_known)[0])
    return DraftRow(reply.state, last, reply.num_known - 1 + len(draft.tokens), draft.hidden)
