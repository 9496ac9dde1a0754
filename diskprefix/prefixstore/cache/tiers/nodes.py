"""The nodes of a prompt: blocks, checkpoints and a tail, with their names in the tree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.codec.codec import Piece
from diskprefix.prefixstore.store.pieces import Payload, PayloadLayout
from diskprefix.prefixstore.store.schema import NodeKind, checkpoint_names, node_name
from diskprefix.tokens import ID_BYTES, TokenIds, TokenPath


class Node(NamedTuple):
    """A run of the prompt's tokens, with its name in the tree."""

    name: bytes
    parent: bytes
    position: int
    num_tokens: int
    kind: NodeKind

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


class PartialMatch(NamedTuple):
    """A node that shares its first tokens with the prompt, up to the position `end`."""

    node: Node
    end: int


class PromptNodes:
    """Names and measures the nodes of one prompt."""

    def __init__(self, path: TokenPath, layout: PayloadLayout) -> None:
        self.path, self.layout = path, layout
        self.token_ids, self.block_size, self.num_blocks = path.token_ids, path.block_size, path.num_blocks
        self.parent = path.parent
        """Returns the name of the last of the first `n` blocks, or the root: the parent of the node after them."""
        self._bytes = path.token_ids.tobytes()

    def extended(self, token_ids: TokenIds) -> PromptNodes:
        """Returns the nodes of tokens that begin with these, or that these begin with."""
        return PromptNodes(self.path.extended(token_ids), self.layout)

    def partial_block(self, stop: int) -> Node:
        """Returns the block of the tokens before `stop`, which is not full."""
        return self._last_node(stop, NodeKind.BLOCK)

    def child(self, num_blocks: int, token_ids: bytes, kind: NodeKind) -> Node:
        """Returns the node that continues the first `num_blocks` blocks with these token ids (int32, little-endian),
        which may be others than the prompt's."""
        parent = self.parent(num_blocks)
        name = node_name(self.path.secret, parent, token_ids, kind)
        return Node(name, parent, num_blocks * self.block_size, len(token_ids) // ID_BYTES, kind)

    @cached_property
    def blocks(self) -> list[Node]:
        """The full blocks."""
        size, names = self.block_size, self.path.block_names
        return [Node(name, self.parent(i), i * size, size, NodeKind.BLOCK) for i, name in enumerate(names)]

    @property
    def end_id(self) -> str:
        """A text that identifies the end of the prompt."""
        return self.parent(self.num_blocks).hex() + self._bytes[ID_BYTES * self.num_blocks * self.block_size :].hex()

    def checkpoint(self, stop: int) -> Node:
        """Returns the checkpoint at `stop`. It holds the tokens after the last full block before `stop`."""
        return self._last_node(stop, NodeKind.CHECKPOINT)

    def checkpoints(self, num_blocks: int, stop: int) -> Iterator[Node]:
        """Yields the nodes that may hold states at the end of the first `num_blocks` blocks or within the next one, up
        to `stop`: checkpoints, and the tails of shorter prompts. The longest come first."""
        parent, start = self.parent(num_blocks), num_blocks * self.block_size
        token_ids = self._bytes[ID_BYTES * start : ID_BYTES * min(stop, start + self.block_size - 1)]
        for num_tokens, names in reversed(list(enumerate(checkpoint_names(self.path.secret, parent, token_ids)))):
            yield from (Node(name, parent, start, num_tokens, kind) for kind, name in names)

    def tail(self) -> Node:
        """Returns the tail: the 0 to `block_size - 1` tokens after the full blocks, and the next-token logits."""
        return self._last_node(len(self.token_ids), NodeKind.TAIL)

    def token_bytes(self, node: Node) -> bytes:
        """Returns the node's token ids as the store holds them."""
        return self._bytes[ID_BYTES * node.position : ID_BYTES * node.end]

    def new_node(
        self, node: Node, payload: Payload, *, prefill_s: float, ttl_s: float | None, replaces: bool = False
    ) -> NewNode:
        """Returns a node to be stored. The state of its tokens must be finite."""
        pieces = self.pieces(node)
        return NewNode(
            name=node.name,
            parent=node.parent,
            position=node.position,
            token_ids=self.token_ids[node.position : node.end],
            kind=node.kind,
            payload=payload,
            pieces=pieces,
            num_checked=sum(piece.group < len(self.layout.groups) for piece in pieces),
            prefill_s=prefill_s,
            ttl_s=ttl_s,
            replaces=replaces,
        )

    def pieces(self, node: Node) -> tuple[Piece, ...]:
        """Returns the pieces that the node's payload is cut into."""
        return self.layout.pieces(node.num_tokens, node.kind)

    def _last_node(self, stop: int, kind: NodeKind) -> Node:
        """Returns the node of the tokens after the last full block before `stop`."""
        num_blocks, num_tokens = divmod(stop, self.block_size)
        token_ids = self._bytes[ID_BYTES * (stop - num_tokens) : ID_BYTES * stop]
        return self.child(num_blocks, token_ids, kind)
