"""A radix tree of prompts: the positions where they end and where they part."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from msgspec import Struct, field

from diskprefix.tokens import TokenIds, common_prefix_length

_MAX_TOKENS = 1 << 23


class RadixNode(Struct, eq=False):
    """A position where a prompt ended or prompts part. `tokens` are the tokens since its `parent`, `children` the next
    nodes by their first token. `digest` is for the caller."""

    position: int
    tokens: TokenIds
    parent: RadixNode | None
    children: dict[int, RadixNode] = field(default_factory=dict)
    digest: bytes = b""


class RadixTree:
    """Recent prompts, with at most `max_tokens` distinct tokens (None: no limit). The least recently used prompt is
    evicted first. Not thread-safe."""

    def __init__(self, max_tokens: int | None = _MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._roots: dict[bytes, RadixNode] = {}
        self._leaves: OrderedDict[RadixNode, bytes] = OrderedDict()
        """The leaves with their roots, the least recently used first."""

    def add(self, root: bytes, token_ids: TokenIds) -> tuple[list[RadixNode], RadixNode | None]:
        """Adds a prompt. Returns the nodes on its path, its own leaf last, and the next node of the earlier prompt from
        which it parts at a new position, or None."""
        node = self._roots.setdefault(root, RadixNode(0, token_ids[:0].copy(), None))
        path: list[RadixNode] = []
        parted: RadixNode | None = None
        while node.position < len(token_ids):
            rest = token_ids[node.position :]
            child = node.children.get(int(rest[0]))
            if child is None:
                node = self._append(node, rest)
            elif (common := common_prefix_length(child.tokens, rest)) < len(child.tokens):
                parted, node = child, _split(child, common)
            else:
                node = child
            path.append(node)
        if node.parent is not None and not node.children:
            self._leaves[node] = root
            self._leaves.move_to_end(node)
        while self._max_tokens is not None and self._num_tokens > self._max_tokens and len(self._leaves) > 1:
            self._evict()
        return path, parted

    def shared(self, root: bytes, token_ids: TokenIds) -> int:
        """Returns the length of the longest prefix that a prompt shares with one in the tree."""
        node, position = self._roots.get(root), 0
        while node is not None and position < len(token_ids):
            node = node.children.get(int(token_ids[position]))
            if node is not None:
                position += common_prefix_length(node.tokens, token_ids[position:])
                node = node if position == node.position else None
        return position

    def _append(self, parent: RadixNode, rest: TokenIds) -> RadixNode:
        leaf = RadixNode(parent.position + len(rest), np.array(rest), parent)
        parent.children[int(rest[0])] = leaf
        self._leaves.pop(parent, None)
        self._num_tokens += len(rest)
        return leaf

    def _evict(self) -> None:
        oldest, root = self._leaves.popitem(last=False)
        parent = oldest.parent
        assert parent is not None, "a root is no leaf"
        del parent.children[int(oldest.tokens[0])]
        self._num_tokens -= len(oldest.tokens)
        if parent.parent is None and not parent.children:
            del self._roots[root]
        elif not parent.children:
            self._leaves[parent] = root
            self._leaves.move_to_end(parent, last=False)


def _split(node: RadixNode, num_tokens: int) -> RadixNode:
    """Splits the tokens of `node` after the first `num_tokens`. Returns the new node there."""
    assert node.parent is not None
    middle = RadixNode(node.parent.position + num_tokens, node.tokens[:num_tokens].copy(), node.parent)
    node.parent.children[int(middle.tokens[0])] = middle
    node.tokens, node.parent = node.tokens[num_tokens:].copy(), middle
    middle.children[int(node.tokens[0])] = node
    return middle
