"""A radix tree of prompts: the positions where they end and where they part."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from diskprefix.tokens import TokenIds, common_prefix_length

_MAX_TOKENS = 1 << 23


@dataclass(eq=False)
class RadixNode:
    """A position where a prompt ended or prompts part. `digest` is for the caller."""

    position: int
    tokens: TokenIds
    """The tokens after the previous node."""
    before: RadixNode | None
    after: dict[int, RadixNode] = field(default_factory=dict)
    """The next nodes by their first token."""
    digest: bytes = b""


class RadixTree:
    """Recent prompts, with at most `max_tokens` distinct tokens (None: no limit). The least recently used prompt is
    dropped first. Not thread-safe."""

    def __init__(self, max_tokens: int | None = _MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._roots: dict[bytes, RadixNode] = {}
        self._ends: OrderedDict[RadixNode, bytes] = OrderedDict()
        """The leaves with their roots, the least recently used first."""

    def add(self, root: bytes, token_ids: TokenIds) -> tuple[list[RadixNode], RadixNode | None]:
        """Adds a prompt. Returns the nodes on its path, its own end last. If it parts from an earlier prompt at a new
        position, also returns that prompt's next node."""
        here = self._roots.setdefault(root, RadixNode(0, token_ids[:0].copy(), None))
        way: list[RadixNode] = []
        left: RadixNode | None = None
        while here.position < len(token_ids):
            rest = token_ids[here.position :]
            ahead = here.after.get(int(rest[0]))
            if ahead is None:
                here = self._continue(here, rest)
            elif (common := common_prefix_length(ahead.tokens, rest)) < len(ahead.tokens):
                left, here = ahead, _split(ahead, common)
            else:
                here = ahead
            way.append(here)
        if here.before is not None and not here.after:
            self._ends[here] = root
            self._ends.move_to_end(here)
        while self._max_tokens is not None and self._num_tokens > self._max_tokens and len(self._ends) > 1:
            self._forget_the_oldest()
        return way, left

    def shared(self, root: bytes, token_ids: TokenIds) -> int:
        """Returns the length of the longest prefix that a prompt shares with one in the tree."""
        here, position = self._roots.get(root), 0
        while here is not None and position < len(token_ids):
            ahead = here.after.get(int(token_ids[position]))
            if ahead is None:
                break
            common = common_prefix_length(ahead.tokens, token_ids[position:])
            position += common
            here = ahead if common == len(ahead.tokens) else None
        return position

    def _continue(self, here: RadixNode, rest: TokenIds) -> RadixNode:
        end = RadixNode(here.position + len(rest), np.array(rest), here)
        here.after[int(rest[0])] = end
        self._ends.pop(here, None)
        self._num_tokens += len(rest)
        return end

    def _forget_the_oldest(self) -> None:
        oldest, root = self._ends.popitem(last=False)
        before = oldest.before
        assert before is not None, "a root is no end"
        del before.after[int(oldest.tokens[0])]
        self._num_tokens -= len(oldest.tokens)
        if before.after:
            return
        if before.before is None:
            del self._roots[root]
        else:
            self._ends[before] = root
            self._ends.move_to_end(before, last=False)


def _split(place: RadixNode, common: int) -> RadixNode:
    """Splits the tokens of `place` after the first `common` ones. Returns the new node there."""
    before = place.before
    assert before is not None
    middle = RadixNode(before.position + common, place.tokens[:common].copy(), before)
    before.after[int(middle.tokens[0])] = middle
    place.tokens, place.before = place.tokens[common:].copy(), middle
    middle.after[int(place.tokens[0])] = place
    return middle
