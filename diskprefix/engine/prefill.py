"""A whole prompt of one sequence, for callers who compute nothing else: steps of `block_size` tokens counted from
position 0, then one partial step.

A run that was restored to a grid point goes on in the same steps as a cold run: for most models, other step sizes would
change the last bits of the logits. With a model that is exact at every token a run goes on anywhere. Its first step
ends at the next grid point, where a block is complete. One-pass models compute the whole prompt in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from diskprefix.engine.device import synchronize
from diskprefix.kv.arena import KVArena
from diskprefix.tokens import TokenIds, floor_to_grid

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prefill(
    model: PreTrainedModel,
    arena: KVArena,
    token_ids: TokenIds,
    *,
    start: int,
    block_size: int,
    after_step: Callable[[KVArena], None],
) -> torch.Tensor:
    """Computes a prompt from position `start` to its end. Returns the next-token logits, shape [vocab].

    `start` is a grid point unless the model is exact at every token. `after_step` is called after each step.
    """
    assert arena.layout.state_kind == "token" or start % block_size == 0, "state enters at grid points only"
    assert start < len(token_ids), "at least one token must be computed"
    ids = torch.from_numpy(token_ids).to(model.device, torch.long).unsqueeze(0)
    step = len(token_ids) if arena.layout.is_one_pass else block_size
    for grid_point in range(floor_to_grid(start, step), len(token_ids), step):
        logits = arena.forward(model, ids[:, max(start, grid_point) : grid_point + step])
        after_step(arena)
    # The time that it takes is measured.
    synchronize(logits.device)
    return logits
