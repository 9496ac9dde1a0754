"""Computes one step: in one forward, and where that fails, each sequence alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from diskprefix.engine.device import raise_if_lost, synchronize
from diskprefix.engine.job import Choice
from diskprefix.engine.request import GenerateRequest
from diskprefix.engine.scheduler import Chunk
from diskprefix.errors import DiskPrefixError, InvalidRequest
from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import is_out_of_memory
from diskprefix.model.exact import runner
from diskprefix.printable import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("diskprefix")


def forward(model: PreTrainedModel, step: list[Chunk[Choice]]) -> list[torch.Tensor | Exception]:
    """Returns each chunk's next-token logits, or what its own forward raised: shape [1 + num_drafted, vocab], those
    behind its last known token and behind each guess. Raises `DeviceLost`."""
    try:
        logits = runner.run(model, [_rows(chunk) for chunk in step])
        synchronize(model.device)
    except Exception as error:  # noqa: BLE001 (it is returned)
        raise_if_lost(error)
        if len(step) == 1:
            return [_naming_media(error, step[0].sequence.job.request)]
        log.warning("[engine] a step of %d sequences failed, now each alone: %s", len(step), first_line(error))
    else:
        return list(logits)
    for chunk in step:
        assert isinstance(chunk.sequence.state, KVArena)
        chunk.sequence.state.truncate(chunk.start)
    return [result for chunk in step for result in forward(model, [chunk])]


def _rows(chunk: Chunk[Choice]) -> runner.Rows:
    choice = chunk.sequence
    assert choice.state is not None
    return runner.Rows(choice.state, choice.ids(chunk.start, chunk.end), 1 + chunk.num_drafted)


def _naming_media(error: Exception, request: GenerateRequest) -> Exception:
    """Turns what a model's own code raises over images and sounds into an `InvalidRequest` that names them."""
    if not request.prompt.media or isinstance(error, DiskPrefixError) or is_out_of_memory(error):
        return error
    log.warning("[engine] %s: the model's own code fails over its media: %s", request.id, first_line(error))
    failure = InvalidRequest(
        f"messages: the model's own code fails over these images or sounds: {first_line(error)}",
        param="messages",
        code="unsupported_content",
    )
    failure.__cause__ = error
    return failure
