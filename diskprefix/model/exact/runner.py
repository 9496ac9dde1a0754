"""Runs a model over the rows of one step: those of one sequence, or of several in one packed forward, input [1, rows].

In that, each row has its position in its own sequence, and attention reads that sequence's own pages. All else works
row by row. Packing is for models that are exact at every token, so each row has the bits that it has alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from diskprefix.kv.caches import StepCache
from diskprefix.kv.layers import StateLayer, TokenLayer, packed
from diskprefix.kv.layout import Layout, is_out_of_memory
from diskprefix.kv.pages import PagePool
from diskprefix.kv.sequence import KVSequence
from diskprefix.kv.step import Run, Step, computing
from diskprefix.kv.uncached import TransformersState
from diskprefix.model.drafts import DraftRow
from diskprefix.model.exact.invariant import as_it_was, is_installed
from diskprefix.model.planned import plan_of
from diskprefix.model.vision_encoder import PictureRows, picture_arguments
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger("diskprefix")

State: TypeAlias = KVSequence | TransformersState


@dataclass(frozen=True)
class Rows:
    """The next tokens of a sequence, int64 [1, num_rows] on the CPU, and its state. The last ones get logits, and
    all of these but the first may be taken back. `pictures` has what the model takes for those of pictures, and their
    positions, if the sequence has some. `may_lag`: the memory of a draft layer may be completed later."""

    state: State
    token_ids: torch.Tensor
    num_logits: int = 1
    pictures: PictureRows | None = None
    may_lag: bool = False


def run(
    model: PreTrainedModel, step: Sequence[Rows], take_hidden: Callable[[torch.Tensor], object] | None = None
) -> list[torch.Tensor]:
    """Computes one step. Returns each sequence's next-token logits, shape [num_logits, vocab], in the model's dtype.
    `take_hidden` gets the hidden states of the step's rows behind the last norm, [rows, hidden_size]. Several sequences
    must be `KVSequence`s of a layout that packs."""
    first = step[0].state
    if len(step) == 1 and not isinstance(first, KVSequence):
        with as_it_was(model):
            return [first.forward(model, step[0].token_ids)[None]]
    sequences = [rows.state for rows in step if isinstance(rows.state, KVSequence)]
    runs = tuple(
        sequence.begin_step(
            rows.token_ids.shape[1], () if rows.pictures is None else rows.pictures.spans, rows.num_logits - 1
        )
        for sequence, rows in zip(sequences, step, strict=True)
    )
    logits = _by_plan(model, step, sequences, runs, take_hidden)
    if logits is None:
        with _handing_out(model, take_hidden):
            logits = _forward(model, step, sequences, runs)
    for sequence, run_ in zip(sequences, runs, strict=True):
        sequence.end_step(run_)
    return list(torch.split(logits, [rows.num_logits for rows in step]))


def prepare(model: PreTrainedModel, layout: Layout, page_tokens: int) -> None:
    """Makes the plan of a model, if it has one: the first step would wait for it."""
    if is_installed(model) and layout.exact_at == "token":
        plan_of(model, layout, page_tokens)


def draft(model: PreTrainedModel, rows: Sequence[DraftRow]) -> tuple[list[tuple[int, float]], np.ndarray]:
    """Calls `DraftLayer.draft` of a model."""
    first = rows[0].state
    plan = plan_of(model, first.layout, first.pool.block_size)
    assert plan is not None, "a layout with a draft layer is of a plan"
    assert plan.draft_layer is not None, "the model has one"
    return plan.draft_layer.draft(rows)


def forward(model: PreTrainedModel, sequence: KVSequence, token_ids: torch.Tensor, num_logits: int = 1) -> torch.Tensor:
    """Runs [1, n] more tokens of one sequence. Returns the logits behind the last ones, shape [num_logits, vocab]."""
    return run(model, [Rows(sequence, token_ids, num_logits)])[0]


def _by_plan(
    model: PreTrainedModel,
    rows: Sequence[Rows],
    sequences: Sequence[KVSequence],
    runs: tuple[Run, ...],
    take_hidden: Callable[[torch.Tensor], object] | None,
) -> torch.Tensor | None:
    """Computes one step by the model's plan. Returns None if it has none for these rows."""
    layout = sequences[0].layout
    is_exact = is_installed(model) and layout.exact_at == "token"
    plan = plan_of(model, layout, sequences[0].pool.block_size) if is_exact else None
    if plan is None:
        return None
    ids = torch.cat([one.token_ids[0] for one in rows]).numpy()
    logits, hidden = plan.run(
        sequences,
        runs,
        ids,
        [one.num_logits for one in rows],
        [one.pictures for one in rows],
        needs_hidden=take_hidden is not None or layout.has_draft_layer,
    )
    for sequence, run in zip(sequences, runs, strict=True):
        for layer in sequence.token_layers:
            layer.length = run.end
    if plan.draft_layer is not None:
        assert hidden is not None, "it was asked for"
        may_lag = all(one.may_lag for one in rows)
        plan.draft_layer.keep_up(sequences, runs, ids, hidden.view(torch.uint8).numpy(), may_lag=may_lag)
    if take_hidden is not None and hidden is not None:
        take_hidden(hidden)
    return logits


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
    ids = rows[0].token_ids if alone else torch.cat([one.token_ids for one in rows], dim=1)
    input_ids = ids.to(device)
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


def can_pack(model: PreTrainedModel, layout: Layout, block_size: int) -> bool:
    """Returns whether a model that is exact at every token computes several sequences in one forward, and from pages,
    each with the bits that it has alone, and takes guesses back. Some do not: they use the memory of a layer before
    attention does."""
    prompts = [torch.tensor([ids]) for ids in ([1, 2, 3], [2, 1])]
    pool = PagePool(replace(layout, packs=True), model.device, block_size=block_size)
    first, second = ([KVSequence(pool) for _ in prompts] for _ in range(2))
    with torch.inference_mode():
        try:
            alone = [run(model, [Rows(*one)])[0] for one in zip(first, prompts, strict=True)]
            guessed = [
                Rows(state, ids.repeat(1, 2), 1 + ids.shape[1]) for state, ids in zip(second, prompts, strict=True)
            ]
            together = [logits[:1] for logits in run(model, guessed)]
            for state, ids in zip(second, prompts, strict=True):
                state.take_back(ids.shape[1])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            log.info("[model] several requests take turns, they cannot share a step: %s", first_line(error))
            return False
    is_equal = all(one.content() == other.content() for one, other in zip(first, second, strict=True))
    return is_equal and all(map(torch.equal, alone, together))
