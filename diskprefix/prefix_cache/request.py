"""One request's way through the cache: fetched, selected, published as it is computed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch

from diskprefix.cache_options import CacheOptions
from diskprefix.cache_report import CacheReport, MissReason, Saved
from diskprefix.errors import CacheError
from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import is_out_of_memory
from diskprefix.policy.breaks import Break
from diskprefix.policy.select import Selection
from diskprefix.prefix_cache.choosing import found_break, note_savings, selected, why_missed
from diskprefix.prefix_cache.namespaces import TenantNamespace
from diskprefix.prefix_cache.nodes import Node, PromptNodes
from diskprefix.prefix_cache.planning import Plan, Planner, Progress, marked_nodes
from diskprefix.prefix_cache.publish import Ending, Publisher, Wanted
from diskprefix.prefix_cache.resources import CacheResources
from diskprefix.prefix_cache.restore import Restoration, Restored
from diskprefix.prefix_cache.states import HeldStates
from diskprefix.prompt import Prompt
from diskprefix.store.schema import Kind
from diskprefix.tokens import TokenIds

log = logging.getLogger("diskprefix")


_LEAVE_S = 600.0
"""What a request leaves that was cancelled is kept for so long at least."""


@dataclass(kw_only=True, eq=False)
class CachedRequest:
    """One request's way through the cache. Call `close` when the request ends, however it ends.

    `goes_on`: the prompt ends at a grid point and is only a beginning.
    """

    cache: CacheResources
    namespace: TenantNamespace
    prompt: Prompt
    options: CacheOptions
    goes_on: bool = False

    def __post_init__(self) -> None:
        self._publisher = Publisher(
            cache=self.cache, namespace=self.namespace, prompt=self.prompt, options=self.options
        )
        num_tokens = len(self.prompt.token_ids)
        nodes = self._publisher.nodes_of(self.prompt.token_ids)
        self.planner = Planner(nodes, Progress(), self.cache.layout.state_kind, num_tokens)
        self._bypass: Literal["media", "unsupported", "off"] | None = None
        if self.prompt.media:
            self._bypass = "media"
        elif self.cache.layout.unsupported or self.options.scope.kind == "off":
            self._bypass = "unsupported" if self.cache.layout.unsupported else "off"
        self.selection = Selection(scope=self.options.scope, prompt_tokens=num_tokens, reason=self._bypass or "off")
        """What is kept; known once `choose` was called."""
        self.is_published = False
        """Whether the prompt was computed to its end and could be kept, were there a scope and a store for it."""
        self.reply = self.prompt.token_ids[:0]
        """What of the reply was run through the model; known once `publish_reply` was called."""
        self.restored = Restored()
        """What `fetch` found, and how long it took."""
        self._states = HeldStates(self.cache.writer, self.cache.layout, leaving=self._publisher.batch_bytes)
        self._num_blocks = 0
        """Blocks of the prompt that need not be looked at again: they are stored or with the publisher."""
        self._saved: Saved = "none"
        self._miss_reason: MissReason | None = self._bypass
        self._broken: Break | None = None
        self._chosen_at = 0.0
        self._token_s: float | None = None
        """How long computing a token took, in seconds, once that is known."""

    def on_written(self, call: Callable[[float, float, int], None]) -> None:
        """Has `call` called, in the writer's thread, for each part of it that is written: began and ended on the clock
        of `time.perf_counter`, bytes."""
        self._publisher.chain.on_written = call

    def restore(self, arena: KVArena) -> Restored:
        """`fetch`, then `choose`."""
        self.fetch(arena)
        self.choose(arena)
        return self.restored

    def fetch(self, arena: KVArena, have: int = 0, logits: torch.Tensor | None = None) -> None:
        """Copy the longest restorable prefix into the arena, which has room for the prompt; of a miss, nothing.

        The arena's first `have` tokens are the prompt's already, with their exact state, and only what lies behind them
        is loaded. `logits` are the next-token logits at the prompt's end (shape [vocab]); they must be given if the
        arena has the whole prompt, unless that goes on. Captures of the arena must be over, unless they read those
        tokens only.

        For one thread, which may be another one than the engine's: of what requests share, it changes only what has a
        lock of its own (the writer's queues, the pins, the counters), and the count of restores that were not worth it.
        """
        num_tokens = len(self.prompt.token_ids)
        assert have < num_tokens or logits is not None or self.goes_on, "there must be something to sample from"
        arena.truncate(have)
        self.restored = held = _held(have, logits)
        if self._bypass is None:
            restoration = self._restoration()
            self._miss_reason = "error"
            with self._guarded("nothing is restored"):
                self.restored = restoration.run(arena, have, logits)
                self._miss_reason = None
            if self.restored is held and restoration.kept < have:
                self.restored = _held(0, None)
            arena.truncate(self.restored.num_tokens)

    def choose(self, arena: KVArena | None) -> None:
        """Select what to save, and count what `fetch` found. For the engine thread, before the first step. The arena is
        None for a model that computes in memory of its own."""
        restored = self.restored
        self._chosen_at = time.perf_counter()
        if restored.tip is not None:
            ttl_s = self._publisher.ttl_at(restored.stored_tokens)
            self.cache.writer.touch(restored.tip, time.time(), ttl_s)
        if restored.source == "disk":
            self.cache.cost_model.note_restore(restored.num_bytes, restored.restore_ms / 1e3)
        # What memory alone has is not stored.
        self.planner = replace(self.planner, progress=replace(restored, num_tokens=restored.stored_tokens))
        if self._bypass is None:
            nodes, options = self.planner.nodes, self.options
            self.selection = selected(
                self.cache, self.namespace, self.prompt, options, nodes, restored, goes_on=self.goes_on
            )
            self._publisher.reason = self.selection.reason
            self._broken = found_break(self.namespace, self.prompt, options, restored, self.selection)
        if restored.num_tokens:
            self._miss_reason = None
        elif self._miss_reason is None:
            self._miss_reason = why_missed(self.cache, self.prompt, restored, self.selection)
        if arena is not None:
            with self._guarded("not all of the prompt is saved"):
                self._publish_what_slides(arena)

    def after_step(self, arena: KVArena) -> None:
        """Have the blocks that the prefill has completed and that are wanted captured and written. Take a checkpoint if
        one is wanted here: the next step overwrites the states."""
        if self._bypass is not None or self._is_given_up():
            return
        self.cache.writer.hold()
        with self._guarded("not all of the prompt is saved"):
            self._states.reserve(self._last_states_bytes(arena.num_tokens))
            if arena.num_tokens in self.selection.checkpoints:
                self._take_states(arena)
            num_tokens = min(arena.num_tokens, self.selection.aligned)
            self._publish_blocks(arena, num_tokens // self.planner.nodes.block_size)
            self._publish_what_slides(arena)

    def publish(self, arena: KVArena, logits: torch.Tensor | None, prefill_s: float) -> None:
        """Have captured and written what is left of what the policy wants, with the entry and the history.

        `logits` are the next-token logits at the prompt's end, shape [vocab], as the model gave them (None if it goes
        on, and was restored); where they are not finite, nothing more is saved. `prefill_s` is how long computing what
        was not restored took, in seconds. Until `KVArena.settle`, the arena may grow but must not be changed before the
        prompt's end.
        """
        self.cache.writer.go_on()
        self.is_published = not self.prompt.media
        if self._bypass is not None:
            return
        assert arena.num_tokens == len(self.prompt.token_ids), "state length must equal key length"
        self._saved = "dropped"
        if self.cache.store.problem is not None:
            # Which is logged once, not for every prompt.
            self._publisher.give_up(None)
            return
        if logits is not None and not logits.max().isfinite():
            self._publisher.note_loss("its next-token logits are not finite")
            return
        with self._guarded("the prompt is not saved"):
            self._saved = self._publish(arena, logits, prefill_s)

    def after_decode(self, arena: KVArena) -> None:
        """Remember the states if the reply has just completed a block, in case that its blocks are kept."""
        at_end_of_block = arena.num_tokens % self.planner.nodes.block_size == 0
        if not self._keeps_reply or not at_end_of_block or self.cache.layout.is_sliceable or self._is_given_up():
            return
        with self._guarded("no checkpoint of the reply is taken"):
            # Only those at the end of the last block that is complete are needed.
            self._states.release()
            self._take_states(arena)

    def publish_reply(self, arena: KVArena, token_ids: TokenIds) -> None:
        """Have captured and written what the policy wants of the reply.

        `token_ids` are the prompt and what of the reply is in the arena. Where prompts restore to the token, decoding
        computes what a prefill computes, and the reply is kept with its prompt.

        Elsewhere the blocks that decoding completed are kept if the request reuses replies. They are marked as
        generated: computed token by token, they are not what a prefill computes bit for bit. What they continue is
        stored with them, also where the scope keeps less of the prompt.
        """
        assert arena.num_tokens == len(token_ids), "state length must equal key length"
        self.reply = token_ids[len(self.prompt.token_ids) :]
        if self._bypass is not None or self._is_given_up():
            return
        nodes = self._publisher.nodes_of(token_ids)
        if self.cache.layout.state_kind == "token":
            with self._guarded("the reply is not saved"):
                self._publish_exact_reply(arena, nodes)
        elif self._keeps_reply:
            self._publish_generated(arena, nodes)

    def _publish_exact_reply(self, arena: KVArena, nodes: PromptNodes) -> None:
        plan = self.planner.plan_reply(nodes, self.selection)
        if plan.tip is not None:
            self._submit(arena, self._wanted(arena, plan.nodes), Ending(plan.tip, plan.num_tokens))
            self._saved = "queued"

    def _publish_generated(self, arena: KVArena, nodes: PromptNodes) -> None:
        is_too_short = nodes.num_blocks * nodes.block_size < self.cache.settings.kv_cache_min_tokens
        if is_too_short or nodes.num_blocks == self.planner.nodes.num_blocks:
            return
        self.planner.nodes = nodes
        with self._guarded("the reply is not saved"):
            missing, _ = self.planner.missing(nodes.num_blocks, self._states.positions)
            if missing:
                self._submit(arena, self._wanted(arena, missing), Ending(missing[-1].name, missing[-1].end))
                self._saved = "queued"

    def leave(self, arena: KVArena) -> None:
        """Have what the prefill computed so far captured and written, because the request is cancelled: the same prompt
        goes on from there when it comes again.

        What the policy would not keep is kept for ten minutes at least. With the scope `off`, and by a request that
        only restores, nothing is left.
        """
        nodes, layout = self.planner.nodes, self.cache.layout
        if not self._may_leave(arena):
            return
        with self._guarded("what was computed is not kept"):
            is_at_end_of_block = arena.num_tokens % nodes.block_size == 0
            if layout.states and is_at_end_of_block and arena.num_tokens > self.restored.num_tokens:
                self._take_states(arena)
            self._publish_blocks(arena, arena.num_tokens // nodes.block_size, least_s=_LEAVE_S)
            if layout.state_kind == "token" and not is_at_end_of_block:
                self._leave_partial_block(arena)
            if self._publisher.has_published:
                self._saved = "queued"

    def close(self) -> CacheReport:
        """Release what the request held, count it, and say what happened."""
        self._states.close()
        self._publisher.close()
        restored = self.restored
        if restored.num_tokens:
            self.cache.counters["hits"] += 1
            self.cache.hits_by_tier[restored.source] += 1
            self.cache.counters["restored_tokens"] += restored.num_tokens
            self.cache.counters["restored_bytes"] += restored.num_bytes
        elif self._miss_reason is not None:
            self.cache.misses[self._miss_reason] += 1
        if self._bypass is None and self.cache.has_own_threads:
            # What is kept beside another model's state was no request of its own.
            note_savings(self.cache, self.namespace, self.prompt, restored)
        report = CacheReport(
            selection=self.selection,
            restored=restored.num_tokens,
            source=restored.source,
            miss_reason=self._miss_reason,
            matched=restored.matched,
            refused=restored.refused,
            exact=restored.exact,
            restore_ms=restored.restore_ms,
            saved=self._saved if self._publisher.chain.is_whole else "dropped",
            broken=self._broken,
            broken_line=self.prompt.source.line_at(self._broken.at) if self._broken and self.prompt.source else "",
            rewriting=self.prompt.rewriting,
            replayed=self.prompt.replayed,
        )
        log.debug("%s", report.log_line())
        return report

    @property
    def _keeps_reply(self) -> bool:
        options, layout = self.options, self.cache.layout
        is_wanted = options.reuse_generated and options.save and self.selection.reason != "faster_to_compute"
        return is_wanted and self._bypass is None and layout.state_kind not in ("token", "one_pass")

    @contextmanager
    def _guarded(self, consequence: str) -> Iterator[None]:
        """The one place that turns what goes wrong with the cache into a request without it."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, CacheError) and not is_out_of_memory(error):
                raise
            self.cache.count("errors")
            log.warning("[disk-cache] going on without the cache, %s: %s", consequence, error or type(error).__name__)

    def _restoration(self) -> Restoration:
        cache = self.cache
        return Restoration(
            self.planner.nodes,
            cache.layout,
            cache.store,
            cache.writer,
            cache.readers,
            self._publisher.pins,
            allows=cache.cost_model.allows,
            pays=cache.cost_model.pays,
            reuse_generated=self.options.reuse_generated,
            needs_logits=not self.goes_on,
        )

    def _publish(self, arena: KVArena, logits: torch.Tensor | None, prefill_s: float) -> Saved:
        computed = len(self.prompt.token_ids) - self.restored.num_tokens
        if computed:
            self._token_s = prefill_s / computed
            self.cache.cost_model.note_prefill(computed, prefill_s)
        plan = Plan() if self._is_given_up() else self.planner.plan(self.selection, self._states.positions)
        parts: tuple[memoryview, ...] | None = ()
        if plan.nodes and plan.nodes[-1].kind == Kind.TAIL:
            assert logits is not None, "a prompt that goes on has no tail"
            parts = self._states.tail(arena, logits)
        if parts is None:
            self._publisher.note_loss("the write buffer had no room for its end; raise --kv-cache-write-buffer")
            plan = Plan(plan.nodes[:-1])
        wanted = self._wanted(arena, plan.nodes, parts or ())
        prompt = self._remembered()
        if plan.tip is not None or prompt is not None or wanted:
            self._submit(arena, wanted, Ending(plan.tip, plan.num_tokens, prompt, plan.has_entry))
        if self.options.save:
            for name, ttl_s in marked_nodes(self.planner.nodes, self.prompt.marks, self.options.ttl_s):
                self.cache.writer.touch(name, time.time(), ttl_s, hits=0)
        if self._publisher.has_published:
            return "queued"
        return "none" if plan.tip is None else "stored"

    def _publish_blocks(self, arena: KVArena, num_blocks: int, least_s: float = 0.0) -> None:
        """The first `num_blocks` blocks of the prompt, with the checkpoints that were taken, as far as they are not
        published yet."""
        if num_blocks > self._num_blocks or self._states.num_held:
            self._num_blocks = num_blocks
            missing, _ = self.planner.missing(num_blocks, self._states.positions)
            if missing:
                self._submit(arena, self._wanted(arena, missing, least_s=least_s))

    def _publish_what_slides(self, arena: KVArena) -> None:
        """Have the complete blocks written that will slide out of the memory of windows. A later turn may want them,
        and could not save anything that continues them. What the policy does not want is kept for ten minutes."""
        num_blocks = arena.num_tokens // self.planner.nodes.block_size
        if num_blocks <= self._num_blocks or not arena.slides(len(self.prompt.token_ids)) or not self._may_leave(arena):
            return
        missing, _ = self.planner.missing(num_blocks, ())
        if missing and missing[0].position >= arena.complete_from:
            self._publish_blocks(arena, num_blocks, least_s=_LEAVE_S)

    def _may_leave(self, arena: KVArena) -> bool:
        """Whether what was computed may be kept though the policy does not want it."""
        if self._bypass is not None or not self.options.save or self.cache.layout.is_one_pass or self._is_given_up():
            return False
        return self.cache.cost_model.allows(arena.num_tokens, use="save")

    def _leave_partial_block(self, arena: KVArena) -> None:
        """The tokens behind the last whole block, unless as many are stored."""
        nodes, end = self.planner.nodes, arena.num_tokens
        if end > self.restored.stored_tokens:
            _, block = self.planner.missing(end // nodes.block_size, self._states.positions)
            partial = nodes.partial_block(block.name if block else nodes.root, end)
            self._submit(arena, self._wanted(arena, [partial], least_s=_LEAVE_S))

    def _submit(self, arena: KVArena, wanted: list[Wanted], ending: Ending | None = None) -> None:
        self.planner.submitted.update(want.node.name for want in wanted)
        self._publisher.publish(arena, self.planner.nodes, wanted, ending)

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
        ttl_s = self._publisher.ttl_at(node.end)
        kept = self.selection.checkpoints if node.kind == Kind.CHECKPOINT else range(self.selection.aligned + 1)
        return ttl_s if not least_s or node.end in kept else max(ttl_s or 0.0, least_s)

    def _seconds_per_token(self, arena: KVArena) -> float:
        """How long computing a token of the prompt takes: as measured, or while that is not over, as of the prompts
        before, or as of its own beginning."""
        if self._token_s is not None:
            return self._token_s
        if (usual := self.cache.cost_model.prefill_s_per_token) is not None:
            return usual
        computed = arena.num_tokens - self.restored.num_tokens
        return (time.perf_counter() - self._chosen_at) / computed if computed else 0.0

    def _take_states(self, arena: KVArena) -> None:
        if not self._states.take(arena, is_last=arena.num_tokens == self.selection.aligned):
            self._publisher.note_loss("the write buffer had no room for a checkpoint; raise --kv-cache-write-buffer")

    def _last_states_bytes(self, num_tokens: int) -> int:
        """The room that the last copies need that are to be made of what is wanted, once `num_tokens` are computed. A
        prompt is of no use without them where states cannot be cut."""
        layout, selection = self.cache.layout, self.selection
        is_last_ahead = bool(selection.checkpoints) and selection.checkpoints[-1] >= num_tokens
        checkpoint = layout.state_bytes if is_last_ahead else 0
        return checkpoint + (layout.state_bytes + layout.logits_bytes if selection.keep_tail else 0)

    def _is_given_up(self) -> bool:
        return self.cache.store.problem is not None or self._publisher.chain.is_broken()

    def _remembered(self) -> TokenIds | None:
        """The prompt, added to the history; None when it is too short to be worth a place in the window, is only to be
        read for, or lacks messages of its conversation."""
        token_ids = self.prompt.token_ids
        is_too_short = len(token_ids) < self.cache.settings.kv_cache_min_tokens
        if is_too_short or not self.options.save or self.selection.reason == "left_out":
            return None
        self.namespace.history.add(token_ids, self.options.group)
        self.namespace.admission.add(token_ids, self.planner.nodes.block_names, self.planner.nodes.block_size)
        return token_ids


def _held(have: int, logits: torch.Tensor | None) -> Restored:
    """What is in an arena that has the first `have` tokens, if nothing is loaded."""
    return Restored(num_tokens=have, logits=logits, matched=have, source="memory" if have else "none")
