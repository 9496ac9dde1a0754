"""What is stored of a prompt, and how much of that can be restored. Free of torch: the simulator asks the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from diskprefix.policy.select import StateKind
from diskprefix.prefix_cache.nodes import Node, PromptNodes
from diskprefix.store.schema import Kind


class Match(Protocol):
    """A node of the prompt that is stored."""

    @property
    def node(self) -> Node: ...


M = TypeVar("M", bound=Match)


@dataclass
class Found(Generic[M]):
    """What is stored of a prompt: its first blocks, its tail, and the checkpoint after a number of tokens."""

    blocks: list[M] = field(default_factory=list)
    tail: M | None = None
    checkpoints: dict[int, M | None] = field(default_factory=dict)
    damaged: bool = False

    @property
    def deepest(self) -> Node | None:
        last = self.tail or (self.blocks[-1] if self.blocks else None)
        return None if last is None else last.node

    def drop(self, node: Node) -> None:
        """Forget a node that is damaged, and what continues it."""
        self.damaged = True
        if node.kind == Kind.CHECKPOINT:
            self.checkpoints[node.position] = None
            return
        self.tail = None
        self.blocks = [match for match in self.blocks if match.node.end <= node.position]


@dataclass(frozen=True)
class Matcher(Generic[M]):
    """Finds one prompt's nodes through `find`, which answers a node's match if it is stored.

    `reuse_generated`: what a reply's decoding left behind will do too. Without `needs_logits`, the prompt may be
    restored to its end without them.
    """

    nodes: PromptNodes
    find: Callable[[Node], M | None]
    state: StateKind
    reuse_generated: bool = False
    needs_logits: bool = True

    def match(self, found: Found[M]) -> None:
        """Put the longest chain of stored nodes that the prompt starts with into `found`, which is empty."""
        parent, generated = self.nodes.root, False
        for index in range(self.nodes.num_blocks):
            match = None
            if not generated:
                match = self.find(self.nodes.block(parent, index))
            if match is None and (generated or self.reuse_generated):
                match = self.find(self.nodes.block(parent, index, generated=True))
            if match is None:
                return
            found.blocks.append(match)
            parent, generated = match.node.name, match.node.generated
        found.tail = self.find(self.nodes.tail(parent, len(found.blocks), generated=generated))

    def restorable(self, found: Found[M]) -> list[M]:
        """The nodes of the longest prefix that can be restored; of those that end at the same token, the last one has
        the states there.

        Without the next-token logits, which the tail holds, at least one token must be left to compute. State that
        cannot be cut is there at checkpoints only, and of a model that computes a prompt in one pass at its end only.
        """
        if found.tail is not None:
            return [*found.blocks, found.tail]
        blocks = found.blocks
        if self.needs_logits and len(blocks) * self.nodes.block_size == len(self.nodes.token_ids):
            blocks = blocks[:-1]
        if self.state == "one_pass":
            return []
        if self.state == "sliceable":
            return blocks
        for num_blocks in range(len(blocks), 0, -1):
            last = blocks[num_blocks - 1].node
            if last.end not in found.checkpoints:
                found.checkpoints[last.end] = self.find(self.nodes.checkpoint(last))
            if (match := found.checkpoints[last.end]) is not None:
                return [*blocks[:num_blocks], match]
        return []
