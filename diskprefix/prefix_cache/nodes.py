"""The nodes that a prompt is made of: its blocks and its tail, with the names that they have in the tree."""

from __future__ import annotations

from typing import NamedTuple

from diskprefix.store.pieces import Cut, PayloadLayout
from diskprefix.store.schema import Kind
from diskprefix.tokens import TokenIds, block_hash

_ID_BYTES = 4


class Node(NamedTuple):
    """A place in the prompt and the name that it has in the tree."""

    name: bytes
    parent: bytes
    position: int
    num_tokens: int
    kind: Kind

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


class PromptNodes:
    """Names and measures the nodes of one prompt, in the tree that starts at `root`."""

    def __init__(self, secret: int, root: bytes, token_ids: TokenIds, block_size: int, layout: PayloadLayout) -> None:
        self.root = root
        self.token_ids = token_ids
        self.block_size = block_size
        self.layout = layout
        self._secret = secret
        self._bytes = token_ids.tobytes()

    def block(self, parent: bytes, index: int) -> Node:
        """The full block number `index`, which continues `parent`."""
        return self._node(parent, index * self.block_size, (index + 1) * self.block_size, Kind.BLOCK)

    def tail(self, parent: bytes, index: int) -> Node:
        """The end of the prompt after `index` full blocks: 0 to `block_size - 1` tokens, and the next-token logits."""
        return self._node(parent, index * self.block_size, len(self.token_ids), Kind.TAIL)

    def tokens(self, node: Node) -> TokenIds:
        return self.token_ids[node.position : node.end]

    def token_bytes(self, node: Node) -> bytes:
        """The node's token ids as the store holds them."""
        return self._bytes[_ID_BYTES * node.position : _ID_BYTES * node.end]

    def cuts(self, node: Node) -> tuple[Cut, ...]:
        """Where the node's payload is cut into pieces, and what they hold."""
        return self.layout.cuts(node.num_tokens, with_logits=node.kind == Kind.TAIL)

    def payload_bytes(self, node: Node) -> int:
        return self.layout.payload_bytes(node.num_tokens, with_logits=node.kind == Kind.TAIL)

    def _node(self, parent: bytes, start: int, end: int, kind: Kind) -> Node:
        name = block_hash(self._secret, parent, self._bytes[_ID_BYTES * start : _ID_BYTES * end])
        return Node(name, parent, start, end - start, kind)
