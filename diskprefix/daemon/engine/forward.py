"""Computes the step of an engine in one call, and a whole prompt for callers without an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from diskprefix.daemon.engine.device import raise_if_lost
from diskprefix.daemon.engine.pictures.prompt_pictures import PromptPictures
from diskprefix.daemon.engine.running_request import Reply
from diskprefix.daemon.engine.scheduler import Chunk
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.printable import first_line
from diskprefix.runtime.contract import Hidden, Rows, Runtime
from diskprefix.tokens import Logits, TokenIds, floor_to_grid

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


def prefill(
    runtime: Runtime,
    sequence: KVSequence,
    token_ids: TokenIds,
    *,
    start: int,
    block_size: int,
    after_step: Callable[[KVSequence], None],
    stops: Sequence[int] = (),
    pictures: PromptPictures | None = None,
) -> Logits:
    """Computes a prompt from position `start` to its end. Returns the next-token logits, shape [vocab].

    Steps end at multiples of `block_size`, as in a cold run: other steps could change the last bits. They also end at
    `stops`. `start` and `stops` are grid points unless the model is exact at every token. `after_step` is called after
    each step. `pictures` has the rows of all pictures, if the prompt has any.
    """
    is_exact = sequence.layout.exact_at == "token"
    assert is_exact or not any(at % block_size for at in (start, *stops)), "state enters and leaves at grid points only"
    assert start < len(token_ids), "at least one token must be computed"
    ids = token_ids.astype(np.int64) if pictures is None else pictures.token_ids
    first = floor_to_grid(start, block_size) + block_size
    ends = {*range(first, len(token_ids), block_size), *stops, len(token_ids)}
    for begin, stop in () if pictures is None else pictures.spans:
        ends -= {*range(begin + 1, stop)}
    for end in sorted(at for at in ends if start < at <= len(token_ids)):
        of_pictures = None if pictures is None else pictures.rows(sequence.num_tokens, end)
        step = Rows(sequence, ids[sequence.num_tokens : end], pictures=of_pictures)
        logits: Logits = runtime.run([step]).logits[0][-1]
        after_step(sequence)
    return logits
