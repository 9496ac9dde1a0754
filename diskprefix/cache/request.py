"""One request's way through the cache: fetched, selected, published as it is computed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from diskprefix.cache.choosing import found_break, note_savings, selected, why_missed
from diskprefix.cache.namespaces import TenantNamespace
from diskprefix.cache.resources import CacheResources
from diskprefix.cache.restore import Restoration, Restored
from diskprefix.cache.saving import Saver
from diskprefix.cache.sharing import prefetch, upload
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.cache.tiers.shared import Prefetched
from diskprefix.errors import CacheError
from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import is_out_of_memory
from diskprefix.nouns import Break, CacheOptions, CacheReport, MissReason, Prompt, Saved, Selection
from diskprefix.store.note_record import NoteKind
from diskprefix.tokens import TokenIds

log = logging.getLogger("diskprefix")


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
        self._bypass: Literal["media", "unsupported", "off"] | None = None
        if self.prompt.media:
            self._bypass = "media"
        elif self.cache.layout.unsupported or self.options.scope.kind == "off":
            self._bypass = "unsupported" if self.cache.layout.unsupported else "off"
        num_tokens, reason = len(self.prompt.token_ids), self._bypass or "off"
        self._saver = Saver(
            cache=self.cache,
            namespace=self.namespace,
            prompt=self.prompt,
            options=self.options,
            selection=Selection(scope=self.options.scope, prompt_tokens=num_tokens, reason=reason),
        )
        self._publisher = self._saver.publisher
        self.is_published = False
        """Whether the prompt was computed to its end and could be kept, were there a scope and a store for it."""
        self.reply = self.prompt.token_ids[:0]
        """What of the reply was run through the model; known once `publish_reply` was called."""
        self.restored = Restored()
        """What `fetch` found, and how long it took."""
        self._prefetched = Prefetched()
        self._load_s = 0.0
        """How long `fetch` took to load what it restored, without what `prefetch` waited for."""
        self._saved: Saved = "none"
        self._miss_reason: MissReason | None = self._bypass
        self._broken: Break | None = None

    @property
    def nodes(self) -> PromptNodes:
        """Those of the prompt, and of the reply once `publish_reply` was called."""
        return self._saver.planner.nodes

    @property
    def selection(self) -> Selection:
        """What is kept; known once `choose` was called."""
        return self._saver.selection

    def on_written(self, call: Callable[[float, float, int], None]) -> None:
        """Has `call` called, in the writer's thread, for each part of it that is written: began and ended on the clock
        of `time.perf_counter`, bytes."""
        self._publisher.chain.on_written = call

    def restore(self, arena: KVArena) -> Restored:
        """`prefetch` and `fetch`, then `choose`."""
        self.prefetch()
        self.fetch(arena)
        self.choose(arena)
        return self.restored

    def prefetch(self, is_cancelled: Callable[[], bool] = lambda: False, have: int = 0) -> None:
        """Fetch what the shared tier has of the prompt and this machine has not. Waits for the network: for a thread
        that nobody waits for but this request. Without such a tier it does nothing. `have` as in `fetch`."""
        if self._bypass is None and self.cache.remote is not None:
            nodes, ttl_s = self.nodes, self._publisher.ttl_at(0)
            with self._guarded("nothing is fetched from the shared tier"):
                store_id = self._publisher.store_id
                self._prefetched = prefetch(self.cache, self.namespace, nodes, ttl_s, store_id, is_cancelled, have)

    def fetch(
        self,
        arena: KVArena,
        have: int = 0,
        logits: torch.Tensor | None = None,
        on_logits: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> None:
        """Copy the longest restorable prefix into the arena, which has room for the prompt; of a miss, nothing.

        The arena's first `have` tokens are the prompt's already, with their exact state, and only what lies behind them
        is loaded. `logits` are the next-token logits at the prompt's end (shape [vocab]); they must be given if the
        arena has the whole prompt, unless that goes on. `on_logits` is told them, on any thread, as soon as they are
        loaded. The rest may fail yet; computing it then gives the same ones. Captures of the arena must be over, unless
        they read those tokens only.

        For one thread, which may be another one than the engine's: of what requests share, it changes only what has a
        lock of its own (the writer's queues, the pins, the counters), and the count of restores that were not worth it.
        """
        num_tokens = len(self.prompt.token_ids)
        assert have < num_tokens or logits is not None or self.goes_on, "there must be something to sample from"
        arena.truncate(have)
        self.restored = held = _held(have, logits)
        if self._bypass is None:
            restoration = self._restoration(on_logits)
            self._miss_reason = "error"
            with self._guarded("nothing is restored"):
                restored = restoration.run(arena, have, logits)
                self._load_s, waited_ms = restored.restore_ms / 1e3, self._prefetched.seconds * 1e3
                self.restored = replace(restored, restore_ms=restored.restore_ms + waited_ms)
                self._miss_reason = None
            if self.restored is held and restoration.kept < have:
                self.restored = _held(0, None)
            arena.truncate(self.restored.num_tokens)

    def choose(self, arena: KVArena | None) -> None:
        """Select what to save, and count what `fetch` found. For the engine thread, before the first step. The arena is
        None for a model that computes in memory of its own."""
        restored = self.restored
        if restored.tip is not None:
            ttl_s = self._publisher.ttl_at(restored.stored_tokens)
            self.cache.writer.touch(restored.tip, time.time(), ttl_s)
        if restored.source == "disk":
            self.cache.cost_model.note_restore(restored.num_bytes, self._load_s)
        self._saver.begin(restored)
        if self._bypass is None:
            nodes, options = self.nodes, self.options
            self._saver.selection = selection = selected(
                self.cache, self.namespace, self.prompt, options, nodes, restored, goes_on=self.goes_on
            )
            self._publisher.reason = selection.reason
            self._broken = found_break(self.namespace, self.prompt, options, restored, selection)
        if restored.num_tokens:
            self._miss_reason = None
        elif self._miss_reason is None:
            self._miss_reason = why_missed(self.cache, self.prompt, restored, self.selection)
        if arena is not None and self._bypass is None:
            with self._guarded("not all of the prompt is saved"):
                self._saver.publish_what_slides(arena)

    def after_step(self, arena: KVArena) -> None:
        """Have the blocks that the prefill has completed and that are wanted captured and written. Take a checkpoint if
        one is wanted here: the next step overwrites the states."""
        if self._bypass is not None or self._saver.is_given_up:
            return
        self.cache.writer.pause_writing()
        with self._guarded("not all of the prompt is saved"):
            self._saver.after_step(arena)

    def publish(self, arena: KVArena, logits: torch.Tensor | None, prefill_s: float) -> None:
        """Have captured and written what is left of what the policy wants, with the entry and the history.

        `logits` are the next-token logits at the prompt's end, shape [vocab], as the model gave them (None if it goes
        on, and was restored); where they are not finite, nothing more is saved. `prefill_s` is how long computing what
        was not restored took, in seconds. Until `KVArena.settle`, the arena may grow but must not be changed before the
        prompt's end.
        """
        self.cache.writer.resume_writing()
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
            plan = self._saver.publish(arena, logits, prefill_s)
            stored: Saved = "none" if plan.tip is None else "stored"
            self._saved = "queued" if self._publisher.has_published else stored

    def after_decode(self, arena: KVArena) -> None:
        """Remember the states if the reply has just completed a block, in case that its blocks are kept."""
        saver = self._saver
        is_at_end_of_block = arena.num_tokens % self.nodes.block_size == 0
        if self._bypass is not None or not saver.keeps_generated or not is_at_end_of_block:
            return
        if self.cache.layout.is_sliceable or saver.is_given_up:
            return
        with self._guarded("no checkpoint of the reply is taken"):
            saver.keep_last_states(arena)

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
        if self._bypass is not None or self._saver.is_given_up:
            return
        nodes = self._publisher.nodes_of(token_ids)
        with self._guarded("the reply is not saved"):
            if self.cache.layout.state_kind == "token":
                is_wanted = self._saver.publish_exact_reply(arena, nodes)
            else:
                is_wanted = self._saver.keeps_generated and self._saver.publish_generated(arena, nodes)
            if is_wanted:
                self._saved = "queued"

    def leave(self, arena: KVArena) -> None:
        """Have what the prefill computed so far captured and written, because the request is cancelled: the same prompt
        goes on from there when it comes again.

        What the policy would not keep is kept for ten minutes at least. With the scope `off`, and by a request that
        only restores, nothing is left.
        """
        if self._bypass is not None or not self._saver.may_leave(arena):
            return
        with self._guarded("what was computed is not kept"):
            self._saver.leave(arena, self.restored)
            if self._publisher.has_published:
                self._saved = "queued"

    def close(self) -> CacheReport:
        """Release what the request held, count it, and say what happened."""
        self._saver.close()
        restored = self.restored
        if self.cache.remote is not None and self._bypass is None:
            self._publisher.at_end = partial(
                upload, self.cache, self.namespace, self.nodes, self.options, self.selection, restored
            )
        self._publisher.close()
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

    def _restoration(self, on_logits: Callable[[torch.Tensor], None]) -> Restoration:
        cache, notes = self.cache, self.cache.notes_of(self.namespace.root, self.namespace.record)
        return Restoration(
            self.nodes,
            cache.layout,
            cache.tiers,
            cache.store.evictor,
            cache.readers,
            self._publisher.pins,
            allows=cache.cost_model.allows,
            pays=cache.cost_model.pays,
            noted_logits=lambda: notes.get(NoteKind.LOGITS, self.nodes.end_id),
            on_logits=on_logits,
            reuse_generated=self.options.reuse_generated,
            needs_logits=not self.goes_on,
            prefetched=self._prefetched.names,
        )


def _held(have: int, logits: torch.Tensor | None) -> Restored:
    """What is in an arena that has the first `have` tokens, if nothing is loaded."""
    return Restored(num_tokens=have, logits=logits, matched=have, source="memory" if have else "none")
