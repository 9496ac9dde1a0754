"""Saving of one request's state: which nodes, when, at what cost, and their way from KV memory to the writer.

Free of torch when it is imported, because the simulator plans the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING

from diskprefix.cache.choosing import marked_nodes
from diskprefix.cache.matching import RestoreResult
from diskprefix.cache.policy.select import AT_ANY_TOKEN, AT_CHECKPOINTS, StateKind
from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.store.changes import NewNode
from diskprefix.store.note_record import NoteKind
from diskprefix.store.pieces import Payload
from diskprefix.store.save import Hold, Save
from diskprefix.store.schema import EntryRecord, Kind
from diskprefix.store.store import Publication
from diskprefix.tokens import LEAST_TOKENS, TokenPath
from diskprefix.values import Saved, Selection

if TYPE_CHECKING:
    import torch

    from diskprefix.cache.context import RequestContext
    from diskprefix.kv.sequence import KVSequence

_BATCH_BYTES = 16 << 20
_LEAVE_S = 600.0
"""Seconds for which the state of a cancelled request is kept at least."""


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
    prompt: TokenPath | None = None


@dataclass
class Planner:
    """Plans the nodes that one request stores. `nodes` are those of the prompt, and may grow by its reply. Tokens
    behind `prompt_tokens` were decoded. `submitted` are the names of the nodes that the request has stored itself."""

    nodes: PromptNodes
    restored: RestoreResult
    state: StateKind
    prompt_tokens: int
    submitted: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._restorable = self.restored.stored_tokens
        """The last position at which a later request could continue."""

    def plan(self, selection: Selection, states_at: Collection[int]) -> Plan:
        """Returns the nodes that the policy wants and that are not stored yet. `states_at`: the positions whose states
        are stored too."""
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
        # With state kind `token`, a longer node may replace the holder before this is written, so no entry is put on
        # it.
        return Plan(missing, holder, end.end, has_entry=self.state != "token")

    def reply_end(self, num_tokens: int, selection: Selection) -> int:
        """Returns how many of the `num_tokens` tokens of the prompt and its reply are kept if a part of the reply is;
        otherwise 0. Replies are kept if the model is exact at every token: decoding then computes the same bits as a
        prefill. Of states there are only those at the end."""
        most = selection.scope.most
        end = num_tokens if most is None else min(most, num_tokens)
        is_kept = self.state in AT_ANY_TOKEN and selection.saves_reply and end > self.prompt_tokens
        return end if is_kept and (end == num_tokens or self.state == "token") else 0

    def plan_reply(self, nodes: PromptNodes, selection: Selection, states_at: Collection[int]) -> Plan:
        """Returns what `plan` does for the prompt and its reply, which have these `nodes`."""
        if not (end := self.reply_end(len(nodes.token_ids), selection)):
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


class Saver:
    """Has the state that one request computes written, if the policy wants it and it is not stored.

    Methods are for the engine thread and do not wait. They raise `CacheError`, and errors of missing memory. Call
    `choose` before the first step, `close` at the end. `pins` collects what is unpinned then.

    Nodes go to the writer in batches of one `Save`, parents first. A payload is a user of the pages that it lies in;
    states, which each step overwrites, are copied to pages of their own, and lost alone if there are none.
    """

    def __init__(self, context: RequestContext, selection: Selection) -> None:
        self._context = context
        self._cache, self._prompt, self._options = context.cache, context.prompt, context.options
        self._writer = self._cache.writer
        self.selection = selection
        self._is_chosen = False
        self.save = Save(context.epoch)
        self.pins = ExitStack()
        token_ids, block_size = self._prompt.token_ids, self._cache.settings.block_size
        path = TokenPath(context.epoch.secret, context.namespace.root, token_ids, block_size)
        nodes = PromptNodes(path, self._cache.payload_layout)
        self.planner = Planner(nodes, RestoreResult(), self._cache.layout.state_kind, len(token_ids))
        self._states_at: set[int] = set()
        """The positions whose states are with the writer, or on their way."""
        self._num_blocks = 0
        """The number of first blocks that are stored or on their way."""
        self._num_restored, self._has_tail, self._is_stored = 0, False, False
        self._logits: tuple[str, memoryview] | None = None
        """The end's id and the logits there, until they are stored."""
        self._began_at = 0.0
        self._token_s: float | None = None
        """Seconds that computing a token took. None until it is known."""

    def begin(self, restored: RestoreResult) -> None:
        """Takes over what is stored. Called when the request begins to compute."""
        self._began_at, self._num_restored = time.perf_counter(), restored.num_tokens
        self._has_tail = restored.has_tail
        self.planner = replace(self.planner, restored=restored)

    def choose(self, selection: Selection) -> None:
        """Takes the policy's decision."""
        self.selection, self._is_chosen = selection, True

    @property
    def has_failed(self) -> bool:
        """Nothing more is written: the store fails, or a node that others would continue is lost."""
        return self._cache.store.problem is not None or self.save.has_failed

    @property
    def saved(self) -> Saved:
        if self.save.lost is not None:
            return "dropped"
        return "queued" if self.save.has_nodes else "stored" if self._is_stored else "none"

    def fail(self, why: str) -> None:
        """Ends the saving, for a reason that is logged unless it is empty. What is with the writer is written."""
        self._writer.fail(self.save, why)

    def after_step(self, sequence: KVSequence) -> None:
        """See `CachedRequest.after_step`."""
        if sequence.num_tokens in self.selection.checkpoints:
            self._states_at.add(sequence.num_tokens)
        num_tokens = min(sequence.num_tokens, self.selection.aligned)
        self._save_blocks(sequence, num_tokens // self.planner.nodes.block_size)
        self.save_what_slides(sequence)

    def save_what_slides(self, sequence: KVSequence) -> None:
        """Queues complete blocks that will slide out of the memory of windows: without them, a later turn could save
        nothing. Those that the policy does not want are kept for ten minutes."""
        num_blocks = sequence.num_tokens // self.planner.nodes.block_size
        if (
            num_blocks <= self._num_blocks
            or not sequence.slides(len(self._prompt.token_ids))
            or not self.may_leave(sequence)
        ):
            return
        missing = self.planner.missing(num_blocks, ())
        if missing and missing[0].position >= sequence.complete_from:
            self._save_blocks(sequence, num_blocks, least_s=_LEAVE_S)

    def publish(self, sequence: KVSequence, logits: torch.Tensor | None, prefill_s: float) -> None:
        """Queues the rest of the prompt, with the entry and the prompt as seen."""
        computed = len(self._prompt.token_ids) - self._num_restored
        if computed:
            self._token_s = prefill_s / computed
            self._cache.cost_model.record_prefill(computed, prefill_s)
        plan = Plan() if self.has_failed else self.planner.plan(self.selection, self._states_at)
        self._is_stored = plan.last_node is not None
        has_tail = bool(plan.nodes) and plan.nodes[-1].kind == Kind.TAIL
        assert logits is not None or not has_tail, "a prompt that goes on has no tail"
        plan = replace(plan, prompt=self._remembered())
        if plan.last_node is not None or plan.prompt is not None or plan.nodes:
            self._submit(sequence, plan.nodes, plan, logits=logits)
        if logits is not None and self.selection.keep_tail and self._cache.layout.state_kind == "token":
            self._remember_logits(sequence, logits, is_in_tail=self._has_tail or has_tail, is_new=computed > 0)
        if self._options.save:
            for name, ttl_s in marked_nodes(self.planner.nodes, self._prompt.marks, self._options.ttl_s):
                self._writer.touch(name, time.time(), ttl_s, hits=0)

    def publish_reply(self, sequence: KVSequence, nodes: PromptNodes) -> None:
        """Queues the part that is kept of the prompt and its reply. `nodes` are those of both."""
        if not self._affords(nodes):
            return
        if self._cache.layout.states and self.planner.reply_end(len(nodes.token_ids), self.selection):
            self._states_at.add(sequence.num_tokens)
        plan = self.planner.plan_reply(nodes, self.selection, self._states_at)
        if plan.last_node is not None:
            self._submit(sequence, plan.nodes, replace(plan, has_entry=True))
            # The reply takes the place of the tail.
            self._keep_logits()

    def _affords(self, nodes: PromptNodes) -> bool:
        """Returns whether the write budget has room for a prompt and its reply, which have these `nodes`."""
        spending, stored = self._context.spending, self.planner.restored.stored_tokens
        is_asked, end = self._options.is_asked, len(nodes.token_ids)
        if spending is None:
            return True
        if not spending.allows_reply(end, stored, is_asked=is_asked):
            return False
        self._cache.spend(self._options.tenant, max(0, end - self.selection.kept) * spending.bytes_per_token)
        return True

    def may_leave(self, sequence: KVSequence) -> bool:
        """Returns whether state may be kept that the policy does not want."""
        if not self._options.save or self.has_failed:
            return False
        spending = self._cache.spending()
        if spending is not None and not spending.is_ample:
            return False
        return self._context.allows_saving(sequence.num_tokens)

    def leave(
        self, sequence: KVSequence, restored: RestoreResult, nodes: PromptNodes, least_s: float = _LEAVE_S
    ) -> None:
        """Queues what was computed behind the part that was `restored`. `nodes` are those of the tokens in the
        sequence. Those that the policy does not want are kept for at least `least_s` seconds."""
        layout = self._cache.layout
        if len(nodes.token_ids) > len(self.planner.nodes.token_ids):
            self.planner.nodes = nodes
        nodes = self.planner.nodes
        is_at_end_of_block = sequence.num_tokens % nodes.block_size == 0
        is_possible = is_at_end_of_block or layout.state_kind in AT_ANY_TOKEN
        if layout.states and is_possible and sequence.num_tokens >= restored.num_tokens + LEAST_TOKENS:
            self._states_at.add(sequence.num_tokens)
        self._save_blocks(sequence, sequence.num_tokens // nodes.block_size, least_s=least_s)
        if layout.state_kind == "token" and not is_at_end_of_block and sequence.num_tokens > restored.stored_tokens:
            # The tokens behind the last whole block.
            self._submit(sequence, [nodes.partial_block(sequence.num_tokens)], least_s=least_s)

    def close(self, at_end: Callable[[], None] = lambda: None) -> None:
        """Ends the save, unpins everything, and calls `at_end`."""
        self._writer.finish(self.save)
        self.pins.close()
        at_end()

    def _save_blocks(self, sequence: KVSequence, num_blocks: int, least_s: float = 0.0) -> None:
        """Queues the first `num_blocks` blocks of the prompt with their checkpoints, except those that are queued
        already."""
        self._num_blocks = max(num_blocks, self._num_blocks)
        if missing := self.planner.missing(num_blocks, self._states_at):
            self._submit(sequence, missing, least_s=least_s)

    def _remember_logits(self, sequence: KVSequence, logits: torch.Tensor, *, is_in_tail: bool, is_new: bool) -> None:
        """Remembers the logits until the tail with them is replaced. If there is no tail, stores them now."""
        if is_in_tail or is_new:
            self._logits = self.planner.nodes.end_id, sequence.logits_bytes(logits)
        if not is_in_tail:
            self._keep_logits()

    def _keep_logits(self) -> None:
        if self._logits is None or self.has_failed:
            return
        (end_id, content), self._logits = self._logits, None
        notes = self._context.notes(self._context.ttl_at(len(self._prompt.token_ids)))

        def keep() -> None:
            notes.put(NoteKind.LOGITS, end_id, bytes(content), self._prompt.token_ids)

        # Compressing them takes milliseconds, for which the engine's thread does not wait.
        self._cache.run_aside(keep)

    def _submit(
        self,
        sequence: KVSequence,
        nodes: Sequence[Node],
        plan: Plan | None = None,
        *,
        logits: torch.Tensor | None = None,
        least_s: float = 0.0,
    ) -> None:
        """Queues nodes to be written, parents first. With the last of them goes what `plan` adds; a tail has `logits`.
        Nodes that the policy does not want are kept for at least `least_s` seconds."""
        if any(node.num_tokens and node.position < sequence.complete_from for node in nodes):
            self.fail("what it continues is no longer stored, and of layers with windows not in memory either")
        token_s, batch, holds, num_bytes = self._seconds_per_token(sequence), list[NewNode](), list[Hold](), 0
        try:
            for node, saved_tokens in zip(nodes, self.planner.saved_tokens(nodes), strict=True):
                self.planner.submitted.add(node.name)
                if self.save.has_failed:
                    continue
                if num_bytes >= _BATCH_BYTES:
                    self._writer.add(self.save, self._publication(batch, Plan()), holds)
                    batch, holds, num_bytes = [], [], 0
                is_tail = node.kind == Kind.TAIL
                payload = sequence.capture(node.position, self.planner.nodes.cuts(node), logits if is_tail else None)
                if payload is not None:
                    holds.append(payload)
                    batch.append(self._new_node(node, payload, token_s * saved_tokens, least_s))
                    num_bytes += batch[-1].payload_bytes
                    continue
                self._writer.note_loss(self.save, "there is no KV memory for a copy of its states")
                self._states_at.discard(node.end)
                plan = replace(plan, last_node=None) if plan is not None and plan.last_node == node.name else plan
            if batch or plan is not None:
                self._writer.add(self.save, self._publication(batch, plan or Plan()), holds)
        except BaseException:
            for hold in holds:
                hold.release()
            self.fail("it could not be copied")
            raise

    def _new_node(self, node: Node, payload: Payload, prefill_s: float, least_s: float) -> NewNode:
        ttl_s, replaces = self._ttl_s(node, least_s), self.planner.state == "token"
        return self.planner.nodes.new_node(node, payload, prefill_s=prefill_s, ttl_s=ttl_s, replaces=replaces)

    def _publication(self, nodes: Sequence[NewNode], plan: Plan) -> Publication:
        last_node = None if self.save.has_failed else plan.last_node
        context, namespace = self._context, self._context.namespace
        entry = EntryRecord(
            root=namespace.root,
            num_tokens=plan.num_tokens,
            scope=str(context.options.scope),
            preview=context.prompt.text,
            created_at=time.time(),
            reason=self.selection.reason if self._is_chosen else "",
        )
        return Publication(
            epoch=context.epoch,
            root=namespace.root,
            root_record=namespace.record,
            nodes=tuple(nodes),
            last_node=last_node,
            entry=entry if last_node is not None and plan.has_entry else None,
            prompt=plan.prompt,
            prompt_group=context.options.group,
            prompt_ttl_s=context.ttl_at(len(context.prompt.token_ids)),
            ttl_s=context.ttl_at(plan.num_tokens),
            anchors=self.selection.anchors if self._is_chosen and self._cache.layout.states else None,
            daemon_ttl_s=self._cache.settings.kv_cache_ttl,
        )

    def _ttl_s(self, node: Node, least_s: float) -> float | None:
        ttl_s = self._context.ttl_at(node.end)
        kept = self.selection.checkpoints if node.kind == Kind.CHECKPOINT else range(self.selection.aligned + 1)
        return ttl_s if not least_s or node.end in kept else max(ttl_s or 0.0, least_s)

    def _seconds_per_token(self, sequence: KVSequence) -> float:
        """Returns the seconds that computing a token of the prompt takes: as measured, or until then as in earlier
        prompts, or as in its own beginning."""
        for known in (self._token_s, self._cache.cost_model.prefill_s_per_token):
            if known is not None:
                return known
        computed = sequence.num_tokens - self._num_restored
        return (time.perf_counter() - self._began_at) / computed if computed else 0.0

    def _remembered(self) -> TokenPath | None:
        """Adds the prompt to those seen and returns it. Returns None if it is too short, only read, or lacks messages
        of its conversation."""
        path, token_ids = self.planner.nodes.path, self._prompt.token_ids
        is_too_short = len(token_ids) < self._cache.settings.kv_cache_min_tokens
        if is_too_short or not self._options.save or self.selection.reason == "left_out":
            return None
        lasts_s = self._cache.lasts_s(self._context.ttl_at(len(token_ids)))
        now = self._cache.store.clock()
        self._context.namespace.remember(token_ids, self._options.group, path.block_names, now, lasts_s)
        return path
