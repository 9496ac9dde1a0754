"""Finding the stored nodes of a prompt, and how much of them can be restored. Free of torch: the simulator uses it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, TypeVar

from diskprefix.cache.policy.select import AT_ANY_TOKEN, AT_CHECKPOINTS, StateKind
from diskprefix.cache.tiers.nodes import Node, PartialMatch, PromptNodes
from diskprefix.cache.tiers.tier import NodeIndex
from diskprefix.store.schema import Kind
from diskprefix.tokens import LEAST_TOKENS, common_prefix_length
from diskprefix.values import Refused, StateSource

if TYPE_CHECKING:
    import torch

_Index = TypeVar("_Index", bound=NodeIndex)


@dataclass(frozen=True, kw_only=True)
class RestoreResult:
    """The part of a prompt that was stored when its request came, and the part that was restored.

    The memory now has the state after `num_tokens` tokens, for which `num_bytes` were loaded from `source`. The store
    alone can restore `stored_tokens`; `last_node` is the last node of these. `blocks` are the full blocks that are
    stored, from position 0 on, and may reach further: `refused` says why they were not restored. `matched` is the
    number of tokens that are stored. For `partial_match` see `Matcher`. `prefill_s` is the time that computing
    `num_tokens` tokens took, in seconds; 0 if unknown. `logits` (shape [vocab], the model's dtype) come with an exact
    repeat; `has_tail`: the prompt's tail is stored, which holds them too.
    """

    blocks: Sequence[Node] = ()
    partial_match: PartialMatch | None = None
    last_node: bytes | None = None
    num_tokens: int = 0
    stored_tokens: int = 0
    num_bytes: int = 0
    logits: torch.Tensor | None = None
    has_tail: bool = False
    matched: int = 0
    refused: Refused | None = None
    source: StateSource = "none"
    prefill_s: float = 0.0
    lookup_ms: float = 0.0
    restore_ms: float = 0.0


@dataclass
class Matcher(Generic[_Index]):
    """Finds the stored nodes of one prompt: its first blocks, its tail, and checkpoints.

    `indexes` are asked in order. Without `needs_logits`, the prompt may be restored to its end without the next-token
    logits. `has_logits` is asked when all tokens are stored but the tail is not: it returns whether the logits are kept
    elsewhere. With `computes_last`, the prompt's last token is computed in any case. `is_wanted` is called before
    each look-up; if it returns False, nothing more is found.
    """

    nodes: PromptNodes
    indexes: Sequence[_Index]
    state: StateKind
    needs_logits: bool = True
    has_logits: Callable[[], bool] = lambda: False
    computes_last: bool = False
    is_wanted: Callable[[], bool] = lambda: True
    blocks: list[Node] = field(default_factory=list)
    tail: Node | None = None
    partial_match: PartialMatch | None = None
    """Where prompts restore to the token: the node behind `blocks` that shares most of the prompt's tokens."""
    found_in: dict[bytes, _Index] = field(default_factory=dict)
    """The index of each node that was found, by the node's name."""

    @property
    def deepest(self) -> Node | None:
        return self.tail or (self.blocks[-1] if self.blocks else None)

    @property
    def _is_exact(self) -> bool:
        return self.state in AT_ANY_TOKEN

    def match(self) -> None:
        """Finds the longest chain of stored nodes that the prompt starts with."""
        self.blocks += takewhile(self._is_stored, self.nodes.blocks)
        if len(self.blocks) == self.nodes.num_blocks:
            tail = self.nodes.tail()
            self.tail = tail if self._is_stored(tail) else None
        self.partial_match = self._find_partial_match()
        if self.computes_last:
            self.needs_logits = True
        elif self.needs_logits and self.tail is None and self._reaches_end() and self.has_logits():
            self.needs_logits = False

    def drop(self, node: Node) -> None:
        """Drops a node that is damaged, and what continues it."""
        if node.kind == Kind.CHECKPOINT or (node.kind == Kind.TAIL and node != self.tail):
            return
        self.tail = None
        self.blocks = [block for block in self.blocks if block.end <= node.position]
        self.partial_match = self._find_partial_match()

    def restorable(self) -> tuple[list[Node], int]:
        """Returns the nodes of the longest prefix that can be restored, and its end.

        Of nodes that end at the same token, the last one has the states there. The last node may reach beyond the end:
        then only its first tokens are used. Without the next-token logits, which the tail holds, at least one token is
        left to compute.
        """
        if self.tail is not None and not self.computes_last:
            return [*self.blocks, self.tail], self.tail.end
        end = len(self.nodes.token_ids) - self.needs_logits
        blocks = self.blocks[: end // self.nodes.block_size]
        if self.state == "token" and (partial := self._partial_node(len(blocks), end)) is not None:
            node, end = partial
            return ([*blocks, node], end) if end >= LEAST_TOKENS else ([], 0)
        if self.state in AT_CHECKPOINTS:
            blocks = self._to_a_checkpoint(blocks, end)
        end = blocks[-1].end if blocks else 0
        return (blocks, end) if end >= LEAST_TOKENS or not self._is_exact else ([], 0)

    def _reaches_end(self) -> bool:
        end = self.partial_match.end if self.partial_match else len(self.blocks) * self.nodes.block_size
        return self.state == "token" and end == len(self.nodes.token_ids)

    def _partial_node(self, num_blocks: int, end: int) -> tuple[Node, int] | None:
        """Returns the node that continues the first `num_blocks` blocks and has most of the prompt's tokens before
        `end`, and where these end."""
        start = num_blocks * self.nodes.block_size
        if num_blocks < len(self.blocks):
            return (self.blocks[num_blocks], end) if start < end else None
        if self.partial_match is None or start == end:
            return None
        return self.partial_match.node, min(self.partial_match.end, end)

    def _find_partial_match(self) -> PartialMatch | None:
        if self.state != "token":
            return None
        if self.tail is not None:
            return PartialMatch(self.tail, self.tail.end)
        return self._most_similar()

    def _is_stored(self, node: Node) -> bool:
        if not self.is_wanted():
            return False
        token_ids = self.nodes.token_bytes(node)
        for index in self.indexes:
            if index.has(node, token_ids):
                self.found_in[node.name] = index
                return True
        return False

    def _most_similar(self) -> PartialMatch | None:
        """Returns the node that continues `blocks` and shares most of the tokens behind them. None if no node shares
        the first one."""
        parent, start = self.nodes.parent(len(self.blocks)), len(self.blocks) * self.nodes.block_size
        # No node has more tokens.
        wanted = self.nodes.token_ids[start : start + self.nodes.block_size]
        found: list[PartialMatch] = []
        for index in self.indexes if len(wanted) else ():
            for node, token_ids in index.similar(parent, wanted):
                num_common = common_prefix_length(token_ids, wanted)
                if node.position == start and num_common:
                    found.append(PartialMatch(node, start + num_common))
                    self.found_in.setdefault(node.name, index)
                    # The nodes after it share no more.
                    break
        return max(found, key=attrgetter("end", "node.end"), default=None)

    def _to_a_checkpoint(self, blocks: list[Node], most: int) -> list[Node]:
        """Returns the nodes of the longest prefix of at most `most` tokens that ends at a checkpoint."""
        for num_blocks in range(len(blocks), -1, -1):
            parent, least = self.nodes.parent(num_blocks), 1 + (num_blocks < len(self.blocks))
            # The next block is one of a block's children. The children of a root are not counted.
            if num_blocks and sum(index.num_children(parent) for index in self.indexes) < least:
                continue
            found = self.nodes.checkpoints(num_blocks, most if self._is_exact else num_blocks * self.nodes.block_size)
            if (checkpoint := next(filter(self._is_stored, found), None)) is not None:
                return [*blocks[:num_blocks], checkpoint]
        return []
