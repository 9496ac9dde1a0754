"""Saving of one request's state: which nodes, when, at what cost, and their way from KV memory to the writer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from diskprefix.cache.context import RequestContext
from diskprefix.cache.held_states import HeldStates
from diskprefix.cache.matching import Restored
from diskprefix.cache.planning import Plan, Planner, marked_nodes
from diskprefix.cache.policy.select import AT_ANY_TOKEN
from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.kv.pages import BlockPayload, Hold, Page
from diskprefix.kv.sequence import KVSequence
from diskprefix.nouns import Selection
from diskprefix.store.changes import NewNode
from diskprefix.store.note_record import NoteKind
from diskprefix.store.pieces import Payload, split_payload
from diskprefix.store.schema import EntryRecord, Kind
from diskprefix.store.store import Chain, Publication
from diskprefix.tokens import LEAST_TOKENS, TokenIds

log = logging.getLogger("diskprefix")

_BATCH_BYTES = 16 << 20
_LEAVE_S = 600.0
"""Seconds for which the state of a cancelled request is kept at least."""


@dataclass
class _Batch:
    """Nodes that go to the writer together. Their payloads lie in `pages`, or take `reserved_bytes` of the buffer."""

    nodes: list[NewNode] = field(default_factory=list)
    pages: list[Page] = field(default_factory=list)
    reserved_bytes: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(node.payload_bytes for node in self.nodes)


class Saver:
    """Has the state that one request computes written, if the policy wants it and it is not stored.

    Methods are for the engine thread and do not wait. They raise `CacheError`, and errors of missing memory. Call
    `choose` before the first step, `close` at the end.

    Nodes go to the writer in batches, parents first. Full blocks are written from their pages, which never change; all
    else is copied, and lost alone if the buffer has no room for it. If a batch is lost, all later ones are dropped: no
    node is stored without its parent, and no entry without its nodes. `pins` collects what is unpinned when the last
    batch is with the writer.
    """

    def __init__(self, context: RequestContext, selection: Selection) -> None:
        self._context = context
        self._cache, self._prompt, self._options = context.cache, context.prompt, context.options
        self.selection = selection
        self._is_chosen = False
        self.chain = Chain(context.epoch)
        self.pins = ExitStack()
        self.has_published = False
        self._end = ExitStack()
        """Unpins the last node that is with the writer. Its child is not there yet."""
        nodes = context.nodes_of(self._prompt.token_ids)
        self.planner = Planner(nodes, Restored(), self._cache.layout.state_kind, len(self._prompt.token_ids))
        self._states = HeldStates(self._cache.writer, self._cache.layout)
        self._num_blocks = 0
        """The number of first blocks that are stored or on their way."""
        self._num_restored, self._has_tail = 0, False
        self._lost: set[bytes] = set()
        """The names of nodes that there was no room for. No other node continues them."""
        self._logits: tuple[str, memoryview] | None = None
        """The end's id and the logits there, until they are stored."""
        self._began_at = 0.0
        self._token_s: float | None = None
        """Seconds that computing a token took. None until it is known."""

    def begin(self, restored: Restored) -> None:
        """Takes over what is stored. Called when the request begins to compute."""
        self._began_at, self._num_restored = time.perf_counter(), restored.num_tokens
        self._has_tail = restored.has_tail
        self.planner = replace(self.planner, restored=restored)

    def choose(self, selection: Selection) -> None:
        """Takes the policy's decision."""
        self.selection, self._is_chosen = selection, True

    def give_up(self, why: str | None) -> None:
        """Stops all further writing, counts that once, and logs `why` unless it is None. For any thread."""
        self._count(why, is_first=self.chain.break_off(why or ""))

    def record_loss(self, why: str) -> None:
        """Counts and logs the loss of something that no other node continues. The rest is written."""
        self._count(why, is_first=self.chain.record_loss(why))

    @property
    def is_given_up(self) -> bool:
        """Nothing more is written: the store fails, or a node that others would continue is lost."""
        return self._cache.store.problem is not None or self.chain.is_broken()

    def after_step(self, sequence: KVSequence) -> None:
        """See `CachedRequest.after_step`."""
        self._states.reserve(self._last_states_bytes(sequence.num_tokens))
        if sequence.num_tokens in self.selection.checkpoints:
            self._take_states(sequence, is_last=sequence.num_tokens == self.selection.aligned)
        num_tokens = min(sequence.num_tokens, self.selection.aligned)
        self._publish_blocks(sequence, num_tokens // self.planner.nodes.block_size)
        self.publish_what_slides(sequence)

    def publish_what_slides(self, sequence: KVSequence) -> None:
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
            self._publish_blocks(sequence, num_blocks, least_s=_LEAVE_S)

    def publish(self, sequence: KVSequence, logits: torch.Tensor | None, prefill_s: float) -> Plan:
        """Queues the rest of the prompt, with the entry and the prompt as seen. Returns what was still to be stored."""
        computed = len(self._prompt.token_ids) - self._num_restored
        if computed:
            self._token_s = prefill_s / computed
            self._cache.cost_model.record_prefill(computed, prefill_s)
        plan = Plan() if self.is_given_up else self.planner.plan(self.selection, self._states.positions)
        has_tail = bool(plan.nodes) and plan.nodes[-1].kind == Kind.TAIL
        assert logits is not None or not has_tail, "a prompt that goes on has no tail"
        if logits is not None and has_tail and not self._states.take_tail(sequence, logits):
            self.record_loss("the write buffer had no room for its end")
            plan = Plan(plan.nodes[:-1])
        elif logits is not None and self.selection.keep_tail and self._cache.layout.state_kind == "token":
            self._remember_logits(sequence, logits, is_in_tail=self._has_tail or has_tail, is_new=computed > 0)
        plan = replace(plan, prompt=self._remembered())
        if plan.last_node is not None or plan.prompt is not None or plan.nodes:
            self._submit(sequence, plan.nodes, plan)
        if self._options.save:
            for name, ttl_s in marked_nodes(self.planner.nodes, self._prompt.marks, self._options.ttl_s):
                self._cache.writer.touch(name, time.time(), ttl_s, hits=0)
        return plan

    def publish_reply(self, sequence: KVSequence, nodes: PromptNodes) -> bool:
        """Queues the part that is kept of the prompt and its reply. `nodes` are those of both. Returns whether a part
        of the reply is kept."""
        if not self._affords(nodes):
            return False
        if self._cache.layout.states and self.planner.reply_end(len(nodes.token_ids), self.selection):
            self._take_states(sequence, is_last=True)
        plan = self.planner.plan_reply(nodes, self.selection, self._states.positions)
        if plan.last_node is not None:
            self._submit(sequence, plan.nodes, replace(plan, has_entry=True))
            # The reply takes the place of the tail.
            self._keep_logits()
        return plan.last_node is not None

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
        if not self._options.save or self.is_given_up:
            return False
        spending = self._cache.spending()
        if spending is not None and not spending.is_ample:
            return False
        return self._context.allows_saving(sequence.num_tokens)

    def leave(self, sequence: KVSequence, restored: Restored, nodes: PromptNodes, least_s: float = _LEAVE_S) -> None:
        """Queues what was computed behind the part that was `restored`. `nodes` are those of the tokens in the
        sequence. Those that the policy does not want are kept for at least `least_s` seconds."""
        layout = self._cache.layout
        if len(nodes.token_ids) > len(self.planner.nodes.token_ids):
            self.planner.nodes = nodes
        nodes = self.planner.nodes
        is_at_end_of_block = sequence.num_tokens % nodes.block_size == 0
        is_possible = is_at_end_of_block or layout.state_kind in AT_ANY_TOKEN
        if layout.states and is_possible and sequence.num_tokens >= restored.num_tokens + LEAST_TOKENS:
            self._take_states(sequence, is_last=True)
        self._publish_blocks(sequence, sequence.num_tokens // nodes.block_size, least_s=least_s)
        if layout.state_kind == "token" and not is_at_end_of_block and sequence.num_tokens > restored.stored_tokens:
            # The tokens behind the last whole block.
            self._submit(sequence, [nodes.partial_block(sequence.num_tokens)], least_s=least_s)

    def close(self, at_end: Callable[[], None] = lambda: None) -> None:
        """Releases the states that were not published, unpins everything, and calls `at_end`."""
        self._states.close()
        self._end.close()
        self.pins.close()
        at_end()

    def _publish_blocks(self, sequence: KVSequence, num_blocks: int, least_s: float = 0.0) -> None:
        """Queues the first `num_blocks` blocks of the prompt with their checkpoints, except those that are queued
        already."""
        if num_blocks > self._num_blocks or self._states.num_held:
            self._num_blocks = num_blocks
            missing = self.planner.missing(num_blocks, self._states.positions)
            if missing:
                self._submit(sequence, missing, least_s=least_s)

    def _remember_logits(self, sequence: KVSequence, logits: torch.Tensor, *, is_in_tail: bool, is_new: bool) -> None:
        """Remembers the logits until the tail with them is replaced. If there is no tail, stores them now."""
        if is_in_tail or is_new:
            self._logits = self.planner.nodes.end_id, sequence.logits_bytes(logits)
        if not is_in_tail:
            self._keep_logits()

    def _keep_logits(self) -> None:
        if self._logits is None or self.is_given_up:
            return
        (end_id, content), self._logits = self._logits, None
        notes = self._context.notes(self._context.ttl_at(len(self._prompt.token_ids)))

        def keep() -> None:
            notes.put(NoteKind.LOGITS, end_id, bytes(content), self._prompt.token_ids)

        # Compressing them takes milliseconds, for which the engine's thread does not wait.
        self._cache.run_aside(keep)

    def _submit(
        self, sequence: KVSequence, nodes: Sequence[Node], plan: Plan | None = None, *, least_s: float = 0.0
    ) -> None:
        """Queues nodes to be written, parents first. With the last of them goes what `plan` adds. Nodes that the policy
        does not want are kept for at least `least_s` seconds."""
        if any(node.num_tokens and node.position < sequence.complete_from for node in nodes):
            self.give_up("what it continues is no longer stored, and of layers with windows not in memory either")
        token_s, batch = self._seconds_per_token(sequence), _Batch()
        try:
            for node, saved_tokens in zip(nodes, self.planner.saved_tokens(nodes), strict=True):
                self.planner.submitted.add(node.name)
                if self.chain.is_broken():
                    continue
                if batch.nodes and batch.num_bytes >= _BATCH_BYTES:
                    self._write(sequence, batch, None)
                    batch = _Batch()
                payload = self._payload(sequence, node, batch)
                if payload is not None:
                    batch.nodes.append(self._new_node(node, payload, token_s * saved_tokens, least_s))
            if batch.nodes or plan is not None:
                self._write(sequence, batch, plan)
        except BaseException:
            self._cache.writer.release(batch.reserved_bytes)
            self.give_up("it could not be copied")
            raise

    def _new_node(self, node: Node, payload: Payload, prefill_s: float, least_s: float) -> NewNode:
        nodes, layout = self.planner.nodes, self._cache.layout
        cuts = nodes.cuts(node)
        return NewNode(
            name=node.name,
            parent=node.parent,
            position=node.position,
            token_ids=nodes.tokens(node),
            kind=node.kind,
            payload=payload,
            pieces=tuple(cut.piece for cut in cuts),
            num_checked=sum(cut.group < len(layout.groups) for cut in cuts),
            prefill_s=prefill_s,
            ttl_s=self._ttl_s(node, least_s),
            replaces=layout.state_kind == "token",
        )

    def _payload(self, sequence: KVSequence, node: Node, batch: _Batch) -> Payload | None:
        """Returns the content of a node, and adds to the batch the pages that it lies in, or the bytes that it takes.
        That of a full block is in its pages; of others, tokens are copied, with states and logits behind them. Returns
        None if there is no room for the copy."""
        cuts, size = self.planner.nodes.cuts(node), self.planner.nodes.block_size
        if node.num_tokens == size:
            block = [page for page in sequence.block(node.position // size) if page is not None]
            batch.pages += block
            return BlockPayload(block, cuts)
        states = self._states.pop(node.kind, node.end)
        batch.reserved_bytes += len(states)
        num_bytes = self.planner.nodes.payload_bytes(node) - len(states)
        copy = partial(sequence.read_tokens, node.position, node.num_tokens)
        tokens = self._states.in_room(num_bytes, copy, is_last=node.end >= self.selection.aligned)
        if tokens is None:
            batch.reserved_bytes -= len(states)
            self._cache.writer.release(len(states))
            self._lost.add(node.name)
            self.record_loss("the write buffer had no room for its end")
            return None
        batch.reserved_bytes += num_bytes
        whole = memoryview(b"".join((tokens, states))) if states and tokens else states or tokens
        return split_payload(whole, [cut.piece for cut in cuts])

    def _count(self, why: str | None, *, is_first: bool) -> None:
        if is_first:
            self._cache.count("refused")
        if is_first and why is not None:
            log.warning("[disk-cache] a prompt is not saved, or not all of it: %s", why)

    def _write(self, sequence: KVSequence, batch: _Batch, plan: Plan | None) -> None:
        hold = Hold(sequence.pool, batch.pages)
        try:
            publication = self._publication(tuple(batch.nodes), plan or Plan(), hold)
            last = batch.nodes[-1].name if batch.nodes else None
            with self._end.pop_all():
                if last is not None:
                    self._cache.store.evictor.pin(last)
                    self._end.callback(self._cache.store.evictor.unpin, last)
                self._cache.writer.submit(publication, reserved_bytes=batch.reserved_bytes)
        except BaseException:
            hold.release()
            raise
        self.has_published |= bool(batch.nodes)

    def _publication(self, nodes: tuple[NewNode, ...], plan: Plan, hold: Hold) -> Publication:
        last_node = None if self.chain.is_broken() or plan.last_node in self._lost else plan.last_node
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
            chain=self.chain,
            root=namespace.root,
            root_record=namespace.record,
            nodes=nodes,
            last_node=last_node,
            entry=entry if last_node is not None and plan.has_entry else None,
            prompt=plan.prompt,
            prompt_group=context.options.group,
            prompt_ttl_s=context.ttl_at(len(context.prompt.token_ids)),
            ttl_s=context.ttl_at(plan.num_tokens),
            anchors=self.selection.anchors if self._is_chosen and self._cache.layout.states else None,
            daemon_ttl_s=self._cache.settings.kv_cache_ttl,
            page_bytes=sum(page.num_bytes for page in hold.pages),
            frees=hold.frees,
            on_done=hold.release,
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

    def _take_states(self, sequence: KVSequence, *, is_last: bool) -> None:
        if not self._states.take(sequence, is_last=is_last):
            self.record_loss("the write buffer had no room for a checkpoint")

    def _last_states_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of the last copies that are still to be made when `num_tokens` are computed. Where states
        cannot be cut, a prompt is of no use without them."""
        nodes, selection = self.planner.nodes, self.selection
        last = [nodes.checkpoint(at) for at in selection.checkpoints[-1:] if at >= num_tokens]
        last += [nodes.tail()] if selection.keep_tail else []
        return sum(nodes.payload_bytes(node) for node in last)

    def _remembered(self) -> TokenIds | None:
        """Adds the prompt to those seen and returns it. Returns None if it is too short, only read, or lacks messages
        of its conversation."""
        token_ids = self._prompt.token_ids
        is_too_short = len(token_ids) < self._cache.settings.kv_cache_min_tokens
        if is_too_short or not self._options.save or self.selection.reason == "left_out":
            return None
        lasts_s = self._cache.lasts_s(self._context.ttl_at(len(token_ids)))
        names, now = self.planner.nodes.block_names, self._cache.store.clock()
        self._context.namespace.remember(token_ids, self._options.group, names, now, lasts_s)
        return token_ids
