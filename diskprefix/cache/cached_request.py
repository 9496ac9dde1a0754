"""The steps of one request: fetch, choose, publish, close."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Literal

import numpy as np
from msgspec.structs import replace

from diskprefix.cache.cache import PrefixCache
from diskprefix.cache.choosing import selection_ahead
from diskprefix.cache.context import RequestContext
from diskprefix.cache.fetch import Fetch
from diskprefix.cache.matching import RestoreResult
from diskprefix.cache.policy.select import AT_ANY_TOKEN
from diskprefix.cache.saving import Saver
from diskprefix.cache.tiers.nodes import PromptNodes
from diskprefix.kv.sequence import KVSequence, Owner
from diskprefix.store.store_identity import Epoch
from diskprefix.tokens import Logits, TokenIds, TokenPath
from diskprefix.values import Break, CacheOptions, CacheReport, MissReason, Prompt, Saved, Selection, outcome_of

log = logging.getLogger("diskprefix")

_STORE_FAILS = "the store has no room, is full or fails: /health and the log say why"
"""The reason for clients, who should not see the folders that the store's own messages name."""


class CachedRequest:
    """One request's way through the cache. Call `close` when the request ends, however it ends.

    For the engine's thread: making one does not wait. `goes_on`: the prompt ends at a grid point and is only a
    beginning, so its next-token logits are neither needed nor saved.
    """

    def __init__(self, cache: PrefixCache, prompt: Prompt, options: CacheOptions, *, goes_on: bool = False) -> None:
        self.cache, self.namespace = cache, cache.namespaces.get(options.tenant)
        self.prompt, self.options = prompt, options
        self._context = context = RequestContext(cache, self.namespace, prompt, options, goes_on)
        num_tokens, reason = len(prompt.token_ids), self._bypass or "off"
        self._saver = Saver(context, Selection(scope=options.scope, prompt_tokens=num_tokens, reason=reason))
        self._pins = ExitStack()
        """The pins of the nodes that the fetch found."""
        self.is_published = False
        """The prompt was computed to its end."""
        self.reply = self.prompt.token_ids[:0]
        """The tokens of the reply that were run through the model. Set by `publish_reply`."""
        self.restored = RestoreResult()
        """The result of the first fetch. Set by `take`."""
        self._is_chosen = False
        self._load_s = 0.0
        """Seconds that the fetch took to load state."""
        self._miss_reason: MissReason | None = self._bypass
        self._lacks_reason = False
        """The reason of a miss is not known yet."""
        self._broken: Future[Break | None] | None = None
        """A search for the place that breaks an earlier prompt's prefix."""

    @property
    def _bypass(self) -> Literal["unsupported", "off", "upgraded"] | None:
        return self._context.bypass

    @property
    def epoch(self) -> Epoch:
        """The store's epoch when the request began."""
        return self._context.epoch

    @property
    def nodes(self) -> PromptNodes:
        """The nodes of the prompt; once `publish_reply` was called, of the prompt and its reply."""
        return self._saver.planner.nodes

    @property
    def selection(self) -> Selection:
        """The part of the prompt to save. Set by `choose`."""
        return self._saver.selection

    def restore(self, sequence: KVSequence, have: int = 0) -> RestoreResult:
        """Runs all steps of a fetch into a sequence that has the first `have` tokens, and `choose`."""
        fetch = self.begin_fetch(sequence, self.prompt.token_ids, have)
        fetch.run_step("prefetch")
        fetch.run()
        self.take(fetch)
        self.choose(sequence)
        return self.restored

    def fetch(self, sequence: KVSequence, have: int = 0, logits: Logits | None = None) -> None:
        """Runs the steps of a fetch but `prefetch`. See `Fetch`."""
        fetch = self.begin_fetch(sequence, self.prompt.token_ids, have, logits)
        fetch.run()
        self.take(fetch)

    def begin_fetch(
        self,
        sequence: KVSequence,
        token_ids: TokenIds,
        have: int = 0,
        logits: Logits | None = None,
        on_logits: Callable[[Logits], None] = lambda _: None,
        on_block: Callable[[int], None] = lambda _: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Fetch:
        """Returns a fetch for `take`; does not wait. `token_ids` are the prompt. For a reply that lost its memory, they
        are the prompt and the tokens of the reply, of which the last one is left to compute."""
        context = self._context
        if len(token_ids) > len(self.prompt.token_ids):
            options = replace(self.options, computes_last=True)
            context = dataclasses.replace(context, prompt=Prompt(token_ids), options=options)
        nodes = self.nodes if token_ids is self.nodes.token_ids else self.nodes.extended(token_ids)
        return Fetch(context, nodes, sequence, have, logits, on_logits, on_block, is_wanted)

    def take(self, fetch: Fetch, *, gave_up: bool = False) -> RestoreResult:
        """Takes over the result of a fetch, none of whose steps runs any more, and returns it. The first result before
        `choose` is the request's, later results are the replies'. With `gave_up`, any step but `load` may still run,
        and the result is what the sequence had before. For the engine's thread."""
        restored = fetch.in_memory if gave_up else fetch.restored
        fetch.sequence.truncate(restored.num_tokens)
        if not self._is_chosen:
            self.restored, self._load_s = restored, fetch.load_s
            self._miss_reason = "error" if gave_up else fetch.miss_reason
            if not gave_up:
                self._pins.callback(fetch.close)
        elif not gave_up:
            fetch.close()
        return restored

    def choose(self, sequence: KVSequence | None) -> None:
        """Selects what to save, given the result of the fetch. For the engine's thread, before the first step. The
        sequence is None for a model that computes in memory of its own."""
        restored, self._is_chosen = self.restored, True
        if restored.last_node is not None:
            ttl_s = self._context.ttl_at(restored.stored_tokens)
            self.cache.writer.touch(restored.last_node, time.time(), ttl_s)
        self._saver.begin(restored, self._context.choose(self.nodes, restored) if self._bypass is None else None)
        if self._bypass is None and self.prompt.source is not None:
            # The search compares whole prompts, and its result is only reported.
            self._broken = self.cache.aside.submit(self._context.find_break, restored, self.selection)
        is_miss = not restored.num_tokens or outcome_of(len(self.prompt.token_ids), restored.num_tokens) == "miss"
        self._lacks_reason = is_miss and self._miss_reason is None
        if not is_miss:
            self._miss_reason = None
        if sequence is not None and self._saves:
            with self._context.guarded("not all of the prompt is saved"):
                self._saver.save_sliding_blocks(sequence)

    def choose_ahead(self, sequence: KVSequence) -> None:
        """Selects all of a prompt that nobody has asked for yet, unless the write budget is scarce. Like `choose`."""
        self._is_chosen, selection = True, None
        if self._bypass is None and self._saver.may_save_unselected(sequence):
            selection = selection_ahead(self.prompt, self.options.scope, self.cache.layout.state_kind)
        self._saver.begin(self.restored, selection)

    def after_step(self, sequence: KVSequence) -> None:
        """Queues the selected blocks that the prefill has completed, and the checkpoint if one is selected here."""
        if not self._saves:
            return
        self.cache.writer.pause_writing()
        with self._context.guarded("not all of the prompt is saved"):
            self._saver.after_step(sequence)

    def publish(self, sequence: KVSequence, logits: Logits | None, prefill_s: float) -> None:
        """Queues the rest of the selected part of the prompt, with the entry and the prompt as seen.

        `logits` are the next-token logits at the prompt's end, shape [vocab]; None if the prompt
        is only a beginning and was restored. If logits are not finite, nothing more is saved. `prefill_s` is the time
        of computing the tokens that were not restored, in seconds. It is measured, and the prompt is remembered, even
        if nothing can be saved.
        """
        self.cache.writer.resume_writing()
        self.is_published = True
        if self._bypass is not None:
            return
        assert sequence.num_tokens == len(self.prompt.token_ids), "state length must equal key length"
        if self.restored.source == "disk":
            self.cache.cost_model.record_restore(self.restored.num_bytes, self._load_s)
        path: TokenPath | None = None
        with self._context.guarded("the prompt is not remembered"):
            path = self._saver.note_computed(prefill_s)
        if self.cache.store.problem is not None:
            # The problem is logged once, not for every prompt.
            self.cache.writer.fail(self._saver.save, "")
            return
        if logits is not None and not np.isfinite(logits.max()):
            self.cache.writer.fail(self._saver.save, "its next-token logits are not finite")
            return
        with self._context.guarded("the prompt is not saved"):
            self._saver.publish(sequence, logits, path)

    def publish_reply(self, sequence: KVSequence, token_ids: TokenIds) -> None:
        """Queues the selected part of the reply, if the model is exact at every token: decoding then computes the same
        bits as a prefill. `token_ids` are the tokens in the sequence, of the prompt and the reply."""
        assert sequence.num_tokens == len(token_ids), "state length must equal key length"
        self.reply = token_ids[len(self.prompt.token_ids) :]
        if not self._saves or self.cache.layout.state_kind not in AT_ANY_TOKEN:
            return
        with self._context.guarded("the reply is not saved"):
            sequence.settle()
            self._saver.publish_reply(sequence, self.nodes.extended(token_ids))

    def save_partial(self, sequence: KVSequence, token_ids: TokenIds) -> None:
        """Queues the state of a request that is cancelled or waits for memory, so that the request continues there when
        it comes again. `token_ids` are the tokens in the sequence. State that the policy did not select is kept for at
        least ten minutes."""
        is_exact = len(token_ids) <= len(self.prompt.token_ids) or self.cache.layout.state_kind in AT_ANY_TOKEN
        if not self._saves or not is_exact or not self._saver.may_save_unselected(sequence):
            # On the grid, decoding computes other bits than a prefill.
            return
        with self._context.guarded("the state of the cancelled or waiting request is not saved"):
            sequence.settle()
            self._saver.save_partial(sequence, self.nodes.extended(token_ids))

    def save_idle(self, sequence: KVSequence) -> None:
        """Queues all that a sequence has of the prompt and the store lacks, and ends the request without counting it.
        The prompt has one token more than the sequence. For a thread that has the sequence for itself."""
        try:
            if self._bypass is None:
                self.fetch(sequence, have=sequence.num_tokens)
                self._saver.begin(replace(self.restored, num_tokens=self.restored.stored_tokens))
                if self._saves and self._saver.may_save_unselected(sequence):
                    with self._context.guarded("idle state is not saved"):
                        self._saver.save_partial(sequence, self.nodes, min_ttl_s=0.0)
        finally:
            self.leave()

    def close(self) -> CacheReport:
        """Releases what the request holds, counts it, and returns the report."""
        restored = self.restored
        try:
            broken = self._found_break()
            if self._lacks_reason:
                self._miss_reason = self._context.why_missed(restored, self.selection, broken)
        finally:
            self.leave()
        if self._bypass is None:
            self._context.upload(self.nodes, self.selection, restored)
        self.cache.counters["prompt_tokens"] += len(self.prompt.token_ids)
        if restored.num_tokens:
            self.cache.restored_tokens[restored.source] += restored.num_tokens
            self.cache.counters["restored_bytes"] += restored.num_bytes
        if self._miss_reason is not None:
            self.cache.misses[self._miss_reason] += 1
        if self._bypass is None and self.cache.has_own_threads:
            # The state of a draft model belongs to another request, which is counted.
            self._context.record_savings(restored)
        save = self._saver.save
        saved: Saved = "queued" if save.has_nodes else "stored" if self._saver.is_stored else "none"
        report = CacheReport(
            selection=self.selection,
            restored=restored.num_tokens,
            source=restored.source,
            miss_reason=self._miss_reason,
            matched=restored.matched,
            refused=restored.refused,
            restore_ms=restored.restore_ms,
            saved=saved if save.lost is None else "dropped",
            dropped_because=None if save.lost is None else save.lost or _STORE_FAILS,
            broken=broken,
            broken_line=self.prompt.source.line_at(broken.at) if broken and self.prompt.source else "",
            broken_tool=self.prompt.source.tool_at(broken.at) if broken and self.prompt.source else "",
            recomputed=self._context.lost(restored, self.selection, broken, self._miss_reason),
            rewriting=self.prompt.rewriting,
            replayed=self.prompt.replayed,
        )
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", report.log_line())
        return report

    def _found_break(self) -> Break | None:
        """Returns the result of the search for a break. A search that has not begun is not waited for, and one that
        failed, for lack of memory for example, has found none: the reply is whole."""
        if self._broken is None or self._broken.cancel():
            return None
        try:
            return self._broken.result()
        except Exception:
            self.cache.count("errors")
            log.exception("[disk-cache] the place that breaks an earlier prompt's prefix is not known")
            return None

    @property
    def _saves(self) -> bool:
        """Returns whether state is saved: the request uses the cache, the store works, and nothing has failed."""
        return self._bypass is None and self.cache.store.problem is None and not self._saver.save.has_failed

    def leave(self) -> None:
        """Releases what the request holds, without counting it."""
        self.cache.writer.finish(self._saver.save)
        self._pins.close()


def save_idle(
    cache: PrefixCache, sequence: KVSequence, token_ids: TokenIds, options: CacheOptions, owner: Owner
) -> None:
    """Queues the state of an idle sequence of `owner`, which has the `token_ids`, as far as the store lacks it. Does
    nothing if the scope of its request limits what is saved."""
    is_long = len(token_ids) >= max(1, cache.settings.kv_cache_min_tokens)
    if is_long and options.save and options.scope.most is None:
        request = CachedRequest(cache, Prompt(np.append(token_ids, token_ids[-1:])), options)
        # The request is new, its state is not.
        if owner.purged_at == request.epoch.purged_at:
            request.save_idle(sequence)
