"""What of a prompt is still to be stored. Free of torch: the simulator plans the same."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace

from diskprefix.cache.policy.select import StateKind
from diskprefix.cache.tiers.nodes import Node, PromptNodes, Rest
from diskprefix.nouns import Mark, Selection
from diskprefix.store.schema import Kind

_SLICEABLE: tuple[StateKind, ...] = ("token", "sliceable")
"""Kinds of state that need no checkpoints."""


@dataclass(frozen=True)
class Plan:
    """What is still to be stored, parents first; the node that holds the boundary, None without one; and the boundary
    in tokens. `has_entry`: the prompt is to be listed as saved up to there."""

    nodes: tuple[Node, ...] = ()
    tip: bytes | None = None
    num_tokens: int = 0
    has_entry: bool = True


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a prompt was stored when its request came.

    `blocks` are its full blocks that are stored, from position 0 on; for `rest` see `Matcher`. `num_tokens` tokens were
    restored, `tip` is the last node of those, and `exact` whether they are, bit for bit, what a prefill from position 0
    computes.
    """

    blocks: Sequence[Node] = ()
    rest: Rest | None = None
    tip: bytes | None = None
    num_tokens: int = 0
    exact: bool = True


@dataclass
class Planner:
    """Plans what one request stores of its prompt, whose `nodes` may grow by its reply.

    `prompt_tokens`: where the prompt ends. What stands behind it was decoded. `submitted` are the names of the nodes
    that the request has stored itself.
    """

    nodes: PromptNodes
    progress: Progress
    state: StateKind
    prompt_tokens: int
    submitted: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._restorable = self.progress.num_tokens
        """The last position that a later request could go on from."""

    def plan(self, selection: Selection, states_at: Container[int]) -> Plan:
        """What of the prompt the policy wants and is not stored yet. `states_at`: where states were taken."""
        missing, block = self.missing(selection.aligned // self.nodes.block_size, states_at)
        parent = block.name if block else self.nodes.root
        if selection.keep_tail:
            end = self.nodes.tail(parent, self.nodes.num_blocks, generated=not self.progress.exact)
        elif self.state == "token" and selection.aligned % self.nodes.block_size:
            end = self.nodes.partial_block(parent, selection.aligned)
        elif block is not None:
            return Plan(missing, self._boundary_tip(block, states_at), block.end)
        else:
            return Plan()
        holder = self._holder(end)
        if holder is None:
            return Plan((*missing, end), end.name, end.end)
        # Where ends are replaced, this one may be gone by then; its entry is stored with it.
        return Plan(missing, holder, end.end, has_entry=self.state != "token")

    def plan_reply(self, nodes: PromptNodes, selection: Selection) -> Plan:
        """What of the prompt and its reply, whose `nodes` these are, the policy wants and is not stored yet. Where
        prompts restore to the token, decoding computes what a prefill computes."""
        num_tokens = len(nodes.token_ids)
        end = min(selection.scope.value, num_tokens) if selection.reason == "tokens" else num_tokens
        if self.state != "token" or not selection.keeps_reply or end <= self.prompt_tokens:
            return Plan()
        self.nodes = nodes
        return self.plan(replace(selection, aligned=end, keep_tail=False), ())

    def _holder(self, end: Node) -> bytes | None:
        """The stored node that has the tokens of a tail or a partial block, and the logits of a tail unless it has more
        tokens. None if there is none."""
        stored, rest = self.progress.blocks, self.progress.rest
        index = end.position // self.nodes.block_size
        if end.name == self.progress.tip:
            return end.name
        if self.state == "token" and index < len(stored):
            return stored[index].name
        if rest is None or index > len(stored) or rest.end < end.end:
            return None
        has_more = rest.node.end > end.end or rest.node.kind == Kind.TAIL or rest.node.kind == end.kind
        return rest.node.name if has_more else None

    def missing(self, num_blocks: int, states_at: Container[int]) -> tuple[tuple[Node, ...], Node | None]:
        """Of the first `num_blocks` blocks, those that are still to be stored, each with the checkpoint at its end if
        there is one; and the last block of all, None without any."""
        missing: list[Node] = []
        block: Node | None = None
        for index in range(num_blocks):
            block, is_stored = self._block(index, block)
            if not is_stored:
                missing.append(block)
            if block.end in states_at and (checkpoint := self.nodes.checkpoint(block)).name not in self.submitted:
                missing.append(checkpoint)
        return tuple(missing), block

    def saved_tokens(self, nodes: Sequence[Node]) -> Iterator[int]:
        """For each of the nodes to be stored, the tokens whose prefill it saves.

        Where states cannot be cut, a checkpoint or a tail saves all that lies between it and the one before, and blocks
        alone save nothing; they count their own tokens, so that they have a cost too.
        """
        for node in nodes:
            if node.kind == Kind.BLOCK or self.state in _SLICEABLE:
                yield node.num_tokens
            else:
                yield node.end - self._restorable
                self._restorable = node.end

    def _block(self, index: int, before: Node | None) -> tuple[Node, bool]:
        """Block number `index` after the block `before`, and whether it is stored already, or will be."""
        stored = self.progress.blocks
        is_of_reply = (index + 1) * self.nodes.block_size > self.prompt_tokens
        generated = self.state != "token" and (is_of_reply or not self.progress.exact)
        # What was decoded and reaches further than was restored is not what this run computed.
        if index < len(stored) and stored[index].generated <= generated:
            return stored[index], True
        parent = before.name if before else self.nodes.root
        block = self.nodes.block(parent, index, generated=generated)
        return block, block.name in self.submitted

    def _boundary_tip(self, block: Node, states_at: Container[int]) -> bytes | None:
        """The node that a saved boundary ends with; None where the states at it were not computed by this run."""
        if self.state in _SLICEABLE:
            return block.name
        checkpoint = self.nodes.checkpoint(block).name
        return checkpoint if block.end in states_at or checkpoint == self.progress.tip else None


def ttl_at(position: int, marks: Sequence[Mark], ttl_s: float | None) -> float | None:
    """For how long what ends at a position is to be kept after its last use, in seconds; None is the daemon's own.

    A mark holds for all that stands before it, and the longest of them wins; what reaches no mark has `ttl_s`, what the
    request asks for. Marks that leave it to the daemon count by `marked_nodes`.
    """
    asked = [ttl for at, ttl in _asked(marks, ttl_s) if at >= position and ttl is not None]
    return max(asked, default=ttl_s)


def marked_nodes(
    nodes: PromptNodes, marks: Sequence[Mark], ttl_s: float | None
) -> Iterator[tuple[bytes, float | None]]:
    """For each mark the name of the last block before it, and the time that it asks for. To be touched if it is stored:
    so a mark counts where an earlier request stored what stands before it, and none shortens what another asks for."""
    names = nodes.block_names
    for position, ttl in _asked(marks, ttl_s):
        if num_blocks := min(position // nodes.block_size, len(names)):
            yield names[num_blocks - 1], ttl


def _asked(marks: Sequence[Mark], ttl_s: float | None) -> Iterator[tuple[int, float | None]]:
    for mark in marks:
        yield mark.position, ttl_s if mark.ttl_s is None else mark.ttl_s
