"""The nodes of a prompt that are still to be stored. Free of torch, because the simulator plans the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from diskprefix.cache.matching import Restored
from diskprefix.cache.policy.select import AT_ANY_TOKEN, AT_CHECKPOINTS, StateKind
from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.nouns import Mark, Selection
from diskprefix.store.schema import Kind
from diskprefix.tokens import TokenIds


@dataclass(frozen=True)
class Plan:
    """The nodes that are still to be stored, parents first, and what the last batch of them brings with it.

    `last_node` holds the boundary, which is at `num_tokens`; None if there is no boundary. `has_entry`: the prompt is
    listed as saved up to there. `prompt` is added to those that were seen, if it is given.
    """

    nodes: tuple[Node, ...] = ()
    last_node: bytes | None = None
    num_tokens: int = 0
    has_entry: bool = True
    prompt: TokenIds | None = None


@dataclass
class Planner:
    """Plans the nodes that one request stores. `nodes` are those of the prompt, and may grow by its reply. Tokens
    behind `prompt_tokens` were decoded. `submitted` are the names of the nodes that the request has stored itself."""

    nodes: PromptNodes
    restored: Restored
    state: StateKind
    prompt_tokens: int
    submitted: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._restorable = self.restored.stored_tokens
        """The last position at which a later request could continue."""

    def plan(self, selection: Selection, states_at: Collection[int]) -> Plan:
        """Returns the nodes that the policy wants and that are not stored yet. `states_at`: the positions of copied
        states."""
        num_blocks = selection.aligned // self.nodes.block_size
        missing = self.missing(num_blocks, states_at)
        if selection.keep_tail:
            end = self.nodes.tail()
        elif self.state == "token" and selection.aligned % self.nodes.block_size:
            end = self.nodes.partial_block(selection.aligned)
        elif self.state in AT_CHECKPOINTS and selection.aligned:
            point = self.nodes.checkpoint(selection.aligned)
            if point.end in states_at:
                return Plan(missing, point.name, point.end)
            # Or what was restored holds the states there, maybe the tail of a shorter prompt.
            is_there = self.restored.stored_tokens == selection.aligned
            return Plan(missing, self.restored.last_node if is_there else None, point.end)
        elif not num_blocks:
            return Plan()
        else:
            return Plan(missing, self.nodes.parent(num_blocks), num_blocks * self.nodes.block_size)
        holder = self._holder(end)
        if holder is None:
            return Plan((*missing, end), end.name, end.end)
        # Where ends are replaced, this one may be gone by then; its entry is stored with it.
        return Plan(missing, holder, end.end, has_entry=self.state != "token")

    def reply_end(self, num_tokens: int, selection: Selection) -> int:
        """Returns how many of the `num_tokens` tokens of the prompt and its reply are kept if a part of the reply is;
        otherwise 0. Replies are kept if the model is exact at every token: decoding then computes the same bits as a
        prefill. Of states there are only those at the end."""
        most = selection.scope.most
        end = num_tokens if most is None else min(most, num_tokens)
        is_kept = self.state in AT_ANY_TOKEN and selection.keeps_reply and end > self.prompt_tokens
        return end if is_kept and (end == num_tokens or self.state == "token") else 0

    def plan_reply(self, nodes: PromptNodes, selection: Selection, states_at: Collection[int]) -> Plan:
        """Returns what `plan` does for the prompt and its reply, which have these `nodes`."""
        end = self.reply_end(len(nodes.token_ids), selection)
        if not end:
            return Plan()
        self.nodes = nodes
        return self.plan(replace(selection, aligned=end, keep_tail=False), states_at)

    def _holder(self, end: Node) -> bytes | None:
        """Returns the stored node that holds a tail or a partial block: all of its tokens, and the logits of a tail
        unless the node has more tokens. None if there is none."""
        stored, part = self.restored.blocks, self.restored.partial_match
        index = end.position // self.nodes.block_size
        if end.name == self.restored.last_node:
            return end.name
        if self.state == "token" and index < len(stored):
            return stored[index].name
        if part is None or index > len(stored) or part.end < end.end:
            return None
        has_more = part.node.end > end.end or part.node.kind in (Kind.TAIL, end.kind)
        return part.node.name if has_more else None

    def missing(self, num_blocks: int, states_at: Collection[int]) -> tuple[Node, ...]:
        """Returns the missing ones of the first `num_blocks` blocks, behind each the checkpoints that continue it."""
        blocks = self.nodes.blocks[len(self.restored.blocks) : num_blocks]
        checkpoints = [self.nodes.checkpoint(at) for at in states_at if at < (num_blocks + 1) * self.nodes.block_size]
        # A block ends where the first checkpoint that continues it may be.
        nodes = sorted([*blocks, *checkpoints], key=attrgetter("end"))
        return tuple(node for node in nodes if node.name not in self.submitted)

    def saved_tokens(self, nodes: Sequence[Node]) -> Iterator[int]:
        """Yields the number of tokens whose prefill each node saves. If states cannot be cut, a checkpoint or a tail
        saves all tokens since the one before; blocks save nothing, but count their own tokens to have a cost."""
        for node in nodes:
            if node.kind == Kind.BLOCK or self.state not in AT_CHECKPOINTS:
                yield node.num_tokens
            else:
                # A preempted reply may have copied its states before the end that was saved.
                yield max(0, node.end - self._restorable)
                self._restorable = max(self._restorable, node.end)


def ttl_at(position: int, marks: Sequence[Mark], ttl_s: float | None) -> float | None:
    """Returns the time to live, after its last use, of a node that ends at `position`, in seconds; None leaves it to
    the daemon. A mark holds for all positions before it, and the longest time wins. Without a mark, `ttl_s` of the
    request holds. Marks that leave the time to the daemon count by `marked_nodes`."""
    asked = [ttl for at, ttl in _asked(marks, ttl_s) if at >= position and ttl is not None]
    return max(asked, default=ttl_s)


def marked_nodes(
    nodes: PromptNodes, marks: Sequence[Mark], ttl_s: float | None
) -> Iterator[tuple[bytes, float | None]]:
    """Yields the name of the last block before each mark, and the time that it asks for. They are to be touched: then a
    mark also holds for blocks that an earlier request stored. No mark shortens the time of another one."""
    names = nodes.block_names
    for position, ttl in _asked(marks, ttl_s):
        if num_blocks := min(position // nodes.block_size, len(names)):
            yield names[num_blocks - 1], ttl


def _asked(marks: Sequence[Mark], ttl_s: float | None) -> Iterator[tuple[int, float | None]]:
    for mark in marks:
        yield mark.position, ttl_s if mark.ttl_s is None else mark.ttl_s
