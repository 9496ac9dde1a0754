"""The baseline of a comparison: what a policy could restore that knows the future."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field

from diskprefix.prefixstore.recording.radix_tree import RadixNode, RadixTree
from diskprefix.prefixstore.simulate.geometry import Geometry
from diskprefix.prefixstore.simulate.simulator import Policy, Totals
from diskprefix.prefixstore.simulate.trace import Trace, TraceRequest
from diskprefix.prefixstore.store.eviction import usable_bytes
from diskprefix.tokens import LEAST_TOKENS, TokenIds
from diskprefix.values import Scope

_OFF = Scope("off")
_NEVER = math.inf


class _Segment(Struct, eq=False):
    """The tokens between two positions where prompts end or part. The first `stored` of its tokens are stored, and the
    first `used` of these were restored since. `uses` are the numbers of the requests that need it, the last one first.
    """

    num_tokens: int
    stored: int = 0
    used: int = 0
    uses: list[int] = field(default_factory=list)

    @property
    def next_use(self) -> float:
        return self.uses[-1] if self.uses else _NEVER


class _Access(NamedTuple):
    """The segments of one request: the first `num_restorable` have its prompt, the others its reply. With `is_saved`,
    they are stored when the request is over."""

    segments: list[_Segment]
    num_restorable: int
    is_saved: bool


def optimum(trace: Trace, policy: Policy, geometry: Geometry, *, until: float = math.inf) -> Totals:
    """Returns the totals of an eviction that knows all requests to come: Belady's MIN over single tokens, in the bytes
    that the budget leaves for nodes and in KV memory. The tokens that are used again last are evicted first, and tokens
    that would be next are not stored. Without a limit, each prompt restores all tokens that it shares with an earlier
    prompt and its reply. No policy restores more, as states and records take no room here.

    A shared prefix counts from the length that a policy with these settings may restore: `LEAST_TOKENS` for models that
    are exact at every token, else one block, and at most `min_tokens`. Requests' own options are ignored, except the
    scope `off` and `save: false`. Keeps every distinct token in memory. Only the first `until` requests are counted.
    """
    totals = Totals()
    max_tokens = math.inf
    if policy.budget_bytes is not None:
        max_tokens = (usable_bytes(policy.budget_bytes) + policy.memory_bytes) // geometry.bytes_per_token
    least = min(policy.block_size, max(policy.min_tokens, 1))
    if geometry.state_kind == "token":
        least = min(least, LEAST_TOKENS)
    cache = _Cache(max_tokens)
    for request, access in zip(trace, _accesses(trace, geometry), strict=True):
        shared = cache.use(access)
        cache.evict()
        totals.peak_bytes = max(totals.peak_bytes, cache.num_tokens * geometry.bytes_per_token)
        if request.is_ahead or totals.requests >= until:
            continue
        restored = shared if shared >= least else 0
        totals.requests += 1
        totals.prompt_tokens += len(request.prompt.token_ids)
        totals.hits += restored > 0
        totals.restored_tokens += restored
        totals.seconds_saved += restored * policy.seconds_per_token
    totals.written_tokens = totals.selected_tokens = cache.written_tokens
    totals.written_bytes = totals.written_tokens * geometry.bytes_per_token
    return totals


class _Cache:
    """Stored tokens, at most `max_tokens`. `written_tokens` are those that were stored and then used, each time."""

    def __init__(self, max_tokens: float) -> None:
        self.num_tokens = self.written_tokens = 0
        self._max_tokens = max_tokens
        self._last_first: list[tuple[float, int, int, _Segment]] = []
        """The stored segments: negated next use, negated depth, a serial number. A segment may be here with a use that
        is over."""
        self._serial = 0

    def use(self, access: _Access) -> int:
        """Returns the number of tokens that a request restores, and stores those of the request."""
        shared, is_whole = 0, True
        for depth, segment in enumerate(access.segments):
            if depth < access.num_restorable:
                segment.uses.pop()
                if is_whole:
                    shared += segment.stored
                    self.written_tokens += segment.stored - segment.used
                    segment.used = segment.stored
                    is_whole = segment.stored == segment.num_tokens
            if access.is_saved:
                self.num_tokens += segment.num_tokens - segment.stored
                segment.stored = segment.num_tokens
            if segment.stored:
                self._serial += 1
                heapq.heappush(self._last_first, (-segment.next_use, -depth, self._serial, segment))
        return shared

    def evict(self) -> None:
        """Evicts the tokens beyond the limit, the ends of segments first."""
        # Bound: each round takes an entry from the heap.
        while self.num_tokens > self._max_tokens:
            negated_use, _, _, segment = self._last_first[0]
            if not segment.stored or -negated_use != segment.next_use:
                heapq.heappop(self._last_first)
                continue
            freed = int(min(segment.stored, self.num_tokens - self._max_tokens))
            segment.stored -= freed
            segment.used = min(segment.used, segment.stored)
            self.num_tokens -= freed
            if not segment.stored:
                heapq.heappop(self._last_first)


def _accesses(trace: Trace, geometry: Geometry) -> list[_Access]:
    """Returns the accesses of all requests, in segments that no request divides."""
    tree = RadixTree(max_tokens=None)
    for request in trace:
        for token_ids in _sequences(request, geometry):
            tree.add(request.tenant.encode(), token_ids)
    segment_of: dict[int, _Segment] = {}

    def segments_of(path: list[RadixNode]) -> list[_Segment]:
        return [segment_of.setdefault(id(node), _Segment(len(node.tokens))) for node in path]

    accesses = []
    for request in trace:
        root, (prompt, *rest) = request.tenant.encode(), _sequences(request, geometry)
        path = segments_of(tree.add(root, prompt)[0])
        whole = segments_of(tree.add(root, rest[0])[0]) if rest else path
        if request.scope == _OFF:
            accesses.append(_Access([], 0, is_saved=False))
            continue
        is_saved = request.is_ahead or (request.save and request.remembered)
        accesses.append(_Access(whole, 0 if request.is_ahead else len(path), is_saved))
    for number in range(len(accesses) - 1, -1, -1):
        segments, num_restorable, _ = accesses[number]
        for segment in segments[:num_restorable]:
            segment.uses.append(number)
    return accesses


def _sequences(request: TraceRequest, geometry: Geometry) -> list[TokenIds]:
    """Returns the prompt, and the prompt with its reply, if the state of a reply is kept: only where decoding gives the
    bits of a prefill."""
    prompt = request.prompt.token_ids
    if not len(request.reply) or geometry.exact_at != "token":
        return [prompt]
    return [prompt, np.concatenate([prompt, request.reply])]
