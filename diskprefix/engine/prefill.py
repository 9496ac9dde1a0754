"""The prefill grid: steps of `block_size` tokens counted from position 0, then one partial step.

A run that was restored to a grid point goes on in the same steps as a cold run: for most models, other step sizes would
change the last bits of the logits. With a model that is exact at every token a run goes on anywhere. Its first step
ends at the next grid point, where a block is complete. Uncached and one-pass models compute the whole prompt in one
step, as transformers' `generate` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch

from diskprefix.kv.arena import KVArena
from diskprefix.kv.uncached import TransformersState
from diskprefix.tokens import TokenIds, floor_to_grid

if TYPE_CHECKING:
    from transformers import PreTrainedModel

State: TypeAlias = KVArena | TransformersState


class Cancelled(Exception):
    """The client has gone; not an error, and never sent anywhere."""


def prefill(
    model: PreTrainedModel,
    state: State,
    token_ids: TokenIds,
    *,
    start: int,
    block_size: int,
    is_cancelled: Callable[[], bool],
    after_step: Callable[[KVArena], None],
) -> torch.Tensor:
    """Computes a prompt from position `start` to its end. Returns the next-token logits, shape [vocab].

    `start` is a grid point unless the model is exact at every token. `after_step` is called with a `KVArena` after each
    step. Raises `Cancelled` between steps once `is_cancelled()`.
    """
    is_exact_at_tokens = isinstance(state, KVArena) and state.layout.state_kind == "token"
    assert is_exact_at_tokens or start % block_size == 0, "state enters at grid points only"
    assert start < len(token_ids), "at least one token must be computed"
    ids = torch.from_numpy(token_ids).to(model.device, torch.long).unsqueeze(0)
    in_steps = isinstance(state, KVArena) and not state.layout.is_one_pass
    step = block_size if in_steps else len(token_ids)
    for grid_point in range(floor_to_grid(start, step), len(token_ids), step):
        if is_cancelled():
            raise Cancelled
        logits = state.forward(model, ids[:, max(start, grid_point) : grid_point + step])
        if isinstance(state, KVArena):
            after_step(state)
    # The time that it takes is measured, and the sampler waits for it anyway.
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    elif logits.device.type == "mps":
        torch.mps.synchronize()
    return logits
