"""Runs a model over the rows of one step: those of one sequence, or of several in one packed forward.

In a packed forward the rows of all sequences stand one behind the other, input [1, rows]. Each row has its position in
its own sequence, and attention (`model.attention`) reads that sequence's own memory. Everything else in a model works
row by row. Packing is for models that are exact at every token, so each row has the bits that it has alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from transformers.cache_utils import Cache

from diskprefix.kv.arena import KVArena
from diskprefix.kv.layers import TokenLayer, packed
from diskprefix.kv.step import Step, computing
from diskprefix.kv.uncached import TransformersState
from diskprefix.model.invariant import as_it_was

if TYPE_CHECKING:
    from transformers import PreTrainedModel

State: TypeAlias = KVArena | TransformersState


@dataclass(frozen=True)
class Rows:
    """The next tokens of one sequence, int64 of shape [1, num_rows], and where its state is."""

    state: State
    token_ids: torch.Tensor


def run(model: PreTrainedModel, step: Sequence[Rows]) -> list[torch.Tensor]:
    """Computes one step. Returns each sequence's next-token logits, shape [vocab], in the model's dtype.

    Several sequences must be in `KVArena`s of their own, of a layout that is exact at every token.
    """
    if len(step) == 1:
        with as_it_was(model) if isinstance(step[0].state, TransformersState) else nullcontext():
            return [step[0].state.forward(model, step[0].token_ids)]
    arenas = [rows.state for rows in step if isinstance(rows.state, KVArena)]
    runs = tuple(arena.begin(rows.token_ids.shape[1]) for arena, rows in zip(arenas, step, strict=True))
    together = Step(runs)
    ends = torch.tensor([run.num_rows for run in runs]).cumsum(0)
    layout = arenas[0].layout
    with computing(together):
        output = model(
            input_ids=torch.cat([rows.token_ids for rows in step], dim=1),
            position_ids=torch.cat([torch.arange(run.start, run.end) for run in runs])[None],
            use_cache=True,
            **{layout.cache_argument: _PackedCache(arenas, together)},
            **({"logits_to_keep": ends - 1} if "logits_to_keep" in layout.options else {}),
        )
    for arena, run_ in zip(arenas, runs, strict=True):
        assert arena.num_tokens == run_.end, "the model must add all tokens of a step to its state"
    logits: torch.Tensor = output.logits[0]
    return list(logits if "logits_to_keep" in layout.options else logits[ends - 1])


class _PackedCache(Cache):  # type: ignore[misc]
    """What the model takes for its cache in a packed forward. Lengths are those of the first sequence: positions and
    masks come from elsewhere."""

    def __init__(self, arenas: Sequence[KVArena], step: Step) -> None:
        of_layers = zip(*(arena.layers for arena in arenas), strict=True)
        layers = [packed(of, step) if isinstance(of[0], TokenLayer) else of[0] for of in of_layers]
        Cache.__init__(self, layers=layers)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        length: int = self.layers[layer_idx].length
        return length
