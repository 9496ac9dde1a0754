"""One request's way through the cache: selected, restored, captured, published."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Literal

import torch

from diskprefix.cache_report import CacheReport, MissReason, Saved
from diskprefix.errors import CacheError
from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import is_out_of_memory
from diskprefix.policy.admission import Sighting
from diskprefix.policy.scope import DEFAULT_WINDOW
from diskprefix.policy.select import Selection, select
from diskprefix.prefix_cache.planning import Plan, marked_nodes, ttl_at
from diskprefix.prefix_cache.publish import Publisher
from diskprefix.prefix_cache.restore import Restoration, Restored
from diskprefix.tokens import TokenIds

log = logging.getLogger("diskprefix")


class CachedRequest(Publisher):
    """One request's way through the cache. Call `close` when the request ends, however it ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._bypass: Literal["media", "unsupported", "off"] | None = None
        if self.prompt.media:
            self._bypass = "media"
        elif self.cache.layout.unsupported or self.options.scope.kind == "off":
            self._bypass = "unsupported" if self.cache.layout.unsupported else "off"
        self.selection = Selection(
            scope=self.options.scope, prompt_tokens=len(self.prompt.token_ids), reason=self._bypass or "off"
        )
        """What is kept; known once `choose` was called."""
        self.is_published = False
        """Whether the prompt was computed to its end and could be kept, were there a scope and a store for it."""
        self.restored = Restored()
        """What `fetch` found, and how long it took."""
        self._states: dict[int, memoryview] = {}
        """Copies of the states by the position that they were taken at, for checkpoints."""
        self._saved: Saved = "none"
        self._miss_reason: MissReason | None = self._bypass
        self._pins = ExitStack()
        """What is to be unpinned."""

    def restore(self, arena: KVArena) -> Restored:
        """`fetch`, then `choose`."""
        self.fetch(arena)
        self.choose()
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

    def choose(self) -> None:
        """Select what to save, and count what `fetch` found. For the engine thread."""
        restored = self.restored
        if restored.tip is not None:
            ttl_s = ttl_at(restored.stored_tokens, self.prompt.marks, self.options.ttl_s)
            self.cache.writer.touch(restored.tip, time.time(), ttl_s)
        if restored.source == "disk":
            self.cache.cost_model.note_restore(restored.num_bytes, restored.restore_ms / 1e3)
        # What memory alone has is not stored.
        self.planner = replace(self.planner, progress=replace(restored, num_tokens=restored.stored_tokens))
        self.selection = self._select()
        if restored.num_tokens:
            self._miss_reason = None
        elif self._miss_reason is None:
            self._miss_reason = self._explain_miss()

    def leave(self, arena: KVArena) -> None:
        pass

    def after_step(self, arena: KVArena) -> None:
        """Take a checkpoint if one is wanted where the prefill has come to: its next step overwrites the states."""
        if self._bypass is not None or arena.num_tokens not in self.selection.checkpoints:
            return
        # One more copy of the states must fit what may wait to be written.
        num_bytes = (len(self._states) + 1) * self.cache.layout.state_bytes
        if self.cache.store.problem is None and num_bytes <= self.cache.writer.room_bytes:
            with self._guarded("no checkpoint is taken"):
                self._states[arena.num_tokens] = arena.read_states()

    def publish(self, arena: KVArena, logits: torch.Tensor | None, prefill_s: float) -> None:
        """Have captured and written what the policy wants, with the entry and the history; waits for no disk.

        `logits` are the next-token logits at the prompt's end, shape [vocab], as the model gave them (None if it goes
        on, and was restored); nothing is saved where they are not finite. `prefill_s` is how long computing what was
        not restored took, in seconds. Until the next `begin` the arena may grow but must not be changed before the
        prompt's end.
        """
        self.is_published = not self.prompt.media
        if self._bypass is not None:
            return
        assert arena.num_tokens == len(self.prompt.token_ids), "state length must equal key length"
        self._saved = "dropped"
        if self.cache.store.problem is not None:
            self.cache.count("refused")
            return
        if logits is not None and not logits.max().isfinite():
            self.cache.count("refused")
            log.warning("[disk-cache] the prompt is not saved: its next-token logits are not finite")
            return
        with self._guarded("the prompt is not saved"):
            self._saved = self._publish(arena, logits, prefill_s)

    def _publish(self, arena: KVArena, logits: torch.Tensor | None, prefill_s: float) -> Saved:
        computed = len(self.prompt.token_ids) - self.restored.num_tokens
        self.token_s = prefill_s / computed if computed else 0.0
        if computed:
            self.cache.cost_model.note_prefill(computed, prefill_s)
        wanted = self.planner.plan(self.selection, self._states)
        plan = self.fit(wanted)
        prompt = self._remembered()
        if plan.tip is not None or prompt is not None or plan.nodes:
            self.submit(arena, logits, plan, self._states, self._pins, prompt=prompt)
        if self.options.save:
            for name, ttl_s in marked_nodes(self.planner.nodes, self.prompt.marks, self.options.ttl_s):
                self.cache.writer.touch(name, time.time(), ttl_s, hits=0)
        if plan.nodes:
            return "queued"
        return "dropped" if wanted.nodes else "stored" if wanted.tip is not None else "none"

    def after_decode(self, arena: KVArena) -> None:
        """Remember the states if the reply has just completed a block, in case that its blocks are kept."""
        at_end_of_block = arena.num_tokens % self.planner.nodes.block_size == 0
        if not self._keeps_reply or not at_end_of_block or self.cache.layout.is_sliceable:
            return
        with self._guarded("no checkpoint of the reply is taken"):
            end = len(self.prompt.token_ids)
            of_prompt = {position: states for position, states in self._states.items() if position <= end}
            self._states = of_prompt | {arena.num_tokens: arena.read_states()}

    def publish_reply(self, arena: KVArena, token_ids: TokenIds) -> None:
        """Have captured and written the blocks that decoding completed, if the request reuses replies.

        `token_ids` are the prompt and what of the reply is in the arena. These blocks are marked as generated: computed
        token by token, they are not what a prefill computes bit for bit. What they continue is stored with them, also
        where the scope keeps less of the prompt.
        """
        if not self._keeps_reply or self.cache.store.problem is not None:
            return
        assert arena.num_tokens == len(token_ids), "state length must equal key length"
        nodes = self.nodes_of(token_ids)
        is_too_short = nodes.num_blocks * nodes.block_size < self.cache.settings.kv_cache_min_tokens
        if is_too_short or nodes.num_blocks == self.planner.nodes.num_blocks:
            return
        self.planner.nodes = nodes
        with self._guarded("the reply is not saved"):
            missing, _ = self.planner.missing(nodes.num_blocks, self._states)
            plan = self.fit(Plan(missing, missing[-1].name, missing[-1].end))
            if plan.nodes:
                self.submit(arena, None, plan, self._states, self._pins)
                self._saved = "queued"

    def close(self) -> CacheReport:
        """Release what the request held, count it, and say what happened."""
        self._pins.close()
        restored = self.restored
        if restored.num_tokens:
            self.cache.counters["hits"] += 1
            self.cache.counters["restored_tokens"] += restored.num_tokens
            self.cache.counters["restored_bytes"] += restored.num_bytes
        elif self._miss_reason is not None:
            self.cache.misses[self._miss_reason] += 1
        report = CacheReport(
            selection=self.selection,
            restored=restored.num_tokens,
            source=restored.source,
            miss_reason=self._miss_reason,
            matched=restored.matched,
            refused=restored.refused,
            exact=restored.exact,
            restore_ms=restored.restore_ms,
            saved=self._saved,
        )
        log.debug("%s", report.log_line())
        return report

    @property
    def _keeps_reply(self) -> bool:
        options, layout = self.options, self.cache.layout
        is_wanted = options.reuse_generated and options.save and self.selection.reason != "faster_to_compute"
        return is_wanted and self._bypass is None and not layout.is_one_pass

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

    def _select(self) -> Selection:
        if self._bypass is not None:
            return self.selection
        settings, scope = self.cache.settings, self.options.scope
        sighting, window = Sighting(), DEFAULT_WINDOW
        if scope.kind == "auto":
            names, window = self.planner.nodes.block_names, scope.value
            sighting = self.namespace.admission.look(self.prompt.token_ids, names, settings.block_size)
        selection = select(
            scope,
            self.prompt,
            self.namespace.history.recent(window, self.options.group),
            block_size=settings.block_size,
            min_tokens=settings.kv_cache_min_tokens,
            cold_max=settings.kv_cache_cold_max,
            interval=settings.kv_cache_interval,
            state=self.cache.layout.state_kind,
            restored=self.restored.stored_tokens,
            sighting=sighting,
        )
        if self.goes_on:
            selection = replace(selection, keep_tail=False)
        if not self.options.save:
            return selection.keeping_nothing("read_only")
        if selection.kept and not self.cache.cost_model.allows(selection.kept, use="save"):
            return selection.keeping_nothing("faster_to_compute")
        return selection

    def _restoration(self) -> Restoration:
        cache = self.cache
        return Restoration(
            self.planner.nodes,
            cache.layout,
            cache.store,
            cache.writer,
            cache.readers,
            self._pins,
            allows=cache.cost_model.allows,
            pays=cache.cost_model.pays,
            reuse_generated=self.options.reuse_generated,
            needs_logits=not self.goes_on,
        )

    def _explain_miss(self) -> MissReason:
        """`diverged` only if the prompt leaves everything seen within its first block: from there on a block could
        have been restored, had it been stored."""
        if self.restored.refused is not None:
            return self.restored.refused
        if len(self.prompt.token_ids) < self.cache.settings.kv_cache_min_tokens:
            return "too_short"
        if not self.selection.recent or self.selection.common >= self.planner.nodes.block_size:
            return "not_stored"
        return "diverged"

    def _remembered(self) -> TokenIds | None:
        """The prompt, added to the history; None when it is too short to be worth a place in the window, or is only to
        be read for."""
        token_ids = self.prompt.token_ids
        if len(token_ids) < self.cache.settings.kv_cache_min_tokens or not self.options.save:
            return None
        self.namespace.history.add(token_ids, self.options.group)
        self.namespace.admission.add(token_ids, self.planner.nodes.block_names, self.planner.nodes.block_size)
        return token_ids


def _held(have: int, logits: torch.Tensor | None) -> Restored:
    """What is in an arena that has the first `have` tokens, if nothing is loaded."""
    return Restored(num_tokens=have, logits=logits, matched=have, source="memory" if have else "none")
