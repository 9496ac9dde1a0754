"""What one request saves of what it computes: which nodes, when, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from diskprefix.cache.namespaces import TenantNamespace
from diskprefix.cache.planning import Plan, Planner, Progress, marked_nodes
from diskprefix.cache.publish import Ending, Publisher, Wanted
from diskprefix.cache.resources import CacheResources
from diskprefix.cache.restore import Restored
from diskprefix.cache.states import HeldStates
from diskprefix.cache.tiers.nodes import Node, PromptNodes
from diskprefix.kv.arena import KVArena
from diskprefix.kv.capturer import Capture
from diskprefix.nouns import CacheOptions, Prompt, Selection
from diskprefix.store.note_record import NoteKind
from diskprefix.store.schema import Kind
from diskprefix.tokens import TokenIds

_LEAVE_S = 600.0
"""What a request leaves that was cancelled is kept for so long at least."""


@dataclass(kw_only=True, eq=False)
class Saver:
    """Has what one request computes captured and written, as far as `selection` wants it and it is not stored.

    `selection` is set before the first step. Methods are for the engine thread. They raise `CacheError`, and what a
    lack of memory raises. Call `close` in the end, and close the publisher.
    """

    cache: CacheResources
    namespace: TenantNamespace
    prompt: Prompt
    options: CacheOptions
    selection: Selection

    def __post_init__(self) -> None:
        self.publisher = Publisher(cache=self.cache, namespace=self.namespace, prompt=self.prompt, options=self.options)
        nodes = self.publisher.nodes_of(self.prompt.token_ids)
        self.planner = Planner(nodes, Progress(), self.cache.layout.state_kind, len(self.prompt.token_ids))
        self._states = HeldStates(self.cache.writer, self.cache.layout, leaving=self.publisher.batch_bytes)
        self._num_blocks = 0
        """Blocks of the prompt that need not be looked at again: they are stored or with the publisher."""
        self._num_restored = 0
        self._has_tail = False
        self._logits: tuple[str, memoryview] | None = None
        """Of the end of the prompt, with what names it, until they are stored."""
        self._began_at = 0.0
        self._token_s: float | None = None
        """How long computing a token took, in seconds, once that is known."""

    def begin(self, restored: Restored) -> None:
        """Note what is stored, and where the request begins to compute."""
        self._began_at, self._num_restored = time.perf_counter(), restored.num_tokens
        self._has_tail = restored.has_tail
        # What memory alone has is not stored.
        self.planner = replace(self.planner, progress=replace(restored, num_tokens=restored.stored_tokens))

    @property
    def is_given_up(self) -> bool:
        """Whether nothing more is written: the store fails, or what would be continued is lost."""
        return self.cache.store.problem is not None or self.publisher.chain.is_broken()

    @property
    def keeps_generated(self) -> bool:
        """Whether the blocks of the reply are kept where decoding does not compute what a prefill computes."""
        options, layout = self.options, self.cache.layout
        is_wanted = options.reuse_generated and options.save and self.selection.reason != "faster_to_compute"
        return is_wanted and layout.state_kind not in ("token", "one_pass")

    def after_step(self, arena: KVArena) -> None:
        """Publish the blocks that the prefill has completed. Take a checkpoint if one is wanted here: the next step
        overwrites the states."""
        self._states.reserve(self._last_states_bytes(arena.num_tokens))
        if arena.num_tokens in self.selection.checkpoints:
            self._take_states(arena)
        num_tokens = min(arena.num_tokens, self.selection.aligned)
        self._publish_blocks(arena, num_tokens // self.planner.nodes.block_size)
        self.publish_what_slides(arena)

    def publish_what_slides(self, arena: KVArena) -> None:
        """Have the complete blocks written that will slide out of the memory of windows. A later turn may want them,
        and could not save anything that continues them. What the policy does not want is kept for ten minutes."""
        num_blocks = arena.num_tokens // self.planner.nodes.block_size
        if num_blocks <= self._num_blocks or not arena.slides(len(self.prompt.token_ids)) or not self.may_leave(arena):
            return
        missing, _ = self.planner.missing(num_blocks, ())
        if missing and missing[0].position >= arena.complete_from:
            self._publish_blocks(arena, num_blocks, least_s=_LEAVE_S)

    def publish(self, arena: KVArena, logits: torch.Tensor | None, prefill_s: float) -> Plan:
        """Publish what is left of the prompt, with the entry and the history. Returns what was still to be stored."""
        computed = len(self.prompt.token_ids) - self._num_restored
        if computed:
            self._token_s = prefill_s / computed
            self.cache.cost_model.note_prefill(computed, prefill_s)
        plan = Plan() if self.is_given_up else self.planner.plan(self.selection, self._states.positions)
        parts: tuple[memoryview, ...] | None = ()
        if plan.nodes and plan.nodes[-1].kind == Kind.TAIL:
            assert logits is not None, "a prompt that goes on has no tail"
            parts = self._states.tail(arena, logits)
        if parts is None:
            self.publisher.note_loss("the write buffer had no room for its end; raise --kv-cache-write-buffer")
            plan = Plan(plan.nodes[:-1])
        elif logits is not None and self.selection.keep_tail and self.cache.layout.state_kind == "token":
            self._remember_logits(arena, logits, is_in_tail=self._has_tail or bool(parts), is_new=computed > 0)
        wanted = self._wanted(arena, plan.nodes, parts or ())
        prompt = self._remembered()
        if plan.tip is not None or prompt is not None or wanted:
            self._submit(arena, wanted, Ending(plan.tip, plan.num_tokens, prompt, plan.has_entry))
        if self.options.save:
            for name, ttl_s in marked_nodes(self.planner.nodes, self.prompt.marks, self.options.ttl_s):
                self.cache.writer.touch(name, time.time(), ttl_s, hits=0)
        return plan

    def keep_last_states(self, arena: KVArena) -> None:
        """Remember the states at the end of the last block that the reply has completed, and no others."""
        self._states.release()
        self._take_states(arena)

    def publish_exact_reply(self, arena: KVArena, nodes: PromptNodes) -> bool:
        """Publish what the policy wants of the prompt and its reply, whose `nodes` these are, where decoding computes
        what a prefill computes. Returns whether it wants anything of the reply."""
        plan = self.planner.plan_reply(nodes, self.selection)
        if plan.tip is not None:
            self._submit(arena, self._wanted(arena, plan.nodes), Ending(plan.tip, plan.num_tokens))
            # The reply takes the place of the tail.
            self._keep_logits(arena)
        return plan.tip is not None

    def publish_generated(self, arena: KVArena, nodes: PromptNodes) -> bool:
        """Publish the blocks of the prompt and its reply, whose `nodes` these are, with those that decoding completed
        marked as generated. Returns whether any were missing."""
        is_too_short = nodes.num_blocks * nodes.block_size < self.cache.settings.kv_cache_min_tokens
        if is_too_short or nodes.num_blocks == self.planner.nodes.num_blocks:
            return False
        self.planner.nodes = nodes
        missing, _ = self.planner.missing(nodes.num_blocks, self._states.positions)
        if missing:
            self._submit(arena, self._wanted(arena, missing), Ending(missing[-1].name, missing[-1].end))
        return bool(missing)

    def may_leave(self, arena: KVArena) -> bool:
        """Whether what was computed may be kept though the policy does not want it."""
        if not self.options.save or self.cache.layout.is_one_pass or self.is_given_up:
            return False
        return self.cache.cost_model.allows(arena.num_tokens, use="save")

    def leave(self, arena: KVArena, restored: Restored) -> None:
        """Publish what the prefill of a cancelled request has computed behind what was `restored`."""
        nodes, layout = self.planner.nodes, self.cache.layout
        is_at_end_of_block = arena.num_tokens % nodes.block_size == 0
        if layout.states and is_at_end_of_block and arena.num_tokens > restored.num_tokens:
            self._take_states(arena)
        self._publish_blocks(arena, arena.num_tokens // nodes.block_size, least_s=_LEAVE_S)
        if layout.state_kind == "token" and not is_at_end_of_block and arena.num_tokens > restored.stored_tokens:
            self._leave_partial_block(arena)

    def close(self) -> None:
        """Release the states that were not published."""
        self._states.close()

    def _publish_blocks(self, arena: KVArena, num_blocks: int, least_s: float = 0.0) -> None:
        """The first `num_blocks` blocks of the prompt, with the checkpoints that were taken, as far as they are not
        published yet."""
        if num_blocks > self._num_blocks or self._states.num_held:
            self._num_blocks = num_blocks
            missing, _ = self.planner.missing(num_blocks, self._states.positions)
            if missing:
                self._submit(arena, self._wanted(arena, missing, least_s=least_s))

    def _leave_partial_block(self, arena: KVArena) -> None:
        """The tokens behind the last whole block."""
        nodes, end = self.planner.nodes, arena.num_tokens
        _, block = self.planner.missing(end // nodes.block_size, self._states.positions)
        partial = nodes.partial_block(block.name if block else nodes.root, end)
        self._submit(arena, self._wanted(arena, [partial], least_s=_LEAVE_S))

    def _remember_logits(self, arena: KVArena, logits: torch.Tensor, *, is_in_tail: bool, is_new: bool) -> None:
        """Note the logits for when the tail that has them is replaced; if there is none, they are kept now."""
        if is_in_tail or is_new:
            self._logits = self.planner.nodes.end_id, arena.logits_bytes(logits)
        if not is_in_tail:
            self._keep_logits(arena)

    def _keep_logits(self, arena: KVArena) -> None:
        if self._logits is None or self.is_given_up:
            return
        (end_id, content), self._logits = self._logits, None
        ttl_s = self.publisher.ttl_at(len(self.prompt.token_ids))
        notes = self.cache.notes_of(self.namespace.root, self.namespace.record, ttl_s)

        def keep() -> None:
            notes.put(NoteKind.LOGITS, end_id, bytes(content), self.prompt.token_ids)

        # Compressing them takes milliseconds, for which the engine's thread does not wait.
        self.cache.capturer.submit(Capture(arena, 0, keep, drop=_nothing))

    def _submit(self, arena: KVArena, wanted: list[Wanted], ending: Ending | None = None) -> None:
        self.planner.submitted.update(want.node.name for want in wanted)
        self.publisher.publish(arena, self.planner.nodes, wanted, ending)

    def _wanted(
        self, arena: KVArena, nodes: Sequence[Node], tail: tuple[memoryview, ...] = (), *, least_s: float = 0.0
    ) -> list[Wanted]:
        """`nodes` with what they cost. `tail` are the copied parts of a tail. What the policy would not keep is kept
        for `least_s` seconds at least."""
        token_s = self._seconds_per_token(arena)
        wanted: list[Wanted] = []
        for node, saved_tokens in zip(nodes, self.planner.saved_tokens(nodes), strict=True):
            parts: tuple[memoryview, ...] = ()
            if node.kind == Kind.CHECKPOINT:
                parts = (self._states.pop(node.position),)
            elif node.kind == Kind.TAIL:
                parts = tail
            ttl_s, is_expected = self._ttl_s(node, least_s), self.selection.continues
            wanted.append(Wanted(node, parts, token_s * saved_tokens, ttl_s, is_expected))
        return wanted

    def _ttl_s(self, node: Node, least_s: float) -> float | None:
        ttl_s = self.publisher.ttl_at(node.end)
        kept = self.selection.checkpoints if node.kind == Kind.CHECKPOINT else range(self.selection.aligned + 1)
        return ttl_s if not least_s or node.end in kept else max(ttl_s or 0.0, least_s)

    def _seconds_per_token(self, arena: KVArena) -> float:
        """How long computing a token of the prompt takes: as measured, or while that is not over, as of the prompts
        before, or as of its own beginning."""
        if self._token_s is not None:
            return self._token_s
        if (usual := self.cache.cost_model.prefill_s_per_token) is not None:
            return usual
        computed = arena.num_tokens - self._num_restored
        return (time.perf_counter() - self._began_at) / computed if computed else 0.0

    def _take_states(self, arena: KVArena) -> None:
        if not self._states.take(arena, is_last=arena.num_tokens == self.selection.aligned):
            self.publisher.note_loss("the write buffer had no room for a checkpoint; raise --kv-cache-write-buffer")

    def _last_states_bytes(self, num_tokens: int) -> int:
        """The room that the last copies need that are to be made of what is wanted, once `num_tokens` are computed. A
        prompt is of no use without them where states cannot be cut."""
        layout, selection = self.cache.layout, self.selection
        is_last_ahead = bool(selection.checkpoints) and selection.checkpoints[-1] >= num_tokens
        checkpoint = layout.state_bytes if is_last_ahead else 0
        return checkpoint + (layout.state_bytes + layout.logits_bytes if selection.keep_tail else 0)

    def _remembered(self) -> TokenIds | None:
        """The prompt, added to the history; None when it is too short to be worth a place in the window, is only to be
        read for, or lacks messages of its conversation."""
        token_ids = self.prompt.token_ids
        is_too_short = len(token_ids) < self.cache.settings.kv_cache_min_tokens
        if is_too_short or not self.options.save or self.selection.reason == "left_out":
            return None
        expires_at = self.cache.prompt_expires_at(self.publisher.ttl_at(len(token_ids)))
        self.namespace.remember(token_ids, self.options.group, self.planner.nodes.block_names, expires_at)
        return token_ids


def _nothing() -> None:
    pass
