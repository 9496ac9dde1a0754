"""Saving of one request's state: which nodes are stored, when, and what a failure does.

A `Planner` lists the nodes that the policy selected and the store lacks. A `Saver` captures them from KV memory and
gives them to the writer, parents first: blocks and checkpoints after each step of the prompt, the end of the prompt and
its entry once it is computed, then the reply, or the state of a request that is cancelled. Together they are one
`Save`, which fails as a whole: then nothing is added any more but that the prompt was seen.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.cache.choosing import marked_nodes
from diskprefix.cache.matching import RestoreResult
from diskprefix.cache.policy.select import AT_ANY_TOKEN, AT_CHECKPOINTS, StateKind
from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.store.changes import NewNode
from diskprefix.store.note_record import NoteKind
from diskprefix.store.save import Hold, Save
from diskprefix.store.schema import EntryRecord, Kind
from diskprefix.store.store import Publication
from diskprefix.tokens import LEAST_TOKENS, Logits, TokenPath
from diskprefix.values import Selection

if TYPE_CHECKING:
    from diskprefix.cache.context import RequestContext
    from diskprefix.kv.sequence import KVSequence

_BATCH_BYTES = 16 << 20
_MIN_TTL_S = 600.0
"""The minimum time to live, in seconds, of state that the policy did not select."""


class Plan(Struct, frozen=True):
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
class Planner:
    """Plans the nodes that one request stores. `nodes` are the nodes of the prompt, later also of the reply. Tokens
    behind `prompt_tokens` were decoded. `submitted` has the names of the nodes that the request has stored itself."""

    nodes: PromptNodes
    restored: RestoreResult
    state: StateKind
    prompt_tokens: int
    submitted: set[bytes] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._restorable = self.restored.stored_tokens
        """The last position at which a later request could continue."""

    def plan(self, selection: Selection, states_at: Collection[int]) -> Plan:
        """Returns the selected nodes that are not stored yet. `states_at`: the positions whose states are stored
        too."""
        aligned, num_blocks = selection.aligned, selection.aligned // self.nodes.block_size
        missing = self.missing(aligned, states_at)
        if selection.keep_tail:
            last = self.nodes.tail()
        elif self.state == "token" and aligned % self.nodes.block_size:
            last = self.nodes.partial_block(aligned)
        elif self.state in AT_CHECKPOINTS:
            if aligned in states_at:
                return Plan(missing, self.nodes.checkpoint(aligned).name, aligned)
            # The restored node may hold the states there: a checkpoint, or the tail of a shorter prompt.
            is_stored = self.restored.stored_tokens == aligned
            return Plan(missing, self.restored.last_node if is_stored else None, aligned)
        else:
            return Plan(missing, self.nodes.parent(num_blocks) if num_blocks else None, aligned)
        if (holder := self._holder(last)) is None:
            return Plan((*missing, last), last.name, last.end)
        # With state kind `token`, a longer node may replace the holder before this is written: it gets no entry.
        return Plan(missing, holder, last.end, has_entry=self.state != "token")

    def reply_stop(self, num_tokens: int, selection: Selection) -> int:
        """Returns up to which of the `num_tokens` tokens of prompt and reply state is saved; 0 if the reply is not. A
        reply is saved if the model is exact at every token: decoding then computes the same bits as a prefill. States
        exist at its end only."""
        limit = selection.scope.most
        stop = num_tokens if limit is None else min(limit, num_tokens)
        is_saved = self.state in AT_ANY_TOKEN and selection.saves_reply and stop > self.prompt_tokens
        return stop if is_saved and (stop == num_tokens or self.state == "token") else 0

    def plan_reply(self, nodes: PromptNodes, stop: int, selection: Selection, states_at: Collection[int]) -> Plan:
        """Returns the plan for the first `stop` tokens of a prompt and its reply, which have these `nodes`."""
        self.nodes = nodes
        return self.plan(replace(selection, aligned=stop, keep_tail=False), states_at)

    def missing(self, num_tokens: int, states_at: Collection[int]) -> tuple[Node, ...]:
        """Returns the missing blocks of the first `num_tokens` tokens, and behind each block the checkpoints that
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
            if node.kind == Kind.BLOCK or self.state not in AT_CHECKPOINTS:
                yield node.num_tokens
            else:
                # A preempted reply may have copied its states before the end that was saved.
                yield max(0, node.end - self._restorable)
                self._restorable = max(self._restorable, node.end)

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
        return node.name if node.end > last.end or node.kind in (Kind.TAIL, last.kind) else None


class Saver:
    """Has the state that one request computes written, if the policy selected it and the store lacks it.

    Methods are for the engine's thread and do not wait. They raise `CacheError`, and errors of missing memory. Call
    `begin` before the first step. Whoever made the saver finishes its `save`.

    A payload is a user of the pages that it lies in. States, which each step overwrites, are copied to pages of their
    own. Without memory for these pages, only the node with the states is lost.
    """

    def __init__(self, context: RequestContext, selection: Selection) -> None:
        self._context = context
        self._cache, self._prompt, self._options = context.cache, context.prompt, context.options
        self._writer = self._cache.writer
        self.save = Save(context.epoch)
        self.selection = selection
        token_ids, block_size = self._prompt.token_ids, self._cache.settings.block_size
        path = TokenPath(context.epoch.secret, context.namespace.root, token_ids, block_size)
        nodes = PromptNodes(path, self._cache.payload_layout)
        self.planner = Planner(nodes, RestoreResult(), self._cache.layout.state_kind, len(token_ids))
        self.is_stored = False
        """The selected part of the prompt is stored, or on its way."""
        self._anchors: tuple[int, ...] | None = None
        """See `Publication`."""
        self._states_at: set[int] = set()
        """The positions whose states are with the writer, or on their way."""
        self._logits: tuple[str, memoryview] | None = None
        """The id of the prompt's end and the logits there, until they are stored."""
        self._began_at = 0.0
        self._token_s: float | None = None
        """Seconds that computing a token takes, by earlier prompts, and then by this one. None until that is known."""

    def begin(self, restored: RestoreResult, selection: Selection | None = None) -> None:
        """Begins with the result of the fetch and the policy's selection, None if the policy is not asked."""
        self._began_at, self._token_s = time.perf_counter(), self._cache.cost_model.prefill_s_per_token
        self.planner = dataclasses.replace(self.planner, restored=restored)
        if selection is not None:
            self.selection = selection
            self._anchors = selection.anchors if self._cache.layout.states else None

    def after_step(self, sequence: KVSequence) -> None:
        """Queues the selected blocks that the prompt has completed. Takes a checkpoint if one is selected here: the
        next step overwrites the states."""
        if sequence.num_tokens in self.selection.checkpoints:
            self._states_at.add(sequence.num_tokens)
        num_tokens = min(sequence.num_tokens, self.selection.aligned)
        self._submit(sequence, Plan(self.planner.missing(num_tokens, self._states_at)))
        self.save_sliding_blocks(sequence)

    def save_sliding_blocks(self, sequence: KVSequence) -> None:
        """Queues complete blocks that will slide out of the memory of windows: without them, a later turn could save
        nothing."""
        if not sequence.slides(len(self._prompt.token_ids)):
            return
        missing = self.planner.missing(sequence.num_tokens, self._states_at)
        if missing and missing[0].position >= sequence.complete_from and self.may_save_unselected(sequence):
            self._submit(sequence, Plan(missing), min_ttl_s=_MIN_TTL_S)

    def note_computed(self, prefill_s: float) -> TokenPath | None:
        """Measures the prefill, and adds the prompt to those seen. Does not need the disk. Returns the prompt's path
        for `publish`, None if it is not one of those seen."""
        if num_computed := self._num_computed:
            self._token_s = prefill_s / num_computed
            self._cache.cost_model.record_prefill(num_computed, prefill_s)
        return self._remember_prompt()

    @property
    def _num_computed(self) -> int:
        """The tokens of the prompt that were not restored."""
        return len(self._prompt.token_ids) - self.planner.restored.num_tokens

    def publish(self, sequence: KVSequence, logits: Logits | None, seen: TokenPath | None) -> None:
        """Queues the rest of the prompt, with the entry, and the prompt as `seen`."""
        restored, selection = self.planner.restored, self.selection
        plan = Plan() if self.save.has_failed else self.planner.plan(selection, self._states_at)
        self.is_stored = plan.last_node is not None
        has_tail = bool(plan.nodes) and plan.nodes[-1].kind == Kind.TAIL
        assert logits is not None or not selection.keep_tail, "a prompt that goes on has no tail"
        self._submit(sequence, replace(plan, prompt=seen), logits=logits)
        has_tail |= restored.has_tail
        is_end_known = logits is not None and (has_tail or self._num_computed > 0)
        if self.planner.state == "token" and selection.keep_tail and logits is not None and is_end_known:
            self._logits = self.planner.nodes.end_id, sequence.logits_bytes(logits)
            if not has_tail:
                self._save_logits()
        if self._options.save:
            for name, ttl_s in marked_nodes(self.planner.nodes, self._prompt.marks, self._options.ttl_s):
                self._writer.touch(name, time.time(), ttl_s, hits=0)

    def publish_reply(self, sequence: KVSequence, nodes: PromptNodes) -> None:
        """Queues the selected part of the prompt and its reply, which have these `nodes`, unless the write budget has
        no room for it."""
        num_tokens, restored, spending = len(nodes.token_ids), self.planner.restored, self._context.spending
        if not (stop := self.planner.reply_stop(num_tokens, self.selection)):
            return
        if spending is not None:
            if not spending.allows_reply(num_tokens, restored.stored_tokens, is_asked=self._options.is_asked):
                return
            num_new = max(0, num_tokens - self.selection.kept)
            self._cache.spend(self._options.tenant, num_new * spending.bytes_per_token)
        if self._cache.layout.states:
            self._states_at.add(sequence.num_tokens)
        plan = self.planner.plan_reply(nodes, stop, self.selection, self._states_at)
        if plan.last_node is not None:
            self._submit(sequence, replace(plan, has_entry=True))
            # The reply takes the place of the tail.
            self._save_logits()

    def may_save_unselected(self, sequence: KVSequence) -> bool:
        """Returns whether state may be saved that the policy did not select."""
        spending = self._cache.spending()
        is_allowed = self._options.save and (spending is None or spending.is_ample)
        return is_allowed and self._context.allows_saving(sequence.num_tokens)

    def save_partial(self, sequence: KVSequence, nodes: PromptNodes, min_ttl_s: float = _MIN_TTL_S) -> None:
        """Queues all state that the sequence has and the store lacks. `nodes` are for the tokens in the sequence. The
        time to live of state that the policy did not select is at least `min_ttl_s`."""
        planner, num_tokens = self.planner, sequence.num_tokens
        if len(nodes.token_ids) > len(planner.nodes.token_ids):
            planner.nodes = nodes
        restored, is_block_end = planner.restored, num_tokens % nodes.block_size == 0
        has_more = num_tokens >= restored.num_tokens + LEAST_TOKENS
        if self._cache.layout.states and has_more and (is_block_end or planner.state in AT_ANY_TOKEN):
            self._states_at.add(num_tokens)
        self._submit(sequence, Plan(planner.missing(num_tokens, self._states_at)), min_ttl_s=min_ttl_s)
        if planner.state == "token" and not is_block_end and num_tokens > restored.stored_tokens:
            self._submit(sequence, Plan((planner.nodes.partial_block(num_tokens),)), min_ttl_s=min_ttl_s)

    def _submit(
        self, sequence: KVSequence, plan: Plan, *, logits: Logits | None = None, min_ttl_s: float = 0.0
    ) -> None:
        """Captures the nodes of a plan and queues them in batches, the last one with the plan's other records. A tail
        has `logits`."""
        planner, nodes, token_s = self.planner, plan.nodes, self._token_s
        if any(node.num_tokens and node.position < sequence.complete_from for node in nodes):
            self._writer.fail(self.save, "the state before it is no longer stored, and has left the windows in memory")
        if token_s is None:
            num_computed = sequence.num_tokens - planner.restored.num_tokens
            token_s = (time.perf_counter() - self._began_at) / num_computed if num_computed else 0.0
        batch, holds, num_bytes = list[NewNode](), list[Hold](), 0
        try:
            for node, saved_tokens in zip(nodes, planner.saved_tokens(nodes), strict=True):
                planner.submitted.add(node.name)
                if self.save.has_failed:
                    continue
                if num_bytes >= _BATCH_BYTES:
                    self._writer.add(self.save, self._publication(batch, Plan()), holds)
                    batch, holds, num_bytes = [], [], 0
                cuts = planner.nodes.cuts(node)
                payload = sequence.capture(node.position, cuts, logits if node.kind == Kind.TAIL else None)
                if payload is None:
                    self._writer.note_loss(self.save, "there is no KV memory for a copy of its states")
                    self._states_at.discard(node.end)
                    plan = replace(plan, last_node=None) if plan.last_node == node.name else plan
                    continue
                holds.append(payload)
                ttl_s, selection = self._context.ttl_at(node.end), self.selection
                selected = selection.checkpoints if node.kind == Kind.CHECKPOINT else range(selection.aligned + 1)
                if min_ttl_s and node.end not in selected:
                    ttl_s = max(ttl_s or 0.0, min_ttl_s)
                cost_s, replaces = token_s * saved_tokens, planner.state == "token"
                batch.append(planner.nodes.new_node(node, payload, prefill_s=cost_s, ttl_s=ttl_s, replaces=replaces))
                num_bytes += batch[-1].payload_bytes
            if batch or plan.last_node is not None or plan.prompt is not None:
                self._writer.add(self.save, self._publication(batch, plan), holds)
        except BaseException:
            for hold in holds:
                hold.release()
            self._writer.fail(self.save, "it could not be copied")
            raise

    def _publication(self, nodes: Sequence[NewNode], plan: Plan) -> Publication:
        last_node = None if self.save.has_failed else plan.last_node
        context, root = self._context, self._context.namespace.root
        entry = EntryRecord(
            root=root,
            num_tokens=plan.num_tokens,
            scope=str(self._options.scope),
            preview=self._prompt.text,
            created_at=time.time(),
            reason=self.selection.reason,
        )
        return Publication(
            epoch=context.epoch,
            root=root,
            root_record=context.namespace.record,
            nodes=tuple(nodes),
            last_node=last_node,
            entry=entry if last_node is not None and plan.has_entry else None,
            prompt=plan.prompt,
            prompt_group=self._options.group,
            prompt_ttl_s=context.ttl_at(len(self._prompt.token_ids)),
            ttl_s=context.ttl_at(plan.num_tokens),
            anchors=self._anchors,
            daemon_ttl_s=self._cache.settings.kv_cache_ttl,
        )

    def _save_logits(self) -> None:
        """Stores the logits at the prompt's end as a note."""
        if self._logits is None or self.save.has_failed:
            return
        (end_id, content), self._logits = self._logits, None
        token_ids = self._prompt.token_ids
        notes = self._context.notes(self._context.ttl_at(len(token_ids)))
        # Compressing them takes milliseconds, for which the engine's thread does not wait.
        self._cache.run_aside(partial(notes.put, NoteKind.LOGITS, end_id, bytes(content), token_ids))

    def _remember_prompt(self) -> TokenPath | None:
        """Adds the prompt to those seen and returns its path. Returns None if it is too short, only read, or lacks
        messages of its conversation."""
        path, token_ids = self.planner.nodes.path, self._prompt.token_ids
        is_too_short = len(token_ids) < self._cache.settings.kv_cache_min_tokens
        if is_too_short or not self._options.save or self.selection.reason == "left_out":
            return None
        now, lasts_s = self._cache.store.clock(), self._cache.lasts_s(self._context.ttl_at(len(token_ids)))
        self._context.namespace.remember(token_ids, self._options.group, path.block_names, now, lasts_s)
        return path
