"""Saving of one request's state: which nodes are stored, when, and what a failure does.

A `SavePlanner` lists the nodes that the policy selected and the store lacks. `CachedRequest` decides when. A `Saver`
captures them from KV memory and gives them to the writer, parents first: blocks and checkpoints after each step of the
prompt, the end of the prompt and its entry once it is computed, then the reply, or the state of a request that is
cancelled. Together they are one `Save`, which fails as a whole: then nothing is added any more but that the prompt was
seen.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.prefixstore.cache.matching import RestoreResult
from diskprefix.prefixstore.cache.policy.select import AT_ANY_TOKEN, AT_CHECKPOINTS, StateKind
from diskprefix.prefixstore.cache.tiers.nodes import Node, PromptNodes
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.pieces import Hold
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.prefixstore.store.store import Publication
from diskprefix.tokens import Logits, TokenPath
from diskprefix.values import Selection

if TYPE_CHECKING:
    from diskprefix.prefixstore.cache.context import RequestContext
    from diskprefix.prefixstore.kv.sequence import KVSequence

_BATCH_BYTES = 16 << 20
_INTERIM_S, _INTERIM_TOKENS = 4.0, 1024
"""Where state cannot be cut, these seconds and tokens of computing a prompt are followed by a checkpoint on the disk. A
kill loses what was computed since the last one and while this one is written."""


class SavePlan(Struct, frozen=True):
    """Nodes to be stored, parents first, and the records that come with the last of them.

    `last_node` holds the boundary, which is at `num_tokens`; None if there is no boundary. `has_entry`: the prompt is
    listed as saved up to there. `prompt` is added to the prompts that were seen, unless it is None.
    """

    nodes: tuple[Node, ...] = ()
    last_node: bytes | None = None
    num_tokens: int = 0
    has_entry: bool = True
    prompt: TokenPath | None = None


@dataclass
class SavePlanner:
    """Plans the nodes that one request stores. `nodes` are the nodes of the prompt, later also of the reply. Tokens
    after `prompt_tokens` were decoded. Fewer than `min_tokens` tokens of prompt and reply are not saved. `submitted`
    has the names of the nodes that the request has stored itself."""

    nodes: PromptNodes
    restored: RestoreResult
    state: StateKind
    prompt_tokens: int
    min_tokens: int = 0
    submitted: set[bytes] = field(default_factory=set)
    interim: Node | None = None
    """The last interim checkpoint."""

    def __post_init__(self) -> None:
        self.restorable = self.restored.stored_tokens
        """The last position, but for interim checkpoints, at which a later request could continue."""

    def leaves_end(self, selection: Selection) -> bool:
        """Returns whether the partial block at the end of the prompt is written with the reply, which fills it."""
        return self.state == "token" and selection.saves_reply and not selection.keep_tail

    def plan(self, selection: Selection, states_at: Collection[int], *, with_end: bool = True) -> SavePlan:
        """Returns the selected nodes that are not stored yet. `states_at`: the positions whose states are stored
        too. Without `with_end`, the end and the entry come later (see `leaves_end`)."""
        aligned, num_blocks = selection.aligned, selection.aligned // self.nodes.block_size
        missing = self.missing(aligned, states_at)
        if selection.keep_tail:
            last = self.nodes.tail()
        elif self.state == "token" and aligned % self.nodes.block_size and with_end:
            last = self.nodes.partial_block(aligned)
        elif self.state in AT_CHECKPOINTS:
            if aligned in states_at:
                return SavePlan(missing, self.nodes.checkpoint(aligned).name, aligned)
            # The restored node may hold the states there: a checkpoint, or the tail of a shorter prompt.
            is_stored = self.restored.stored_tokens == aligned
            return SavePlan(missing, self.restored.last_node if is_stored else None, aligned)
        else:
            end = self.nodes.parent(num_blocks) if num_blocks else None
            return SavePlan(missing, end, num_blocks * self.nodes.block_size, has_entry=with_end)
        if (holder := self._holder(last)) is None:
            return SavePlan((*missing, last), last.name, last.end)
        # With state kind `token`, a longer node may replace the holder before this is written: it gets no entry.
        return SavePlan(missing, holder, last.end, has_entry=self.state != "token")

    def reply_stop(self, num_tokens: int, selection: Selection) -> int:
        """Returns up to which of the `num_tokens` tokens of prompt and reply state is saved; 0 if the reply is not. A
        reply is saved if the model is exact at every token: decoding then computes the same bits as a prefill. States
        exist at its end only."""
        limit = selection.scope.most
        stop = num_tokens if limit is None else min(limit, num_tokens)
        is_saved = self.state in AT_ANY_TOKEN and selection.saves_reply and stop > self.prompt_tokens
        is_saved &= stop >= self.min_tokens
        return stop if is_saved and (stop == num_tokens or self.state == "token") else 0

    def plan_reply(self, nodes: PromptNodes, stop: int, selection: Selection, states_at: Collection[int]) -> SavePlan:
        """Returns the plan for the first `stop` tokens of a prompt and its reply, which have these `nodes`."""
        self.nodes = nodes
        return self.plan(replace(selection, aligned=stop, keep_tail=False), states_at)

    def missing(self, num_tokens: int, states_at: Collection[int]) -> tuple[Node, ...]:
        """Returns the missing blocks of the first `num_tokens` tokens, and after each block the checkpoints that
        continue it."""
        num_blocks = num_tokens // self.nodes.block_size
        blocks = self.nodes.blocks[len(self.restored.blocks) : num_blocks]
        checkpoints = [self.nodes.checkpoint(at) for at in states_at if at < (num_blocks + 1) * self.nodes.block_size]
        # A block ends where the first checkpoint that continues it may be.
        nodes = sorted([*blocks, *checkpoints], key=attrgetter("end"))
        return tuple(node for node in nodes if node.name not in self.submitted)

    def saved_tokens(self, nodes: Sequence[Node]) -> Iterator[int]:
        """Yields the number of tokens whose prefill each node saves. If states cannot be cut, a checkpoint or a tail
        saves all tokens since the one before; blocks save nothing, but count their own tokens to have a cost."""
        for node in nodes:
            if node.kind == NodeKind.BLOCK or self.state not in AT_CHECKPOINTS:
                yield node.num_tokens
            else:
                # A preempted reply may have copied its states before the end that was saved.
                yield max(0, node.end - self.restorable)
                if node != self.interim:
                    self.restorable = max(self.restorable, node.end)

    def _holder(self, last: Node) -> bytes | None:
        """Returns the name of the stored node that holds a tail or a partial block: all of its tokens, and the logits
        of a tail unless the node has more tokens. None if there is none."""
        stored, partial_match = self.restored.blocks, self.restored.partial_match
        index = last.position // self.nodes.block_size
        if last.name == self.restored.last_node:
            return last.name
        if self.state == "token" and index < len(stored):
            return stored[index].name
        if partial_match is None or index > len(stored) or partial_match.end < last.end:
            return None
        node = partial_match.node
        return node.name if node.end > last.end or node.kind in (NodeKind.TAIL, last.kind) else None


class Saver:
    """Captures the state of one request from KV memory, and queues it for the writer as one `Save`.

    For the engine's thread. `queue` does not wait. Whoever made the saver finishes its `save`.

    A payload is a user of the pages that it lies in. States, which each step overwrites, are copied to pages of their
    own. Without memory for these pages, only the node with the states is lost.
    """

    def __init__(self, context: RequestContext, selection: Selection) -> None:
        self._context, self._writer, cache = context, context.cache.writer, context.cache
        self.save = Save(context.epoch)
        self.selection = selection
        token_ids, block_size = context.prompt.token_ids, cache.settings.block_size
        path = TokenPath(context.epoch.secret, context.namespace.root, token_ids, block_size)
        nodes = PromptNodes(path, cache.payload_layout)
        self.planner = SavePlanner(
            nodes, RestoreResult(), cache.layout.state_kind, len(token_ids), cache.settings.kv_cache_min_tokens
        )
        self.states_at: set[int] = set()
        """The positions whose states are with the writer, or on their way."""
        self._interim: Node | None = None
        """The interim checkpoint that the writer has, until later states replace it."""
        self._anchors: tuple[int, ...] | None = None
        """See `Publication`."""
        self._continued: bytes | None = None
        """The node where the prompt's last entry ends, or the entry of what was restored."""
        self._began_at = self._checkpoint_at = 0.0
        """The times of `time.perf_counter` when saving began, and when the last states were queued."""
        self.token_s: float | None = None
        """Seconds that computing a token takes, by earlier prompts, and then by this one. None until that is known."""

    def begin_saving(self, restored: RestoreResult, selection: Selection | None = None) -> None:
        """Begins with the result of the restore and the policy's selection, None if the policy is not asked. Call this
        before the first step."""
        self._began_at = self._checkpoint_at = time.perf_counter()
        self.token_s = self._context.cache.cost_model.prefill_s_per_token
        self.planner = dataclasses.replace(self.planner, restored=restored)
        self._continued = restored.last_node
        if selection is not None:
            self.selection = selection
            self._anchors = selection.anchors if self._context.cache.layout.states else None

    def needs_interim(self, num_tokens: int) -> bool:
        """Returns whether a kill would lose too much without an interim checkpoint here, in the selected part."""
        cache, planner = self._context.cache, self.planner
        if not cache.layout.states or num_tokens > self.selection.aligned:
            return False
        is_possible = planner.state in AT_ANY_TOKEN or num_tokens % planner.nodes.block_size == 0
        num_new = num_tokens - max(planner.restorable, 0 if self._interim is None else self._interim.end)
        is_due = num_new >= _INTERIM_TOKENS and time.perf_counter() - self._checkpoint_at >= _INTERIM_S
        return is_possible and is_due

    def queue_interim(self, sequence: KVSequence) -> None:
        """Queues an interim checkpoint at the end of a sequence, and the blocks before it, to be written at once. The
        next states that are queued replace it, so it is no checkpoint that the policy counts. Queues the blocks alone
        if there is no memory for a copy of the states. See `queue`."""
        cache, planner, num_tokens = self._context.cache, self.planner, sequence.num_tokens
        planner.interim = planner.nodes.checkpoint(num_tokens)
        self.queue(sequence, SavePlan((*planner.missing(num_tokens, self.states_at), planner.interim)))
        if self._interim == planner.interim:
            cache.spend(self._context.options.share, cache.layout.state_bytes)
        self._writer.write_at_once(self.save)

    def queue(
        self, sequence: KVSequence, plan: SavePlan, *, logits: Logits | None = None, min_ttl_s: float = 0.0
    ) -> None:
        """Captures the nodes of a plan and queues them in batches, the last one with the plan's other records. A tail
        has `logits`. The time to live of state that the policy did not select is at least `min_ttl_s`. Raises
        `CacheError`, and errors of missing memory."""
        planner, nodes, token_s = self.planner, plan.nodes, self.token_s
        if any(node.num_tokens and node.position < sequence.complete_from for node in nodes):
            self._writer.fail(self.save, "the state before it is no longer stored, and has left the windows in memory")
        if token_s is None:
            # Fewer than were restored, if it gave its memory to others and began again.
            num_computed = sequence.num_tokens - planner.restored.num_tokens
            token_s = (time.perf_counter() - self._began_at) / num_computed if num_computed > 0 else 0.0
        batch, holds, num_bytes, replaced = list[NewNode](), list[Hold](), 0, None
        try:
            for node, saved_tokens in zip(nodes, planner.saved_tokens(nodes), strict=True):
                planner.submitted.add(node.name)
                if self.save.has_failed:
                    continue
                if num_bytes >= _BATCH_BYTES:
                    self._writer.queue_publication(self.save, self._publication(batch, SavePlan(), replaced), holds)
                    batch, holds, num_bytes, replaced = [], [], 0, None
                pieces = planner.nodes.pieces(node)
                payload = sequence.capture(node.position, pieces, logits if node.kind == NodeKind.TAIL else None)
                if payload is None and node == planner.interim:
                    # It is tried again after the next step.
                    planner.submitted.discard(node.name)
                    continue
                if payload is None:
                    self._writer.note_loss(self.save, "there is no KV memory for a copy of its states")
                    self.states_at.discard(node.end)
                    plan = replace(plan, last_node=None) if plan.last_node == node.name else plan
                    continue
                holds.append(payload)
                if node.kind != NodeKind.BLOCK:
                    self._checkpoint_at = time.perf_counter()
                    replaced, self._interim = self._interim, node if node == planner.interim else None
                ttl_s = self._ttl_of(node, min_ttl_s)
                cost_s, replaces = token_s * saved_tokens, planner.state == "token"
                new = planner.nodes.new_node(node, payload, prefill_s=cost_s, ttl_s=ttl_s, replaces=replaces)
                is_unverified = planner.restored.is_unverified(node.position, node.end)
                batch.append(replace(new, is_unverified=True) if is_unverified else new)
                num_bytes += batch[-1].payload_bytes
            if batch or plan.last_node is not None or plan.prompt is not None:
                self._writer.queue_publication(self.save, self._publication(batch, plan, replaced), holds)
        except BaseException:
            for hold in holds:
                hold.release()
            self._writer.fail(self.save, "it could not be copied")
            raise

    def _ttl_of(self, node: Node, min_ttl_s: float) -> float | None:
        ttl_s, selection = self._context.ttl_at(node.end), self.selection
        selected = selection.checkpoints if node.kind == NodeKind.CHECKPOINT else range(selection.aligned + 1)
        return max(ttl_s or 0.0, min_ttl_s) if min_ttl_s and node.end not in selected else ttl_s

    def _publication(self, nodes: Sequence[NewNode], plan: SavePlan, replaced: Node | None) -> Publication:
        last_node = None if self.save.has_failed else plan.last_node
        context, root, continued = self._context, self._context.namespace.root, self._continued
        prompt, options = context.prompt, context.options
        is_end = last_node is not None and plan.has_entry
        self._continued = nodes[-1].name if nodes else continued
        return Publication(
            epoch=context.epoch,
            root=root,
            root_record=context.namespace.record,
            nodes=tuple(nodes),
            replaced=None if replaced is None else (replaced.name, replaced.parent),
            last_node=last_node,
            entry=context.entry(self.selection.reason, plan.num_tokens if is_end else 0) if nodes or is_end else None,
            continued=continued,
            prompt=plan.prompt,
            prompt_group=options.group,
            prompt_ttl_s=context.ttl_at(len(prompt.token_ids)),
            ttl_s=context.ttl_at(plan.num_tokens),
            anchors=None if self._interim is not None else self._anchors,
            daemon_ttl_s=context.cache.settings.kv_cache_ttl,
        )
