"""What is stored of a prompt, and how much of that can be restored. Free of torch: the simulator asks the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diskprefix.policy.select import StateKind
from diskprefix.prefix_cache.nodes import Node, PromptNodes
from diskprefix.store.schema import Kind


@dataclass
class Matcher:
    """Finds what is stored of one prompt: its first blocks, its tail, and the checkpoint after a number of tokens.

    `is_stored` is asked about nodes. `reuse_generated`: what a reply's decoding left behind will do too. Without
    `needs_logits`, the prompt may be restored to its end without them.
    """

    nodes: PromptNodes
    is_stored: Callable[[Node], bool]
    state: StateKind
    reuse_generated: bool = False
    needs_logits: bool = True
    blocks: list[Node] = field(default_factory=list)
    tail: Node | None = None
    checkpoints: dict[int, Node | None] = field(default_factory=dict)

    @property
    def deepest(self) -> Node | None:
        return self.tail or (self.blocks[-1] if self.blocks else None)

    def match(self) -> None:
        """Find the longest chain of stored nodes that the prompt starts with."""
        parent, generated = self.nodes.root, False
        for index in range(self.nodes.num_blocks):
            block = self.nodes.block(parent, index, generated=generated)
            if not self.is_stored(block):
                block = self.nodes.block(parent, index, generated=True)
                if generated or not self.reuse_generated or not self.is_stored(block):
                    return
            self.blocks.append(block)
            parent, generated = block.name, block.generated
        tail = self.nodes.tail(parent, len(self.blocks), generated=generated)
        self.tail = tail if self.is_stored(tail) else None

    def drop(self, node: Node) -> None:
        """Forget a node that is damaged, and what continues it."""
        if node.kind == Kind.CHECKPOINT:
            self.checkpoints[node.position] = None
            return
        self.tail = None
        self.blocks = [block for block in self.blocks if block.end <= node.position]

    def restorable(self) -> list[Node]:
        """The nodes of the longest prefix that can be restored; of those that end at the same token, the last one has
        the states there.

        Without the next-token logits, which the tail holds, at least one token must be left to compute. State that
        cannot be cut is there at checkpoints only, and of a model that computes a prompt in one pass at its end only.
        """
        if self.tail is not None:
            return [*self.blocks, self.tail]
        blocks = self.blocks
        if self.needs_logits and len(blocks) * self.nodes.block_size == len(self.nodes.token_ids):
            blocks = blocks[:-1]
        if self.state == "one_pass":
            return []
        if self.state == "sliceable":
            return blocks
        for num_blocks in range(len(blocks), 0, -1):
            last = blocks[num_blocks - 1]
            if last.end not in self.checkpoints:
                checkpoint = self.nodes.checkpoint(last)
                self.checkpoints[last.end] = checkpoint if self.is_stored(checkpoint) else None
            if (found := self.checkpoints[last.end]) is not None:
                return [*blocks[:num_blocks], found]
        return []
