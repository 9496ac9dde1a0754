"""The prefill grid: steps of `block_size` tokens counted from position 0, then one partial step.

A run that was restored to a grid point goes on in the same steps as a cold run: other step sizes would change the last
bits of the logits. Uncached and one-pass models compute the whole prompt in one step, as transformers' `generate` does.
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
    """Computes a prompt from grid point `start` to its end. Returns the next-token logits, shape [vocab].

    `after_step` is called with a `KVArena` after each step. Raises `Cancelled` between steps once `is_cancelled()`.
    """
    assert start % block_size == 0, "state enters at grid points only"
    assert start < len(token_ids), "at least one token must be computed"
    ids = torch.from_numpy(token_ids).to(model.device, torch.long).unsqueeze(0)
    in_steps = isinstance(state, KVArena) and not state.layout.is_one_pass
    step = block_size if in_steps else len(token_ids)
    for begin in range(start, len(token_ids), step):
        if is_cancelled():
            raise Cancelled
        logits = state.forward(model, ids[:, begin : begin + step])
        if isinstance(state, KVArena):
            after_step(state)
    # The time that it takes is measured, and the sampler waits for it anyway.
    if logits.device.type == "cuda":
        torch.cuda.synchronize(logits.device)
    elif logits.device.type == "mps":
        torch.mps.synchronize()
    return logits
