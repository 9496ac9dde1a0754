"""The steps of one request: prefetch, fetch, choose, publish, close."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from diskprefix.cache.context import RequestContext
from diskprefix.cache.matching import Restored
from diskprefix.cache.policy.select import AT_ANY_TOKEN
from diskprefix.cache.restoration import Restoration
from diskprefix.cache.saving import Saver
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.cache.tiers.tier import Prefetched
from diskprefix.errors import CacheError
from diskprefix.kv.layout import is_out_of_memory
from diskprefix.kv.sequence import KVSequence
from diskprefix.nouns import Break, CacheReport, MissReason, Prompt, Saved, Selection, outcome_of
from diskprefix.store.note_record import NoteKind
from diskprefix.store.store_identity import Epoch
from diskprefix.tokens import TokenIds

log = logging.getLogger("diskprefix")

_STORE_FAILS = "the store has no room, is full or fails: /health and the log say why"
"""Its own message names folders, which are nothing for those who send requests."""


class CachedRequest:
    """One request's way through the cache. Call `close` when the request ends, however it ends."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self.cache, self.namespace = context.cache, context.namespace
        self.prompt, self.options = context.prompt, context.options
        self._bypass: Literal["unsupported", "off"] | None = None
        if self.cache.layout.unsupported or self.options.scope.kind == "off":
            self._bypass = "unsupported" if self.cache.layout.unsupported else "off"
        num_tokens, reason = len(self.prompt.token_ids), self._bypass or "off"
        self._saver = Saver(context, Selection(scope=self.options.scope, prompt_tokens=num_tokens, reason=reason))
        self.is_published = False
        """The prompt was computed to its end."""
        self.reply = self.prompt.token_ids[:0]
        """The tokens of the reply that were run through the model. Set by `publish_reply`."""
        self.restored = Restored()
        """The result of `fetch`."""
        self._prefetched = Prefetched()
        self._load_s = 0.0
        """Seconds that `fetch` took to load state, without the wait for `prefetch`."""
        self._saved: Saved = "none"
        self._miss_reason: MissReason | None = self._bypass
        self._broken: Break | None = None

    @property
    def epoch(self) -> Epoch:
        """That of the store when the request began."""
        return self._context.epoch

    @property
    def nodes(self) -> PromptNodes:
        """The nodes of the prompt; once `publish_reply` was called, of the prompt and its reply."""
        return self._saver.planner.nodes

    @property
    def selection(self) -> Selection:
        """The part of the prompt that is kept. Set by `choose`."""
        return self._saver.selection

    def restore(self, sequence: KVSequence) -> Restored:
        """Runs `prefetch`, `fetch` and `choose`."""
        self.prefetch()
        self.fetch(sequence)
        self.choose(sequence)
        return self.restored

    def prefetch(self, is_cancelled: Callable[[], bool] = lambda: False, have: int = 0) -> None:
        """Fetches the nodes that only the shared tier has. Waits for the network, so it is for a thread of this
        request. Does nothing without a shared tier. `have` as in `fetch`."""
        if self._bypass is None and self.cache.remote is not None:
            with self._guarded("nothing is fetched from the shared tier"):
                self._prefetched = self._context.prefetch(self.nodes, is_cancelled, have)

    def fetch(
        self,
        sequence: KVSequence,
        have: int = 0,
        logits: torch.Tensor | None = None,
        on_logits: Callable[[torch.Tensor], None] = lambda _: None,
        on_block: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Copies the longest restorable prefix into the sequence, which has room for the prompt. Copies nothing on a
        miss.

        The sequence's first `have` tokens are the prompt's already, with their exact state; only the state behind them
        is loaded. `logits` are the next-token logits at the prompt's end (shape [vocab]). They are required if the
        sequence has the whole prompt, unless that is only a beginning. `on_logits` is called with the logits, on any
        thread, as soon as they are loaded. Loading the rest may still fail; computing it gives the same logits. For
        `on_block` see `Loader`.

        For one thread at a time, which need not be the engine's. It changes shared state only where that has its own
        lock (the writer's queues, the pins, the counters), and the cost model's count of refused restores.
        """
        num_tokens = len(self.prompt.token_ids)
        assert have < num_tokens or logits is not None or self._context.goes_on, (
            "there must be something to sample from"
        )
        sequence.truncate(have)
        self.restored = held = _held(have, logits)
        if self._bypass is None:
            with self._guarded("what was seen before is not known"):
                self.cache.namespaces.read(self.namespace)
            restoration = self._restoration(on_logits, on_block)
            self._miss_reason = "error"
            with self._guarded("nothing is restored"):
                restored = restoration.run(sequence, have, logits)
                self._load_s, waited_ms = restored.restore_ms / 1e3, self._prefetched.seconds * 1e3
                self.restored = replace(restored, restore_ms=restored.restore_ms + waited_ms)
                self._miss_reason = None
            if self.restored is held and restoration.kept < have:
                self.restored = _held(0, None)
            sequence.truncate(self.restored.num_tokens)

    def choose(self, sequence: KVSequence | None) -> None:
        """Chooses what to save, and counts the result of `fetch`. For the engine thread, before the first step. The
        sequence is None for a model that computes in memory of its own."""
        restored = self.restored
        if restored.last_node is not None:
            ttl_s = self._context.ttl_at(restored.stored_tokens)
            self.cache.writer.touch(restored.last_node, time.time(), ttl_s)
        self._saver.begin(restored)
        if self._bypass is None:
            self._saver.choose(self._context.choose(self.nodes, restored))
            self._broken = self._context.find_break(restored, self.selection)
        if restored.num_tokens and outcome_of(len(self.prompt.token_ids), restored.num_tokens) != "miss":
            self._miss_reason = None
        elif self._miss_reason is None:
            self._miss_reason = self._context.why_missed(restored, self.selection, self._broken)
        if sequence is not None and self._bypass is None:
            with self._guarded("not all of the prompt is saved"):
                self._saver.publish_what_slides(sequence)

    def after_step(self, sequence: KVSequence) -> None:
        """Queues the wanted blocks that the prefill has completed. Takes a checkpoint if one is wanted here, because
        the next step overwrites the states."""
        if self._is_not_saved:
            return
        self.cache.writer.pause_writing()
        with self._guarded("not all of the prompt is saved"):
            self._saver.after_step(sequence)

    def publish(self, sequence: KVSequence, logits: torch.Tensor | None, prefill_s: float) -> None:
        """Queues the rest of what is kept of the prompt, with the entry and the prompt as seen.

        `logits` are the next-token logits at the prompt's end, shape [vocab], as the model gave them (None if the
        prompt is only a beginning and was restored). If they are not finite, nothing more is saved. `prefill_s` is the
        time of computing the tokens that were not restored, in seconds.
        """
        self.cache.writer.resume_writing()
        self.is_published = True
        if self._bypass is not None:
            return
        assert sequence.num_tokens == len(self.prompt.token_ids), "state length must equal key length"
        self._record_restore()
        self._saved = "dropped"
        if self.cache.store.problem is not None:
            # Which is logged once, not for every prompt.
            self._saver.give_up(None)
            return
        if logits is not None and not logits.max().isfinite():
            self._saver.record_loss("its next-token logits are not finite")
            return
        with self._guarded("the prompt is not saved"):
            plan = self._saver.publish(sequence, logits, prefill_s)
            stored: Saved = "none" if plan.last_node is None else "stored"
            self._saved = "queued" if self._saver.has_published else stored

    def publish_reply(self, sequence: KVSequence, token_ids: TokenIds) -> None:
        """Queues the part of the reply that is kept with its prompt, if the model is exact at every token: decoding
        then computes the same bits as a prefill. `token_ids` are the prompt and the tokens of the reply that are in the
        sequence."""
        assert sequence.num_tokens == len(token_ids), "state length must equal key length"
        self.reply = token_ids[len(self.prompt.token_ids) :]
        if self._is_not_saved or self.cache.layout.state_kind not in AT_ANY_TOKEN:
            return
        with self._guarded("the reply is not saved"):
            sequence.settle()
            if self._saver.publish_reply(sequence, self._context.nodes_of(token_ids)):
                self._saved = "queued"

    def recall(self, sequence: KVSequence, have: int, on_block: Callable[[int], None]) -> None:
        """Restores what is stored of a sequence that lost its memory, which has its first `have` tokens again and room
        for all of them. The last one is left to compute. For threads see `fetch`."""
        context, options = self._context, replace(self.options, leaves_last=True)
        again = CachedRequest(replace(context, prompt=Prompt(sequence.token_ids), options=options))
        try:
            again.fetch(sequence, have, on_block=on_block)
        finally:
            again._saver.close()

    def leave(self, sequence: KVSequence, token_ids: TokenIds) -> None:
        """Queues what was computed so far for a request that is cancelled, or waits for memory. It continues there when
        it comes again. `token_ids` are those in the sequence. What the policy would not keep is kept for at least ten
        minutes."""
        is_exact = len(token_ids) <= len(self.prompt.token_ids) or self.cache.layout.state_kind in AT_ANY_TOKEN
        if self._bypass is not None or not is_exact or not self._saver.may_leave(sequence):
            # On the grid, decoding computes other bits than a prefill.
            return
        with self._guarded("what was computed is not kept"):
            sequence.settle()
            self._saver.leave(sequence, self.restored, self._context.nodes_of(token_ids))
            if self._saver.has_published:
                self._saved = "queued"

    def hibernate(self, sequence: KVSequence) -> None:
        """Queues what a sequence holds of the prompt and the store lacks, and ends the request, which counts as none.
        The prompt has one token more than the sequence. For a thread that has the sequence for itself."""
        if self._bypass is None:
            self.fetch(sequence, have=sequence.num_tokens)
            stored = replace(self.restored, num_tokens=self.restored.stored_tokens)
            self._saver.begin(stored)
            if self._saver.may_leave(sequence):
                with self._guarded("what is only in memory is not kept"):
                    self._saver.leave(sequence, stored, self.nodes, least_s=0.0)
        self._saver.close()

    def close(self) -> CacheReport:
        """Releases what the request holds, counts it, and returns the report."""
        restored = self.restored
        if self.cache.remote is not None and self._bypass is None:
            self._saver.close(partial(self._context.upload, self.nodes, self.selection, restored))
        else:
            self._saver.close()
        self.cache.counters["prompt_tokens"] += len(self.prompt.token_ids)
        if restored.num_tokens:
            self.cache.restored_tokens[restored.source] += restored.num_tokens
            self.cache.counters["restored_bytes"] += restored.num_bytes
        if self._miss_reason is not None:
            self.cache.misses[self._miss_reason] += 1
        if self._bypass is None and self.cache.has_own_threads:
            # What is kept beside another model's state was no request of its own.
            self._context.record_savings(restored)
        saved = self._saved if self._saver.chain.is_whole else "dropped"
        report = CacheReport(
            selection=self.selection,
            restored=restored.num_tokens,
            source=restored.source,
            miss_reason=self._miss_reason,
            matched=restored.matched,
            refused=restored.refused,
            restore_ms=restored.restore_ms,
            saved=saved,
            dropped_because=(self._saver.chain.why or _STORE_FAILS) if saved == "dropped" else None,
            broken=self._broken,
            broken_line=self.prompt.source.line_at(self._broken.at) if self._broken and self.prompt.source else "",
            rewriting=self.prompt.rewriting,
            replayed=self.prompt.replayed,
        )
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", report.log_line())
        return report

    def _record_restore(self) -> None:
        """Records the time of the restore, until its last byte was decoded."""
        if self.restored.source == "disk":
            self.cache.cost_model.record_restore(self.restored.num_bytes, self._load_s)

    @property
    def _is_not_saved(self) -> bool:
        return self._bypass is not None or self._saver.is_given_up

    @contextmanager
    def _guarded(self, consequence: str) -> Iterator[None]:
        """Turns cache errors into a request without the cache. No other place does."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, CacheError) and not is_out_of_memory(error):
                raise
            self.cache.count("errors")
            log.warning("[disk-cache] going on without the cache, %s: %s", consequence, error or type(error).__name__)

    def _restoration(self, on_logits: Callable[[torch.Tensor], None], on_block: Callable[[int], None]) -> Restoration:
        cache, notes = self.cache, self._context.notes()
        return Restoration(
            self.nodes,
            cache.layout,
            cache.tiers,
            cache.store.evictor,
            cache.readers,
            self._saver.pins,
            allows=cache.cost_model.allows,
            pays=cache.cost_model.pays,
            noted_logits=lambda: notes.get(NoteKind.LOGITS, self.nodes.end_id),
            on_logits=on_logits,
            on_block=on_block,
            needs_logits=not self._context.goes_on,
            leaves_last=self.options.leaves_last,
            prefetched=self._prefetched.names,
        )


def _held(have: int, logits: torch.Tensor | None) -> Restored:
    """Returns the result for a sequence that has the first `have` tokens, if nothing is loaded."""
    return Restored(num_tokens=have, logits=logits, matched=have, source="memory" if have else "none")
