"""Saving of one request's state: which nodes, when, at what cost, and their way from KV memory to the writer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from diskprefix.cache.context import RequestContext
from diskprefix.cache.held_states import HeldStates
from diskprefix.cache.matching import Restored
from diskprefix.cache.planning import Plan, Planner, marked_nodes
from diskprefix.cache.policy.select import AT_ANY_TOKEN
from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.kv.arena import KVArena
from diskprefix.kv.capturer import Capture
from diskprefix.nouns import Selection
from diskprefix.store.changes import NewNode
from diskprefix.store.note_record import NoteKind
from diskprefix.store.pieces import split_payload
from diskprefix.store.schema import EntryRecord, Kind
from diskprefix.store.store import Chain, Publication
from diskprefix.tokens import LEAST_TOKENS, TokenIds

log = logging.getLogger("diskprefix")

_BATCH_BYTES = 16 << 20
_LEAVE_S = 600.0
"""Seconds for which the state of a cancelled request is kept at least."""


class Saver:
    """Has the state that one request computes copied and written, if the policy wants it and it is not stored.

    Methods are for the engine thread and do not wait. They raise `CacheError`, and errors of missing memory. Call
    `choose` before the first step, `close` at the end.

    Nodes go to the writer in batches, parents first, beside the engine thread. If a batch is lost, because there is no
    room or the store fails, all later batches are dropped: no node is stored without its parent, and no entry without
    its nodes. `pins` collects what is unpinned when the last batch is with the writer.
    """

    def __init__(self, context: RequestContext, selection: Selection) -> None:
        self._context = context
        self._cache, self._prompt, self._options = context.cache, context.prompt, context.options
        self.selection = selection
        self._is_chosen = False
        self.chain = Chain()
        self.pins = ExitStack()
        self.has_published = False
        self._arena: KVArena | None = None
        self._end = ExitStack()
        """Unpins the last node that is with the writer. Its child is not there yet."""
        nodes = context.nodes_of(self._prompt.token_ids)
        self.planner = Planner(nodes, Restored(), self._cache.layout.state_kind, len(self._prompt.token_ids))
        self._states = HeldStates(self._cache.writer, self._cache.layout, leaving=self._batch_bytes)
        self._num_blocks = 0
        """The number of first blocks that are stored or on their way."""
        self._num_restored, self._has_tail = 0, False
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

    def after_step(self, arena: KVArena) -> None:
        """See `CachedRequest.after_step`."""
        self._states.reserve(self._last_states_bytes(arena.num_tokens))
        if arena.num_tokens in self.selection.checkpoints:
            self._take_states(arena, is_last=arena.num_tokens == self.selection.aligned)
        num_tokens = min(arena.num_tokens, self.selection.aligned)
        self._publish_blocks(arena, num_tokens // self.planner.nodes.block_size)
        self.publish_what_slides(arena)

    def publish_what_slides(self, arena: KVArena) -> None:
        """Queues complete blocks that will slide out of the memory of windows: without them, a later turn could save
        nothing. Those that the policy does not want are kept for ten minutes."""
        num_blocks = arena.num_tokens // self.planner.nodes.block_size
        if num_blocks <= self._num_blocks or not arena.slides(len(self._prompt.token_ids)) or not self.may_leave(arena):
            return
        missing = self.planner.missing(num_blocks, ())
        if missing and missing[0].position >= arena.complete_from:
            self._publish_blocks(arena, num_blocks, least_s=_LEAVE_S)

    def publish(self, arena: KVArena, logits: torch.Tensor | None, prefill_s: float) -> Plan:
        """Queues the rest of the prompt, with the entry and the prompt as seen. Returns what was still to be stored."""
        computed = len(self._prompt.token_ids) - self._num_restored
        if computed:
            self._token_s = prefill_s / computed
            self._cache.cost_model.record_prefill(computed, prefill_s)
        plan = Plan() if self.is_given_up else self.planner.plan(self.selection, self._states.positions)
        tail: memoryview | None = memoryview(b"")
        if plan.nodes and plan.nodes[-1].kind == Kind.TAIL:
            assert logits is not None, "a prompt that goes on has no tail"
            tail = self._states.tail(arena, logits)
        if tail is None:
            self.record_loss("the write buffer had no room for its end")
            plan = Plan(plan.nodes[:-1])
        elif logits is not None and self.selection.keep_tail and self._cache.layout.state_kind == "token":
            self._remember_logits(arena, logits, is_in_tail=self._has_tail or bool(tail), is_new=computed > 0)
        plan = replace(plan, prompt=self._remembered())
        if plan.last_node is not None or plan.prompt is not None or plan.nodes:
            self._submit(arena, plan.nodes, plan, tail=tail)
        if self._options.save:
            for name, ttl_s in marked_nodes(self.planner.nodes, self._prompt.marks, self._options.ttl_s):
                self._cache.writer.touch(name, time.time(), ttl_s, hits=0)
        return plan

    def publish_reply(self, arena: KVArena, nodes: PromptNodes) -> bool:
        """Queues the part that is kept of the prompt and its reply. `nodes` are those of both. Returns whether a part
        of the reply is kept."""
        if not self._affords(nodes):
            return False
        if self._cache.layout.states and self.planner.reply_end(len(nodes.token_ids), self.selection):
            self._take_states(arena, is_last=True)
        plan = self.planner.plan_reply(nodes, self.selection, self._states.positions)
        if plan.last_node is not None:
            self._submit(arena, plan.nodes, replace(plan, has_entry=True))
            # The reply takes the place of the tail.
            self._keep_logits(arena)
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

    def may_leave(self, arena: KVArena) -> bool:
        """Returns whether state may be kept that the policy does not want."""
        if not self._options.save or self.is_given_up:
            return False
        spending = self._cache.spending()
        if spending is not None and not spending.is_ample:
            return False
        return self._cache.cost_model.allows(arena.num_tokens, use="save")

    def leave(self, arena: KVArena, restored: Restored, least_s: float = _LEAVE_S) -> None:
        """Queues what was computed behind the part that was `restored`. Nodes that the policy does not want are kept
        for at least `least_s` seconds."""
        nodes, layout = self.planner.nodes, self._cache.layout
        is_at_end_of_block = arena.num_tokens % nodes.block_size == 0
        is_possible = is_at_end_of_block or layout.state_kind in AT_ANY_TOKEN
        if layout.states and is_possible and arena.num_tokens >= restored.num_tokens + LEAST_TOKENS:
            self._take_states(arena, is_last=True)
        self._publish_blocks(arena, arena.num_tokens // nodes.block_size, least_s=least_s)
        if layout.state_kind == "token" and not is_at_end_of_block and arena.num_tokens > restored.stored_tokens:
            # The tokens behind the last whole block.
            self._submit(arena, [nodes.partial_block(arena.num_tokens)], least_s=least_s)

    def close(self, at_end: Callable[[], None] = lambda: None) -> None:
        """Releases the states that were not published. Unpins everything, and calls `at_end`, once all batches are
        with the writer."""
        self._states.close()

        def finish() -> None:
            self._end.close()
            self.pins.close()
            at_end()

        if self._arena is None:
            finish()
        else:
            self._cache.capturer.submit(Capture(self._arena, 0, finish, finish))

    def _publish_blocks(self, arena: KVArena, num_blocks: int, least_s: float = 0.0) -> None:
        """Queues the first `num_blocks` blocks of the prompt with their checkpoints, except those that are queued
        already."""
        if num_blocks > self._num_blocks or self._states.num_held:
            self._num_blocks = num_blocks
            missing = self.planner.missing(num_blocks, self._states.positions)
            if missing:
                self._submit(arena, missing, least_s=least_s)

    def _remember_logits(self, arena: KVArena, logits: torch.Tensor, *, is_in_tail: bool, is_new: bool) -> None:
        """Remembers the logits until the tail with them is replaced. If there is no tail, stores them now."""
        if is_in_tail or is_new:
            self._logits = self.planner.nodes.end_id, arena.logits_bytes(logits)
        if not is_in_tail:
            self._keep_logits(arena)

    def _keep_logits(self, arena: KVArena) -> None:
        if self._logits is None or self.is_given_up:
            return
        (end_id, content), self._logits = self._logits, None
        notes = self._context.notes(self._context.ttl_at(len(self._prompt.token_ids)))

        def keep() -> None:
            notes.put(NoteKind.LOGITS, end_id, bytes(content), self._prompt.token_ids)

        # Compressing them takes milliseconds, for which the engine's thread does not wait.
        self._cache.capturer.submit(Capture(arena, 0, keep, drop=lambda: None))

    def _submit(
        self,
        arena: KVArena,
        nodes: Sequence[Node],
        plan: Plan | None = None,
        *,
        tail: memoryview | None = None,
        least_s: float = 0.0,
    ) -> None:
        """Queues nodes to be captured and written, parents first. With the last of them goes what `plan` adds. `arena`
        may grow meanwhile, and nothing that it has may change; see `KVArena.settle`.

        The payload of a node holds what is copied already, for which room is reserved; `tail` are the states and logits
        of a tail. The state of the node's own tokens comes before that. Nodes that the policy does not want are kept
        for at least `least_s` seconds.
        """
        token_s, planner = self._seconds_per_token(arena), self.planner
        new: list[NewNode] = []
        for node, saved_tokens in zip(nodes, planner.saved_tokens(nodes), strict=True):
            cuts = planner.nodes.cuts(node)
            pieces = tuple(cut.piece for cut in cuts)
            num_checked = sum(cut.group < len(planner.nodes.layout.groups) for cut in cuts)
            # Of a block, there is nothing else.
            copied = self._states.pop(node.end) if node.kind == Kind.CHECKPOINT else tail or memoryview(b"")
            new.append(
                NewNode(
                    name=node.name,
                    parent=node.parent,
                    position=node.position,
                    token_ids=planner.nodes.tokens(node),
                    kind=node.kind,
                    payload=split_payload(copied, pieces[num_checked:]),
                    pieces=pieces,
                    prefill_s=token_s * saved_tokens,
                    ttl_s=self._ttl_s(node, least_s),
                    replaces=self._cache.layout.state_kind == "token",
                    num_checked=num_checked,
                )
            )
        planner.submitted.update(node.name for node in new)
        if any(len(node.token_ids) and node.position < arena.complete_from for node in new):
            self.give_up("what it continues is no longer stored, and of layers with windows not in memory either")
        if new and self._batch_bytes > self._cache.settings.kv_cache_write_buffer:
            self.give_up("the write buffer is smaller than a block")
        self.has_published |= bool(new)
        self._arena, arena.capturer = arena, self._cache.capturer
        batches = list(self._batches(new))
        for batch in batches:
            added = plan if batch is batches[-1] else None
            copy, drop = partial(self._copy, arena, batch, added), partial(self._drop, batch, added)
            num_bytes = sum(map(_missing_bytes, batch))
            self._cache.capturer.submit(Capture(arena, num_bytes, copy, drop, self.chain.is_broken))

    def _count(self, why: str | None, *, is_first: bool) -> None:
        if is_first:
            self._cache.count("refused")
        if is_first and why is not None:
            log.warning("[disk-cache] a prompt is not saved, or not all of it: %s", why)

    @property
    def _batch_bytes(self) -> int:
        """The most bytes of a batch: one block at least."""
        block_bytes = self._cache.payload_layout.payload_bytes(self._cache.settings.block_size, Kind.BLOCK)
        return max(block_bytes, min(_BATCH_BYTES, self._cache.settings.kv_cache_write_buffer // 4))

    def _batches(self, nodes: Sequence[NewNode]) -> Iterator[tuple[NewNode, ...]]:
        """Yields parts of `nodes` that wait for room for no more than `batch_bytes` each; an empty one of none."""
        batch: list[NewNode] = []
        size = 0
        for node in nodes:
            missing = _missing_bytes(node)
            if batch and size + missing > self._batch_bytes:
                yield tuple(batch)
                batch, size = [], 0
            batch.append(node)
            size += missing
        yield tuple(batch)

    def _copy(self, arena: KVArena, batch: tuple[NewNode, ...], plan: Plan | None) -> None:
        """Copies and submits a batch, on the capturing thread. Room for the whole batch is reserved."""
        size = sum(map(_payload_bytes, batch))
        try:
            captured = tuple(_captured(arena, node) for node in batch)
        except BaseException:
            self._cache.writer.release(size)
            self.give_up("it could not be copied")
            raise
        if captured or plan is not None:
            self._write(captured, plan)

    def _drop(self, batch: tuple[NewNode, ...], plan: Plan | None) -> None:
        """Drops a batch, on the capturing thread."""
        self._cache.writer.release(sum(node.payload_bytes for node in batch))
        if batch:
            self.give_up("its memory was needed before the disk had room for it")
        if plan is not None:
            self._write((), plan)

    def _write(self, captured: tuple[NewNode, ...], plan: Plan | None) -> None:
        publication = self._publication(captured, plan or Plan())
        last = captured[-1].name if captured else None
        with self._end.pop_all():
            if last is not None:
                self._cache.store.evictor.pin(last)
                self._end.callback(self._cache.store.evictor.unpin, last)
            self._cache.writer.submit(publication, reserved_bytes=publication.payload_bytes)

    def _publication(self, captured: tuple[NewNode, ...], plan: Plan) -> Publication:
        last_node = None if self.chain.is_broken() else plan.last_node
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
            store_id=context.names.store_id,
            root=namespace.root,
            root_record=namespace.record,
            nodes=captured,
            last_node=last_node,
            entry=entry if last_node is not None and plan.has_entry else None,
            prompt=plan.prompt,
            prompt_group=context.options.group,
            prompt_ttl_s=context.ttl_at(len(context.prompt.token_ids)),
            ttl_s=context.ttl_at(plan.num_tokens),
            anchors=self.selection.anchors if self._is_chosen and self._cache.layout.states else None,
            daemon_ttl_s=self._cache.settings.kv_cache_ttl,
            chain=self.chain,
        )

    def _ttl_s(self, node: Node, least_s: float) -> float | None:
        ttl_s = self._context.ttl_at(node.end)
        kept = self.selection.checkpoints if node.kind == Kind.CHECKPOINT else range(self.selection.aligned + 1)
        return ttl_s if not least_s or node.end in kept else max(ttl_s or 0.0, least_s)

    def _seconds_per_token(self, arena: KVArena) -> float:
        """Returns the seconds that computing a token of the prompt takes: as measured, or until then as in earlier
        prompts, or as in its own beginning."""
        for known in (self._token_s, self._cache.cost_model.prefill_s_per_token):
            if known is not None:
                return known
        computed = arena.num_tokens - self._num_restored
        return (time.perf_counter() - self._began_at) / computed if computed else 0.0

    def _take_states(self, arena: KVArena, *, is_last: bool) -> None:
        if not self._states.take(arena, is_last=is_last):
            self.record_loss("the write buffer had no room for a checkpoint")

    def _last_states_bytes(self, num_tokens: int) -> int:
        """Returns the bytes of the last copies that are still to be made when `num_tokens` are computed. Where states
        cannot be cut, a prompt is of no use without them."""
        layout, selection = self._cache.layout, self.selection
        is_last_ahead = bool(selection.checkpoints) and selection.checkpoints[-1] >= num_tokens
        checkpoint = layout.state_bytes if is_last_ahead else 0
        return checkpoint + (layout.state_bytes + layout.logits_bytes if selection.keep_tail else 0)

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


def _captured(arena: KVArena, node: NewNode) -> NewNode:
    """Returns the node with its whole payload: the state of its tokens, then what was copied already."""
    if not len(node.token_ids):
        return node
    state = arena.read_tokens(node.position, len(node.token_ids))
    return replace(node, payload=split_payload(state, node.pieces[: node.num_checked]) + node.payload)


def _payload_bytes(node: NewNode) -> int:
    return sum(piece.num_bytes for piece in node.pieces)


def _missing_bytes(node: NewNode) -> int:
    """Returns the bytes of the payload that are still to be copied."""
    return _payload_bytes(node) - node.payload_bytes
