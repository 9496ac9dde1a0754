"""Computes the step of an engine in one call."""

from __future__ import annotations

import logging

import numpy as np

from diskprefix.daemon.engine.device import raise_if_lost
from diskprefix.daemon.engine.running_request import Reply
from diskprefix.daemon.engine.scheduler import Chunk
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.printable import first_line
from diskprefix.runtime.contract import Hidden, Rows, Runtime
from diskprefix.tokens import Logits

log = logging.getLogger("diskprefix")


class StateLost(Exception):
    """A step of several sequences failed and may have changed their states. Each must be computed again, alone."""


def forward(runtime: Runtime, step: list[Chunk[Reply]]) -> list[Logits | Exception]:
    """Computes a step. If that fails, computes each of its sequences alone, unless one of them continues from states.

    Returns, for each chunk, its next-token logits, shape [1 + num_drafted, vocab]: after the last known token and after
    each guess. For a prompt that is scored, the logits after each token, shape [num_rows, vocab]. After a failure,
    returns the error of the chunk's own forward, or `StateLost`. Raises `DeviceLost`.
    """
    try:
        wants_hidden = any(chunk.sequence.running.pooling is not None for chunk in step)
        output = runtime.run([_rows(chunk) for chunk in step], needs_hidden=wants_hidden)
        if output.hidden is not None:
            _hand_out(output.hidden, step)
        return list(output.logits)
    except Exception as error:  # noqa: BLE001 (it is returned)
        raise_if_lost(error)
        if len(step) == 1:
            return [error]
        log.warning("[engine] a step of %d sequences failed, now each alone: %s", len(step), first_line(error))
        if any(chunk.start and _state_of(chunk).layout.states for chunk in step):
            # The layers before the failed layer have already updated their states.
            return [StateLost() for _ in step]
    for chunk in step:
        _state_of(chunk).truncate(chunk.start)
    # Bound: a step of one sequence is not computed again.
    return [result for chunk in step for result in forward(runtime, [chunk])]


def _hand_out(hidden: Hidden, step: list[Chunk[Reply]]) -> None:
    ends = np.cumsum([chunk.num_rows for chunk in step])
    for chunk, rows in zip(step, np.split(hidden, ends[:-1]), strict=True):
        if chunk.sequence.running.pooling is not None:
            chunk.sequence.add_hidden(chunk.start, rows)


def _state_of(chunk: Chunk[Reply]) -> KVSequence:
    assert isinstance(chunk.sequence.state, KVSequence)
    return chunk.sequence.state


def _rows(chunk: Chunk[Reply]) -> Rows:
    reply = chunk.sequence
    assert reply.state is not None
    pictures, of_pictures = reply.running.pictures, None
    if pictures is not None and pictures.are_needed(chunk.start):
        of_pictures = pictures.rows(chunk.start, chunk.end)
    ids, may_lag = reply.ids(chunk.start, chunk.end), chunk.start >= reply.prompt_tokens
    num_logits = chunk.num_rows if reply.scores(chunk) else 1 + chunk.num_drafted
    return Rows(reply.state, ids, num_logits, of_pictures, may_lag, chunk.num_drafted)
