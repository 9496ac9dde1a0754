"""Computes a model by transformers' own modules, one sequence a step, exact at multiples of the block size.

The sequence that was computed last has a contiguous cache on the model's device. It is filled from the sequence's pages
when another sequence begins or comes back. What a step adds is copied to the pages when the step ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.kv.step import Run
from diskprefix.runtime.contract import Rows, StepOutput, begin_step
from diskprefix.runtime.grid.cache_argument import cache_argument
from diskprefix.runtime.grid.grid_cache import GridCache, filled
from diskprefix.runtime.grid.uncached import TransformersState
from diskprefix.runtime.memory import use_gpu
from diskprefix.runtime.pictures.vision_encoder import picture_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from diskprefix.runtime.plan.drafts import DraftRow


class GridRuntime:
    """Computes the steps of a model on any device (`model.runtime`)."""

    def __init__(self, model: PreTrainedModel, layout: Layout) -> None:
        self.layout, self._model = layout, model
        self.vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
        self._cache_argument = cache_argument(type(model).forward)
        self._cache: GridCache | None = None
        self._mark = object()
        """The mark of the sequence whose state is in the cache."""

    @property
    def has_hidden(self) -> bool:
        return self._model.base_model is not self._model

    def prepare(self) -> None:
        """Does nothing."""

    @torch.inference_mode()
    def run(self, step: Sequence[Rows], *, needs_hidden: bool = False) -> StepOutput:
        """Computes the rows of one sequence."""
        (rows,) = step
        use_gpu(str(self._model.device))
        if isinstance(rows.state, TransformersState):
            return StepOutput([_as_array(rows.state.forward(rows.token_ids)[None])])
        (sequence,), (run,) = begin_step(step)
        cache = self._cache_of(sequence)
        hidden = list[torch.Tensor]()
        with _repeatable_kernels(), _handing_out(self._model, hidden if needs_hidden else None):
            logits = self._forward(rows, run, cache)
        cache.save(sequence, run)
        sequence.end_step(run)
        self._cache, self._mark = cache, object()
        sequence.mark = self._mark
        return StepOutput([_as_array(logits)], _as_array(hidden[0]) if hidden else None)

    def draft(self, rows: Sequence[DraftRow]) -> tuple[list[tuple[int, float]], np.ndarray]:
        """Raises `NotImplementedError`: models on the grid do not use their draft layers."""
        raise NotImplementedError

    def new_state(self) -> TransformersState:
        """Returns an empty state of transformers' own."""
        return TransformersState(self._model)

    def _cache_of(self, sequence: KVSequence) -> GridCache:
        """Returns the cache of a sequence. Until the step ends, the cache belongs to no sequence."""
        cache, self._cache = self._cache, None
        if cache is None or sequence.mark is not self._mark:
            # Two would take twice the memory.
            del cache
            cache = filled(GridCache(self._model.config), sequence, self._model.device)
        return cache

    def _forward(self, rows: Rows, run: Run, cache: GridCache) -> torch.Tensor:
        """Returns the logits of the last rows, [num_logits, vocab]."""
        layout, device, argument = self.layout, self._model.device, self._cache_argument
        assert argument is not None, "a model whose forward takes no cache has no sequences"
        input_ids = torch.from_numpy(rows.token_ids)[None].to(device)
        call: dict[str, Any] = {argument: cache, "use_cache": True}
        if "position_ids" in layout.options:
            # Not every model counts positions from its cache.
            call["position_ids"] = torch.arange(run.start, run.end, device=device)[None]
        if rows.pictures is not None:
            call |= picture_arguments(input_ids, [run], [rows.pictures])
        if "logits_to_keep" in layout.options:
            call["logits_to_keep"] = rows.num_logits
        logits: torch.Tensor = self._model(input_ids=input_ids, **call).logits[0]
        return logits[-rows.num_logits :]


@contextmanager
def _repeatable_kernels() -> Iterator[None]:
    """Disables cuDNN's attention in a context: the bits of a step with one row differ from run to run (seen with torch
    2.11 on an H200). torch's other kernels repeat their bits."""
    cuda: Any = torch.backends.cuda  # torch leaves them without types
    was_enabled = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(was_enabled)


@contextmanager
def _handing_out(model: PreTrainedModel, hidden_states: list[torch.Tensor] | None) -> Iterator[None]:
    """In the context, each forward appends its last hidden states, which are the head's input, to the list."""
    if hidden_states is None:
        yield
        return
    assert model.base_model is not model, "a request for hidden states was refused before"
    hook = model.base_model.register_forward_hook(lambda _module, _inputs, output: hidden_states.append(output[0][0]))
    try:
        yield
    finally:
        hook.remove()


def _as_array(rows: torch.Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = rows.float().cpu().numpy()
    return array
