"""Proposes tokens of the layer that some models have for that (multi-token prediction). Each step keeps the layer's
memory up (`model.exact.drafts`), so there is nothing to prepare and nothing to take back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from diskprefix.engine.device import raise_if_lost
from diskprefix.engine.drafting import ChainProposer, Draft
from diskprefix.engine.running_request import Reply
from diskprefix.engine.step_times import StepTimes
from diskprefix.kv.sequence import KVSequence
from diskprefix.model.exact.drafts import DraftRow, draft
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("diskprefix")


class LayerProposer(ChainProposer):
    """Proposes tokens of the draft layer of a model, chained: its output is the hidden state of the next guess."""

    name = "mtp"
    _FIRST_COST = 0.15

    def __init__(self, model: PreTrainedModel, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self._model = model

    def _ready(self, replies: Sequence[Reply], times: StepTimes, num_decoding: int, most: int) -> list[Reply]:
        del times, num_decoding, most
        return [
            reply for reply in replies if isinstance(reply.state, KVSequence) and reply.state.has_room(reply.num_known)
        ]

    def _computed(self, drafts: Sequence[Draft]) -> list[tuple[int, float]] | None:
        try:
            guesses, hidden = draft(self._model, [_row(one) for one in drafts])
        except Exception as error:  # noqa: BLE001 (requests go on without guesses)
            raise_if_lost(error)
            for one in drafts:
                log.warning("[engine] %s goes on without guesses: %s", one.reply.running.request.id, first_line(error))
                if one.reply.guesser is not None:
                    one.reply.guesser.give_up(self.name)
            return None
        for one, of_one in zip(drafts, hidden, strict=True):
            one.hidden = of_one
        return guesses


def _row(one: Draft) -> DraftRow:
    """Returns the row of the last known token, or of the last guess."""
    reply = one.reply
    assert isinstance(reply.state, KVSequence)
    last = one.tokens[-1] if one.tokens else int(reply.ids(reply.num_known - 1, reply.num_known))
    return DraftRow(reply.state, last, reply.num_known - 1 + len(one.tokens), one.hidden)
