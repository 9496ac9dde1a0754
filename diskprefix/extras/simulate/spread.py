"""The choice of the machine that gets a request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import numpy as np

from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.extras.simulate.geometry import SLICEABLE
from diskprefix.extras.simulate.trace import TraceRequest
from diskprefix.tokens import ID_BYTES, floor_to_grid, root_hash

Spread: TypeAlias = Literal["random", "conversation", "tenant"]
SPREADS: tuple[Spread, ...] = ("random", "conversation", "tenant")
_SEED = 0


def spreader(spread: Spread, machines: int, block_size: int) -> Callable[[TraceRequest], int]:
    """Returns a function that gives the machine of each request, a number from 0. Call it in the order of the trace.

    `random` chooses any machine. `conversation` chooses the machine of the previous turn (see `Conversations`), and for
    a new conversation the next machine in turn. `tenant` chooses by the hash of the tenant.
    """
    if spread == "random":
        random = np.random.default_rng(_SEED)
        return lambda _request: int(random.integers(machines))
    if spread == "tenant":
        return lambda request: int.from_bytes(root_hash(request.tenant)[:8]) % machines
    conversations = Conversations(block_size)
    return lambda request: conversations.number_of(request) % machines


class Conversations:
    """Numbers conversations from 0, in order of their first request.

    A request with a `prompt_cache_key` belongs to the conversation of that key. Another request continues the earlier
    request of its tenant with the longest prompt that its own prompt begins with.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._count = 0
        self._groups: dict[tuple[str, bytes], int] = {}
        self._ends: dict[bytes, dict[int, dict[bytes, int]]] = {}
        """The conversations of earlier prompts by their ends: the name of the last full block, the number of bytes of
        token ids after it, and these bytes."""

    def number_of(self, request: TraceRequest) -> int:
        """Returns the number of a request's conversation, and remembers the request."""
        token_ids, size = request.prompt.token_ids, self._block_size
        nodes = PromptNodes(0, root_hash(request.tenant), token_ids, size, SLICEABLE.layout)
        names, of_tokens = [nodes.root, *nodes.block_names], token_ids.tobytes()
        number = self._groups.get((request.tenant, request.group)) if request.group else self._earlier(names, of_tokens)
        if number is None:
            number = self._count
            self._count += 1
        if request.group:
            self._groups[request.tenant, request.group] = number
        if end := floor_to_grid(len(token_ids), request.grain):
            rest = of_tokens[ID_BYTES * floor_to_grid(end, size) : ID_BYTES * end]
            self._ends.setdefault(names[end // size], {}).setdefault(len(rest), {})[rest] = number
        return number

    def _earlier(self, names: Sequence[bytes], of_tokens: bytes) -> int | None:
        """Returns the conversation of the longest earlier prompt that these tokens begin with. `names` has the root,
        then the blocks."""
        for index in range(len(names) - 1, -1, -1):
            of_length = self._ends.get(names[index], {})
            start = ID_BYTES * index * self._block_size
            for length in sorted(of_length, reverse=True):
                number = of_length[length].get(of_tokens[start : start + length])
                if number is not None:
                    return number
        return None
