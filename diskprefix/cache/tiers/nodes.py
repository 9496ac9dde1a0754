"""The nodes of a prompt: blocks, checkpoints and a tail, with their names in the tree."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from diskprefix.store.pieces import Cut, PayloadLayout
from diskprefix.store.schema import Kind, checkpoint_names, node_name
from diskprefix.tokens import ID_BYTES, TokenIds, block_hashes, floor_to_grid


class Node(NamedTuple):
    """A stretch of the prompt and its name in the tree. `generated`: see `store.schema`."""

    name: bytes
    parent: bytes
    position: int
    num_tokens: int
    kind: Kind
    generated: bool = False

    @property
    def end(self) -> int:
        return self.position + self.num_tokens


class PartialMatch(NamedTuple):
    """A node that shares its first tokens with the prompt, up to the position `end`."""

    node: Node
    end: int


class PromptNodes:
    """Names and measures the nodes of one prompt, in the tree that starts at `root`."""

    def __init__(self, secret: int, root: bytes, token_ids: TokenIds, block_size: int, layout: PayloadLayout) -> None:
        self.root = root
        self.token_ids = token_ids
        self.block_size = block_size
        self.layout = layout
        self._secret = secret
        self._bytes = token_ids.tobytes()

    @property
    def num_blocks(self) -> int:
        """The number of full blocks."""
        return len(self.token_ids) // self.block_size

    def block(self, parent: bytes, index: int, *, generated: bool = False) -> Node:
        """Returns the full block number `index`, which continues `parent`."""
        known = self._blocks[index]
        if not generated and known.parent == parent:
            return known
        return self._node(parent, known.position, known.end, Kind.BLOCK, generated)

    def partial_block(self, parent: bytes, end: int) -> Node:
        """Returns the block that continues `parent` and ends at `end`, before it is full."""
        return self._node(parent, floor_to_grid(end, self.block_size), end, Kind.BLOCK, generated=False)

    def other(self, parent: bytes, index: int, token_ids: bytes, kind: Kind) -> Node:
        """Returns the node behind `index` blocks that continues `parent` with other token ids than the prompt's (int32,
        little-endian)."""
        name = node_name(self._secret, parent, token_ids, kind)
        return Node(name, parent, index * self.block_size, len(token_ids) // ID_BYTES, kind)

    @cached_property
    def block_names(self) -> list[bytes]:
        """The names of all full blocks, as a prefill from position 0 makes them."""
        return block_hashes(self._secret, self.root, self._bytes, self.block_size)

    @cached_property
    def _blocks(self) -> list[Node]:
        """The full blocks with these names."""
        parents = [self.root, *self.block_names]
        size = self.block_size
        return [Node(name, parents[i], i * size, size, Kind.BLOCK) for i, name in enumerate(self.block_names)]

    @property
    def end_id(self) -> str:
        """A text that identifies the end of the prompt, if no block is generated."""
        parent = self.block_names[-1] if self.num_blocks else self.root
        return parent.hex() + self._bytes[ID_BYTES * self.num_blocks * self.block_size :].hex()

    def checkpoint(self, parent: bytes, end: int, *, generated: bool = False) -> Node:
        """Returns the checkpoint at `end`. It holds the tokens behind `parent`, the last whole block before it."""
        return self._node(parent, floor_to_grid(end, self.block_size), end, Kind.CHECKPOINT, generated)

    def checkpoints(self, parent: bytes, num_blocks: int, most: int) -> Iterator[Node]:
        """Yields the nodes that may hold the states behind the first `num_blocks` blocks, of which `parent` is the
        last, and before the next one ends: checkpoints, and the tails of shorter prompts. They end at `most` at the
        latest. The longest come first."""
        start = num_blocks * self.block_size
        token_ids = self._bytes[ID_BYTES * start : ID_BYTES * min(most, start + self.block_size - 1)]
        for num_tokens, names in reversed(list(enumerate(checkpoint_names(self._secret, parent, token_ids)))):
            yield from (Node(name, parent, start, num_tokens, kind) for kind, name in names)

    def tail(self, parent: bytes, index: int, *, generated: bool = False) -> Node:
        """Returns the tail behind `index` full blocks: 0 to `block_size - 1` tokens, and the next-token logits."""
        return self._node(parent, index * self.block_size, len(self.token_ids), Kind.TAIL, generated)

    def tokens(self, node: Node) -> TokenIds:
        return self.token_ids[node.position : node.end]

    def token_bytes(self, node: Node) -> bytes:
        """Returns the node's token ids as the store holds them."""
        return self._bytes[ID_BYTES * node.position : ID_BYTES * node.end]

    def cuts(self, node: Node) -> tuple[Cut, ...]:
        """Returns the pieces that the node's payload is cut into."""
        return self.layout.cuts(node.num_tokens, node.kind)

    def payload_bytes(self, node: Node) -> int:
        return self.layout.payload_bytes(node.num_tokens, node.kind)

    def _node(self, parent: bytes, start: int, end: int, kind: Kind, generated: bool) -> Node:
        token_ids = self._bytes[ID_BYTES * start : ID_BYTES * end]
        name = node_name(self._secret, parent, token_ids, kind, generated=generated)
        return Node(name, parent, start, end - start, kind, generated)
