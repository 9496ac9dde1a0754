"""Traces that a simulation replays: requests in the order in which they came, with the tokens of their prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diskprefix.extras.simulate.geometry import Geometry
from diskprefix.nouns import Prompt, Scope
from diskprefix.tokens import TokenIds, as_token_ids


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """One request.

    `when`: seconds since the trace began. `reply`: the tokens that the model was given behind the prompt, empty if they
    are not known. `scope`: what the request itself asked for; None for the scope that is
    simulated. `group`, `save` and `ttl_s` are those of `CacheOptions`. Requests of different tenants share nothing.
    `is_shared`: the tenant has neither key nor salt, as the one without a name always is. `remembered`: whether the
    prompt counts as a recent one for later requests; false for one that failed or was cancelled. `grain`: prompts share
    whole multiples of so many tokens only, as those of a trace of block ids do.
    """

    when: float
    prompt: Prompt
    output_tokens: int = 0
    reply: TokenIds = field(default_factory=lambda: as_token_ids([]))
    scope: Scope | None = None
    group: bytes = b""
    tenant: str = ""
    is_shared: bool = False
    save: bool = True
    ttl_s: float | None = None
    remembered: bool = True
    grain: int = 1


@dataclass(frozen=True, kw_only=True)
class RecordedDaemon:
    """A daemon as its recording describes it: its settings, what its model's state weighs (None: not known)
    and how fast prefill was (0: not known)."""

    block_size: int
    min_tokens: int
    geometry: Geometry | None = None
    tokens_per_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Trace:
    """A named sequence of requests that can be iterated any number of times, each time the same.

    `replay` begins anew at each call. It may make the tokens of a prompt only then, so that a trace may be larger
    than memory: keep no request longer than needed. `daemon`: whose recording it is.
    """

    name: str
    num_requests: int
    replay: Callable[[], Iterator[TraceRequest]]
    daemon: RecordedDaemon | None = None

    @classmethod
    def of(cls, name: str, requests: Sequence[TraceRequest]) -> Trace:
        """A trace that lies in memory."""
        return cls(name, len(requests), lambda: iter(requests))

    def __len__(self) -> int:
        return self.num_requests

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.replay()

    def last(self, seconds: float) -> Trace:
        """Returns the requests of its last seconds."""
        times = [request.when for request in self]
        start = max(times, default=0.0) - seconds
        num_requests = sum(when >= start for when in times)
        return Trace(self.name, num_requests, lambda: (one for one in self if one.when >= start), self.daemon)

    def head(self, num_requests: int) -> Trace:
        """The first `num_requests` of it, or all of them."""
        fewer = min(num_requests, self.num_requests)
        return Trace(self.name, fewer, lambda: islice(self.replay(), fewer), self.daemon)


class BlockRequest(NamedTuple):
    """A request of a published trace: its prompt is `num_tokens` of the tokens that its blocks stand for.

    `block_ids` has shape (num_blocks,), dtype int64; `when` is in seconds. `system_end`: where the system message and
    the tools end, in tokens, if the trace tells; 0 otherwise.
    """

    when: float
    block_ids: npt.NDArray[np.int64]
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
            yield TraceRequest(
                when=request.when, prompt=prompt, output_tokens=request.output_tokens, grain=block_tokens
            )

    return Trace(name, len(ordered), replay)


def block_tokens_of(block_ids: npt.NDArray[np.int64], block_tokens: int, num_tokens: int) -> TokenIds:
    """Block i stands for the tokens i * block_tokens and those that follow it; the last block may be cut short.

    Ids are taken modulo 2**32, so with blocks of 512 tokens no two of the first 8 million blocks are alike.
    """
    starts = block_ids * block_tokens
    tokens = (starts[:, None] + np.arange(block_tokens)).ravel()[:num_tokens]
    return np.ascontiguousarray(tokens.astype(np.uint32).view(np.int32))
