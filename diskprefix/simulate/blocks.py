"""Prompts that are known by the ids of their blocks only, as published traces have them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diskprefix.prompt import Prompt
from diskprefix.simulate.trace import Trace, TraceRequest
from diskprefix.tokens import TokenIds

BlockIds = npt.NDArray[np.int64]
"""Shape (num_blocks,)."""


@dataclass(frozen=True, eq=False)
class BlockRequest:
    """A request whose prompt is `num_tokens` of the tokens that its blocks stand for. `when` in seconds.

    `system_end`: where the system message and the tools end, in tokens, if the trace tells; 0 otherwise.
    """

    when: float
    block_ids: BlockIds
    num_tokens: int
    output_tokens: int = 0
    system_end: int = 0


def block_trace(name: str, requests: Sequence[BlockRequest], block_tokens: int) -> Trace:
    """The requests in order of time. Block ids, whatever numbers they are, are numbered anew from 0."""
    ordered = sorted(requests, key=lambda request: request.when)
    numbers: dict[int, int] = {}
    numbered = [
        np.fromiter((numbers.setdefault(i, len(numbers)) for i in request.block_ids.tolist()), np.int64)
        for request in ordered
    ]

    def replay() -> Iterator[TraceRequest]:
        for request, ids in zip(ordered, numbered, strict=True):
            token_ids = block_tokens_of(ids, block_tokens, request.num_tokens)
            prompt = Prompt(token_ids=token_ids, system_end=request.system_end)
            yield TraceRequest(when=request.when, prompt=prompt, output_tokens=request.output_tokens)

    return Trace(name, len(ordered), replay)


def block_tokens_of(block_ids: BlockIds, block_tokens: int, num_tokens: int) -> TokenIds:
    """Block i stands for the tokens i * block_tokens and those that follow it; the last block may be cut short.

    Ids are taken modulo 2**32, so with blocks of 512 tokens no two of the first 8 million blocks are alike.
    """
    starts = block_ids * block_tokens
    tokens = (starts[:, None] + np.arange(block_tokens)).ravel()[:num_tokens]
    return np.ascontiguousarray(tokens.astype(np.uint32).view(np.int32))
