"""The prefill grid: steps of `block_size` tokens counted from position 0, then one partial step.

A run that was restored to a grid point goes on in the very same steps as the run that started cold, so it makes the
same kernel calls on the same bytes. Any other step sizes would change the last bits of the logits.

State that is not ours is not cut, and neither is that of models (the first Mamba) which go on wrongly from a state when
more than one token is added to it: there the whole prompt is one step, as in transformers' own `generate`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch

from diskprefix.kv.arena import KVArena
from diskprefix.kv.uncached import TransformersState
from diskprefix.tokens import TokenIds

if TYPE_CHECKING:
    from transformers import PreTrainedModel

State: TypeAlias = KVArena | TransformersState


class Cancelled(Exception):
    """The client has gone; not an error, and never sent anywhere."""


def forward(model: PreTrainedModel, state: State, token_ids: torch.Tensor) -> torch.Tensor:
    """Run [1, n] tokens on top of `state` and answer the next-token logits, shape [vocab], in the model's dtype."""
    if isinstance(state, TransformersState):
        return state.forward(token_ids)
    return state.forward(model, token_ids)


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
    """Prefill from grid point `start` to the end of the prompt; answer the next-token logits, shape [vocab].

    State that is not ours starts at 0. `after_step` is called with state that is ours, after each step of the grid.
    Raises `Cancelled` between steps once `is_cancelled()`.
    """
    assert start % block_size == 0, "state enters at grid points only"
    assert start < len(token_ids), "at least one token must be computed"
    ids = torch.from_numpy(token_ids).to(model.device, torch.long).unsqueeze(0)
    in_steps = isinstance(state, KVArena) and not state.layout.is_one_pass
    step = block_size if in_steps else len(token_ids)
    for begin in range(start, len(token_ids), step):
        if is_cancelled():
            raise Cancelled
        logits = forward(model, state, ids[:, begin : begin + step])
        if isinstance(state, KVArena):
            after_step(state)
    _wait_for(logits.device)
    return logits


def _wait_for(device: torch.device) -> None:
    """Until what was launched has run: the time that it takes is measured, and the sampler waits for it anyway."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
