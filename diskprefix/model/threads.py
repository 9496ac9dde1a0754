"""Whether the numbers that a model computes depend on the number of compute threads, measured on this machine.

Kernels may cut a sum into one part for each thread, and another cut rounds otherwise. Two processes with different
numbers of threads may share a store only where this does not happen. Each process compares its own number of threads
with one thread: if both of them compute what one thread computes, they compute the same.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from diskprefix.kv.arena import Bytes, KVArena
from diskprefix.kv.layout import Layout
from diskprefix.memo import Memo
from diskprefix.model.rehearsal import made_up_tokens
from diskprefix.printable import first_line
from diskprefix.version import __version__

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("diskprefix")

_verdicts = Memo("threads", version=1)
_SAME, _DIFFERENT = "same", "different"

_CONTEXT_TOKENS = 1024
"""Tokens of made-up state before the steps that are compared, so that attention has long rows to sum up."""


def threads_in_identity(model: PreTrainedModel, layout: Layout, *, block_size: int, identity: str) -> str:
    """Returns the number of compute threads, in decimal, if it belongs to the identity of the model's numbers, else "".

    It is left out where it cannot matter (one thread, a GPU, a model without a cache) and where this machine computes
    the same bits with it as with one thread. The comparison takes a few forwards of the whole model. Its result is
    remembered for `identity`, which names the weights, the kind of CPU and the libraries.
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or model.device.type != "cpu" or layout.unsupported:
        return ""
    key = hashlib.sha256(f"{__version__} {layout} {block_size} {num_threads} {identity}".encode()).hexdigest()
    verdict = _verdicts.get(key)
    if verdict not in (_SAME, _DIFFERENT):
        try:
            verdict = _compared(model, layout, block_size, num_threads)
        except Exception as error:  # noqa: BLE001 (a model class of any age and author may fail in any way)
            log.warning("[engine] 1 and %d threads could not be compared: %s", num_threads, first_line(error))
            return str(num_threads)
        _verdicts.put(key, verdict)
    return "" if verdict == _SAME else str(num_threads)


def _compared(model: PreTrainedModel, layout: Layout, block_size: int, num_threads: int) -> str:
    started = time.perf_counter()
    found = _numbers(model, layout, block_size)
    with _one_thread():
        verdict = _SAME if _numbers(model, layout, block_size) == found else _DIFFERENT
    took_s = time.perf_counter() - started
    log.info("[engine] 1 and %d threads compute %s numbers (compared in %.1f s)", num_threads, verdict, took_s)
    return verdict


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _numbers(model: PreTrainedModel, layout: Layout, block_size: int) -> list[bytes]:
    """The logits and the state that a whole step, a partial step and a single token give, as bytes."""
    steps, context = _steps(model, layout, block_size)
    num_tokens = sum(steps)
    arena = KVArena(layout, model.device)
    arena.reserve(context + num_tokens)
    _make_up(arena, context)
    arena.truncate(context)
    token_ids = made_up_tokens(model, 4, num_tokens)
    with torch.inference_mode():
        logits = [arena.forward(model, step) for step in torch.split(token_ids, steps, dim=1)]
    return [
        *(bytes(arena.logits_bytes(row)) for row in logits),
        bytes(arena.read_tokens(context, num_tokens)),
        bytes(arena.read_states()),
    ]


def _steps(model: PreTrainedModel, layout: Layout, block_size: int) -> tuple[list[int], int]:
    """The sizes of the steps and the tokens before them, as far as the model has positions."""
    if layout.is_one_pass:
        return [block_size], 0
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 20
    whole = min(block_size, max(positions // 2, 1))
    steps = [whole, max(whole // 3, 1), 1]
    return steps, max(min(_CONTEXT_TOKENS, positions - sum(steps)), 0) if layout.groups else 0


def _make_up(arena: KVArena, num_tokens: int) -> None:
    """Fills the state of the first tokens with random numbers."""
    for number, group in enumerate(arena.layout.groups if num_tokens else ()):
        values = torch.randn(num_tokens * group.head_dim, generator=torch.Generator().manual_seed(number))
        row = values.to(group.dtype).view(torch.uint8).numpy()

        def write(out: Bytes, row: Bytes = row) -> None:
            out[:] = row

        arena.fill(0, num_tokens, number, slice(0, len(group.specs) * group.heads), write)
