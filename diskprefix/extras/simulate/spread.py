"""The choice of the machine that gets a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from diskprefix.extras.simulate.radix_tree import RadixNode, RadixTree
from diskprefix.extras.simulate.trace import TraceRequest
from diskprefix.tokens import floor_to_grid, root_hash

Spread: TypeAlias = Literal["random", "conversation", "tenant"]
SPREADS: tuple[Spread, ...] = ("random", "conversation", "tenant")
_SEED = 0


def spreader(spread: Spread, machines: int) -> Callable[[TraceRequest], int]:
    """Returns a function that gives the machine of each request, a number from 0. Call it in the order of the trace.

    `random` chooses any machine. `conversation` chooses the machine of the previous turn (see `Conversations`), and for
    a new conversation the next machine in turn. `tenant` chooses by the hash of the tenant.
    """
    if spread == "random":
        random = np.random.default_rng(_SEED)
        return lambda _request: int(random.integers(machines))
    if spread == "tenant":
        return lambda request: int.from_bytes(root_hash(request.tenant)[:8]) % machines
    conversations = Conversations()
    return lambda request: conversations.number_of(request) % machines


class Conversations:
    """Numbers conversations from 0, in order of their first request. Keeps every distinct token in memory.

    A request with a `prompt_cache_key` belongs to the conversation of that key. Another request continues the earlier
    request of its tenant with the longest prompt that its own prompt begins with.
    """

    def __init__(self) -> None:
        self._count = 0
        self._groups: dict[tuple[str, bytes], int] = {}
        self._prompts = RadixTree(max_tokens=None)
        self._numbers: dict[RadixNode, int] = {}
        """The conversations by the ends of their prompts."""

    def number_of(self, request: TraceRequest) -> int:
        """Returns the number of a request's conversation, and remembers the request."""
        token_ids = request.prompt.token_ids
        path, _ = self._prompts.add(request.tenant.encode(), token_ids[: floor_to_grid(len(token_ids), request.grain)])
        if request.group:
            number = self._groups.get((request.tenant, request.group))
        else:
            number = next((self._numbers[node] for node in reversed(path) if node in self._numbers), None)
        if number is None:
            number = self._count
            self._count += 1
        if request.group:
            self._groups[request.tenant, request.group] = number
        if path:
            self._numbers[path[-1]] = number
        return number
