"""Computes steps of a model without an engine. Logits are tensors, token ids int64 [1, n]."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from diskprefix.native.library import operators
from diskprefix.prefixstore.kv.layout import Layout
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows, Runtime
from tests.modules import runtime_of

_made: dict[int, tuple[tuple[object, ...], Runtime]] = {}


def made_once(model: PreTrainedModel, layout: Layout, page_tokens: int) -> Runtime:
    """The runtime of a model, kept for the next steps; of the last few models."""
    key = model, layout, page_tokens, operators()
    known, runtime = _made.get(id(model), ((), None))
    if known != key or runtime is None:
        while len(_made) >= 4:
            del _made[next(iter(_made))]
        _made[id(model)] = key, (runtime := runtime_of(model, layout, page_tokens))
    return runtime


def run(model: PreTrainedModel, step: Sequence[Rows]) -> list[torch.Tensor]:
    """Returns each sequence's next-token logits, [num_logits, vocab]."""
    state = step[0].state
    assert isinstance(state, KVSequence)
    return [torch.from_numpy(one) for one in made_once(model, state.layout, state.pool.block_size).run(step).logits]


def forward(model: PreTrainedModel, sequence: KVSequence, token_ids: torch.Tensor, num_logits: int = 1) -> torch.Tensor:
    """Runs more tokens of one sequence. Returns the logits behind the last ones, [num_logits, vocab]."""
    return run(model, [Rows(sequence, token_ids[0].cpu().numpy(), num_logits)])[0]
