"""Runs a model over the rows of one step: those of one sequence, or of several in one packed forward, input [1, rows].

In that, each row has its position in its own sequence, and attention reads that sequence's own pages. All else works
row by row. Packing is for models that are exact at every token, so each row has the bits that it has alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from diskprefix.kv.caches import StepCache
from diskprefix.kv.layers import StateLayer, TokenLayer, packed
from diskprefix.kv.layout import Layout
from diskprefix.kv.sequence import KVSequence
from diskprefix.kv.step import Run, Step, computing
from diskprefix.model.drafts import DraftRow
from diskprefix.model.load.memory import use_gpu
from diskprefix.model.planned import plan_of
from diskprefix.model.runtime import Rows, Runtime, StepOutput, begin_step
from diskprefix.model.uncached import TransformersState
from diskprefix.model.vision_encoder import picture_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def runtime_of(model: PreTrainedModel, layout: Layout, page_tokens: int) -> Runtime:
    """Returns the runtime of a loaded model."""
    plan = plan_of(model, layout, page_tokens) if layout.exact_at == "token" else None
    return ModuleRuntime(model, layout) if plan is None else plan


class ModuleRuntime:
    """Computes the steps of a model by its modules."""

    def __init__(self, model: PreTrainedModel, layout: Layout) -> None:
        self.layout, self._model = layout, model
        self.vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)

    def prepare(self) -> None:
        """Does nothing."""

    def run(self, step: Sequence[Rows], *, needs_hidden: bool = False) -> StepOutput:
        """Computes a step."""
        use_gpu(self._model.device)
        first = step[0].state
        if isinstance(first, TransformersState):
            return StepOutput([_as_array(first.forward(step[0].token_ids)[None])])
        sequences, runs = begin_step(step)
        hidden = list[torch.Tensor]()
        with _handing_out(self._model, hidden.append if needs_hidden else None):
            logits = _forward(self._model, step, sequences, runs)
        for sequence, run_ in zip(sequences, runs, strict=True):
            sequence.end_step(run_)
        of_each = np.split(_as_array(logits), np.cumsum([rows.num_logits for rows in step])[:-1])
        return StepOutput(of_each, _as_array(hidden[0]) if hidden else None)

    def draft(self, rows: Sequence[DraftRow]) -> tuple[list[tuple[int, float]], np.ndarray]:
        """Raises `NotImplementedError`: only plans compute draft layers."""
        raise NotImplementedError

    def new_state(self) -> TransformersState:
        """Returns an empty state of transformers' own."""
        return TransformersState(self._model)


def _as_array(rows: torch.Tensor) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = rows.float().cpu().numpy()
    return found


def run(model: PreTrainedModel, step: Sequence[Any]) -> list[torch.Tensor]:
    """Computes one step. Returns each sequence's next-token logits, [num_logits, vocab]."""
    state = step[0].state
    assert isinstance(state, KVSequence)
    step = [replace(one, token_ids=np.asarray(one.token_ids).reshape(-1)) for one in step]
    return [torch.from_numpy(one) for one in runtime_of(model, state.layout, state.pool.block_size).run(step).logits]


def forward(model: PreTrainedModel, sequence: KVSequence, token_ids: torch.Tensor, num_logits: int = 1) -> torch.Tensor:
    """Runs [1, n] more tokens of one sequence. Returns the logits behind the last ones, shape [num_logits, vocab]."""
    return run(model, [Rows(sequence, token_ids[0].cpu().numpy(), num_logits)])[0]


@contextmanager
def _handing_out(model: PreTrainedModel, take: Callable[[torch.Tensor], object] | None) -> Iterator[None]:
    """Gives a context whose forward hands out its last hidden states, as the decoder gives them to the head."""
    if take is None:
        yield
        return
    assert model.base_model is not model, "a request for hidden states was refused before"
    hook = model.base_model.register_forward_hook(lambda _module, _inputs, output: take(output[0][0]))
    try:
        yield
    finally:
        hook.remove()


def _forward(
    model: PreTrainedModel, rows: Sequence[Rows], sequences: Sequence[KVSequence], runs: tuple[Run, ...]
) -> torch.Tensor:
    """Computes one step. Returns the logits of the rows that get some, [logits, vocab]."""
    layout, alone, device = sequences[0].layout, len(sequences) == 1, model.device
    step = Step(runs, gathers=not layout.packs) if layout.exact_at == "token" else None
    keeps = "logits_to_keep" in layout.options
    kept: int | torch.Tensor = rows[0].num_logits
    cache = sequences[0].cache
    if not alone:
        assert step is not None, "only models that are exact at every token pack"
        of_layers = zip(*(sequence.layers for sequence in sequences), strict=True)
        layers = [packed(of, step) if isinstance(of[0], TokenLayer | StateLayer) else of[0] for of in of_layers]
        # Its lengths, those of the first sequence, are not used for positions or masks.
        cache = StepCache(layers, lambda: runs[0].start)
        ends = accumulate(run.num_rows for run in runs)
        kept = torch.cat([torch.arange(end - one.num_logits, end) for end, one in zip(ends, rows, strict=True)])
    of_each = [torch.from_numpy(one.token_ids)[None] for one in rows]
    input_ids = torch.cat(of_each, dim=1).to(device)
    call: dict[str, Any] = {layout.cache_argument: cache, "use_cache": True}
    if "position_ids" in layout.options:
        # Not every model counts positions from its cache.
        call["position_ids"] = positions(runs).to(device)
    if any(one.pictures is not None for one in rows):
        call |= picture_arguments(input_ids, runs, [one.pictures for one in rows])
    if keeps:
        call["logits_to_keep"] = kept
    with computing(step):
        output = model(input_ids=input_ids, **call)
    logits: torch.Tensor = output.logits[0]
    return logits[-rows[0].num_logits :] if alone else logits if keeps else logits[kept]


def positions(runs: Sequence[Run]) -> torch.Tensor:
    """Returns the positions of the rows of a step, each in its own sequence, int64 [1, rows]."""
    return torch.cat([torch.arange(run.start, run.end) for run in runs])[None]
