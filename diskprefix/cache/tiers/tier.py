"""What a place for blocks offers to those who read it, and what memory they are read into."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol, TypeAlias

from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.errors import StoreCorrupt
from diskprefix.store.codec.planes import Bytes
from diskprefix.store.pieces import Cut
from diskprefix.tokens import TokenIds

TierName: TypeAlias = Literal["memory", "disk", "remote"]
Write: TypeAlias = Callable[[Bytes], None]
"""Writes one piece to where it is given: uint8 of shape [rows, row_bytes], each row contiguous. Raises `StoreCorrupt`
if the piece is missing or damaged; what it was given may hold anything then. For any thread."""


class BlockSink(Protocol):
    """Memory that the state of a sequence is read into: a `kv.arena.KVArena`, or a view of an engine's pages."""

    def fill(self, position: int, num_tokens: int, group: int, rows: slice, write: Write) -> None:
        """Has `write` fill rows of a group; of per-token tensors for tokens `position` … `position + num_tokens`.

        Groups are counted as in `store.pieces.Cut`. A row is one head of one tensor, or a part of a state. Different
        rows may be filled from different threads at once.
        """


class NodeIndex(Protocol):
    """Tells which nodes are stored."""

    def has(self, node: Node, token_ids: bytes) -> bool:
        """Returns whether this node is stored. A name is no proof: parent, position, kind and token ids (int32,
        little-endian) are compared too."""

    def similar(self, parent: bytes, token_ids: TokenIds) -> Iterator[tuple[Node, TokenIds]]:
        """Yields nodes that continue `parent` (the name of a node, or the root), and their tokens. Nodes that share
        more of `token_ids` come first."""


class View(NodeIndex, Protocol):
    """The content of a tier at one moment. For one thread at a time, except for what `pieces` yields."""

    @property
    def tier(self) -> TierName: ...

    @property
    def damaged(self) -> Collection[bytes]:
        """The names of the nodes that were found damaged. They are not found any more."""

    def prefill_s(self, node: Node) -> float:
        """Returns how long computing the node's tokens took, in seconds; 0 if that is not known."""

    def pieces(self, node: Node, cuts: Sequence[Cut], needed: Sequence[int]) -> Iterator[Write]:
        """Yields what writes the pieces with the numbers `needed`. `cuts` are all pieces of the node."""

    def drop(self, node: Node, error: StoreCorrupt) -> None:
        """Have a damaged node removed from the tier, and from this view."""


class Tier(Protocol):
    """A place for blocks that can be read at once.

    There is no `put`: all that is computed goes one way, as publications, to the writer's buffer, which is the nearest
    tier, and from there to the others.
    """

    def view(self) -> AbstractContextManager[View]:
        """What the tier has now. Raises `CacheError`. Of several tiers, the nearest is viewed first: what moves on
        meanwhile is then seen twice, never not at all."""


def nearest(nodes: PromptNodes, views: Sequence[View], node: Node) -> View | None:
    """Returns the first of the views that has a node of a prompt."""
    return next((view for view in views if view.has(node, nodes.token_bytes(node))), None)


def first_blocks(nodes: PromptNodes, views: Sequence[View], most: int) -> tuple[int, bytes]:
    """Returns how many of a prompt's first `most` blocks the views have without a gap, and the name of the last one
    (that of the root if there is none)."""
    name = nodes.root
    for number in range(most):
        block = nodes.block(name, number)
        if nearest(nodes, views, block) is None:
            return number, name
        name = block.name
    return most, name
