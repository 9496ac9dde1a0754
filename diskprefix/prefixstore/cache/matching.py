"""Finding the stored nodes of a prompt, and how much of them can be restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Generic, TypeVar

from msgspec import Struct, field

from diskprefix.prefixstore.cache.other_settings import StoredOtherwise
from diskprefix.prefixstore.cache.policy.select import AT_ANY_TOKEN, AT_CHECKPOINTS, StateKind
from diskprefix.prefixstore.cache.tiers.nodes import Node, PartialMatch, PromptNodes
from diskprefix.prefixstore.cache.tiers.tier import NodeIndex
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.tokens import LEAST_TOKENS, Logits, common_prefix_length
from diskprefix.values import Refused, StateSource

_Index = TypeVar("_Index", bound=NodeIndex)


class RestoreResult(Struct, frozen=True, kw_only=True):
    """The part of a prompt that was stored when its request came, and the part that was restored.

    The sequence has the state of `num_tokens` tokens, for which `num_bytes` were loaded from `source`. The store alone
    can restore `stored_tokens`, the last of them from `last_node`. `blocks` are the stored full blocks from position 0
    on, and `matched` is the number of stored tokens. Both may reach further: `refused` says why these tokens were not
    restored. For `partial_match` see `Matcher`. `prefill_s` is how long computing `num_tokens` tokens took, in seconds;
    0 if unknown. `logits`, shape [vocab], come with an exact repeat. `has_tail`: the prompt's tail, which holds logits
    too, is stored. Another key of the same user would restore `with_other_key` tokens; `otherwise` is what a start with
    other options has stored of the prompt. From position `unverified_from` on, the state came from a file, or from
    state that did; None if none of it did. `is_part`: the stored nodes are all that was computed of a prompt which
    began so.
    """

    blocks: Sequence[Node] = ()
    partial_match: PartialMatch | None = None
    last_node: bytes | None = None
    num_tokens: int = 0
    stored_tokens: int = 0
    num_bytes: int = 0
    logits: Logits | None = None
    has_tail: bool = False
    matched: int = 0
    with_other_key: int = 0
    otherwise: StoredOtherwise = StoredOtherwise()
    is_part: bool = False
    unverified_from: int | None = None
    refused: Refused | None = None
    source: StateSource = "none"
    prefill_s: float = 0.0
    lookup_ms: float = 0.0
    restore_ms: float = 0.0

    @property
    def num_unverified(self) -> int:
        """The number of restored tokens whose state came from a file, or from state that did."""
        return 0 if self.unverified_from is None else max(0, self.num_tokens - self.unverified_from)

    def is_unverified(self, start: int, stop: int) -> bool:
        """Returns whether the state of the tokens from `start` to `stop` includes restored state of a file."""
        return self.num_unverified > 0 and start < self.num_tokens and stop > (self.unverified_from or 0)


class Matcher(Struct, Generic[_Index]):
    """Finds the stored nodes of one prompt: its first blocks, its tail, and checkpoints.

    `indexes` are asked in order. Without `needs_logits`, the prompt may be restored to its end without the next-token
    logits. `has_logits` returns whether the logits are stored elsewhere. It is called if all tokens are stored but the
    tail is not. With `computes_last`, the prompt's last token is computed in any case. `is_wanted` is called before
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
    """For state kind `token`: the node after `blocks` that shares most tokens with the prompt."""
    index_of: dict[bytes, _Index] = field(default_factory=dict)
    """The index that has each found node, by the node's name."""

    @property
    def deepest(self) -> Node | None:
        return self.tail or (self.blocks[-1] if self.blocks else None)

    def match(self) -> None:
        """Finds the longest chain of stored nodes with which the prompt begins."""
        self.blocks += takewhile(self._is_stored, self.nodes.blocks)
        if len(self.blocks) == self.nodes.num_blocks:
            tail = self.nodes.tail()
            self.tail = tail if self._is_stored(tail) else None
        self.partial_match = self._find_partial_match()
        if self.computes_last:
            self.needs_logits = True
        elif self.needs_logits and self.tail is None and self.state == "token":
            stop = self.partial_match.end if self.partial_match else len(self.blocks) * self.nodes.block_size
            self.needs_logits = stop < len(self.nodes.token_ids) or not self.has_logits()

    def drop_node(self, node: Node) -> None:
        """Drops a damaged node, which its index no longer has, and the nodes that continue it."""
        matched = self.partial_match and self.partial_match.node
        if node.kind == NodeKind.CHECKPOINT or (node.kind == NodeKind.TAIL and node not in (self.tail, matched)):
            # It gave states only. The next `restorable` asks the indexes for other states.
            return
        self.tail = None
        self.blocks = [block for block in self.blocks if block.end <= node.position]
        self.partial_match = self._find_partial_match()

    def restorable(self) -> tuple[list[Node], int]:
        """Returns the nodes of the longest prefix that can be restored, and the number of its tokens.

        If several nodes end there, the last one has the states. The last node may reach further: then only its first
        tokens are used. Without the next-token logits, at least one token is left to compute.
        """
        if self.tail is not None and not self.computes_last:
            return [*self.blocks, self.tail], self.tail.end
        stop = len(self.nodes.token_ids) - self.needs_logits
        blocks = self.blocks[: stop // self.nodes.block_size]
        start = len(blocks) * self.nodes.block_size
        if self.state in AT_CHECKPOINTS:
            blocks = self._up_to_checkpoint(blocks, stop)
            stop = blocks[-1].end if blocks else 0
        elif self.state == "token" and start < stop and len(blocks) < len(self.blocks):
            blocks = self.blocks[: len(blocks) + 1]
        elif self.state == "token" and start < stop and self.partial_match is not None:
            blocks, stop = [*blocks, self.partial_match.node], min(self.partial_match.end, stop)
        else:
            stop = start
        return (blocks, stop) if stop >= LEAST_TOKENS or self.state not in AT_ANY_TOKEN else ([], 0)

    def _find_partial_match(self) -> PartialMatch | None:
        """Returns the node that continues `blocks` and shares most of the tokens after them; None if no node shares
        the first token."""
        if self.state != "token":
            return None
        if self.tail is not None:
            return PartialMatch(self.tail, self.tail.end)
        parent, start = self.nodes.parent(len(self.blocks)), len(self.blocks) * self.nodes.block_size
        # No node has more tokens.
        next_ids = self.nodes.token_ids[start : start + self.nodes.block_size]
        matches: list[tuple[PartialMatch, _Index]] = []
        for index in self.indexes if len(next_ids) else ():
            for node, token_ids in index.similar(parent, next_ids):
                num_common = common_prefix_length(token_ids, next_ids)
                if node.position == start and num_common:
                    matches.append((PartialMatch(node, start + num_common), index))
                    # The nodes after it share no more.
                    break
        if not matches:
            return None
        match, index = max(matches, key=lambda candidate: (candidate[0].end, candidate[0].node.end))
        # Another index may have had the node, and dropped it.
        self.index_of[match.node.name] = index
        return match

    def _is_stored(self, node: Node) -> bool:
        if not self.is_wanted():
            return False
        token_ids = self.nodes.token_bytes(node)
        for index in self.indexes:
            if index.has(node, token_ids):
                self.index_of[node.name] = index
                return True
        return False

    def _up_to_checkpoint(self, blocks: list[Node], max_tokens: int) -> list[Node]:
        """Returns the nodes of the longest prefix of at most `max_tokens` tokens that ends at a checkpoint."""
        for num_blocks in range(len(blocks), -1, -1):
            # The next block is a child too. The children of a root are not counted.
            parent, min_children = self.nodes.parent(num_blocks), 1 + (num_blocks < len(self.blocks))
            if num_blocks and sum(index.num_children(parent) for index in self.indexes) < min_children:
                continue
            stop = max_tokens if self.state in AT_ANY_TOKEN else num_blocks * self.nodes.block_size
            checkpoints = self.nodes.checkpoints(num_blocks, stop)
            if (checkpoint := next(filter(self._is_stored, checkpoints), None)) is not None:
                return [*blocks[:num_blocks], checkpoint]
        return []
