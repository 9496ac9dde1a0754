"""The steps of one request: restore, choose, publish, close."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Literal

import numpy as np
from msgspec.structs import replace

from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.cache.choosing import (
    marked_nodes,
    refused_tokens,
    selection_ahead,
    selection_of,
    sighting_of,
)
from diskprefix.prefixstore.cache.context import SENT, PromptOrigin, RequestContext
from diskprefix.prefixstore.cache.matching import RestoreResult
from diskprefix.prefixstore.cache.misses import find_lost_prefix, lost_tokens, why_missed
from diskprefix.prefixstore.cache.namespaces import Beginning
from diskprefix.prefixstore.cache.policy.seen import Sighting
from diskprefix.prefixstore.cache.policy.select import AT_ANY_TOKEN, Rules
from diskprefix.prefixstore.cache.policy.write_budget import Spending, within_budget
from diskprefix.prefixstore.cache.restore import Restore
from diskprefix.prefixstore.cache.saving import SavePlan, Saver
from diskprefix.prefixstore.cache.tiers.nodes import PromptNodes
from diskprefix.prefixstore.cache.tiers.tier import Upload
from diskprefix.prefixstore.kv.sequence import KVSequence, Owner
from diskprefix.prefixstore.store.epochs import Epoch
from diskprefix.prefixstore.store.note_record import NoteKind
from diskprefix.prefixstore.store.schema import NodeKind
from diskprefix.prefixstore.store.statistics.savings import Tally
from diskprefix.tokens import LEAST_TOKENS, Logits, PromptDigest, TokenIds, TokenPath
from diskprefix.values import Break, CacheOptions, CacheReport, Lost, MissReason, Prompt, Saved, Selection, is_miss

log = logging.getLogger("diskprefix")

_MIN_TTL_S = 600.0
"""The minimum time to live, in seconds, of state that the policy did not select."""
_STORE_FAILS = "the store has no room, is full or fails: /health and the log say why"
"""The reason for clients, who should not see the folders that the store's own messages name."""


class CachedRequest:
    """One request's way through the cache: what is restored, what is saved and when, and the report. Call `close` when
    the request ends, however it ends.

    For the engine's thread: making one does not wait. `is_prefix_only`: the prompt ends at a grid point and is only a
    beginning, so its next-token logits are neither needed nor saved. `origin`: what its entries say of it. It `began`
    now, or when the caller says. For `of_any_build` see `RequestContext`.
    """

    def __init__(
        self,
        cache: PrefixCache,
        prompt: Prompt,
        options: CacheOptions,
        *,
        is_prefix_only: bool = False,
        origin: PromptOrigin = SENT,
        began: Beginning | None = None,
        of_any_build: bool = False,
    ) -> None:
        began = began or cache.begin(options)
        self.cache, self.namespace = cache, began.namespace
        self.prompt, self.options = prompt, options
        self._context = context = RequestContext(cache, began, prompt, options, is_prefix_only, origin, of_any_build)
        num_tokens, reason = len(prompt.token_ids), self._bypass or "off"
        self._saver = Saver(context, Selection(scope=options.scope, prompt_tokens=num_tokens, reason=reason))
        self._pins = ExitStack()
        """The pins of the nodes that the restore found."""
        self.is_published = False
        """The prompt was computed to its end."""
        self.reply = self.prompt.token_ids[:0]
        """The tokens of the reply that were run through the model. Set by `publish_reply`."""
        self.restored = RestoreResult()
        """The result of the first restore. Set by `adopt_restore`."""
        self.is_chosen = False
        """The numbers of restored tokens and of tokens to save are decided."""
        self._sighting = Sighting()
        """What earlier prompts reveal about this one. Set by `choose`."""
        self._spending: Spending | None = None
        """The state of the write budget when the prompt was chosen."""
        self._is_stored = False
        """The selected part of the prompt is stored, or on its way."""
        self._logits: tuple[str, memoryview] | None = None
        """The id of the prompt's end and the logits there, until they are stored."""
        self._load_s = 0.0
        """Seconds that the restore took to load state."""
        self._miss_reason: MissReason | None = self._bypass
        self._lacks_reason = False
        """The reason of a miss is not known yet."""
        self._broken: Future[Break | None] | None = None
        """A search for the place that breaks an earlier prompt's prefix."""

    @property
    def _bypass(self) -> Literal["unsupported", "off", "upgraded"] | None:
        return self._context.bypass

    @property
    def began(self) -> Beginning:
        return self._context.began

    @property
    def epoch(self) -> Epoch:
        """The tenant's epoch in which the request began."""
        return self._context.epoch

    @property
    def nodes(self) -> PromptNodes:
        """The nodes of the prompt; once `publish_reply` was called, of the prompt and its reply."""
        return self._saver.planner.nodes

    @property
    def selection(self) -> Selection:
        """The part of the prompt to save. Set by `choose`."""
        return self._saver.selection

    def restore(self, sequence: KVSequence, in_memory_tokens: int = 0) -> RestoreResult:
        """Runs all steps of a restore into a sequence that has the first `in_memory_tokens` tokens, and `choose`."""
        restore = self.begin_restore(sequence, self.prompt.token_ids, in_memory_tokens)
        restore.run(prefetches=True)
        self.adopt_restore(restore)
        self.choose(sequence)
        return self.restored

    def fetch(self, sequence: KVSequence, in_memory_tokens: int = 0, logits: Logits | None = None) -> None:
        """Runs the steps of a restore but `prefetch`. See `Restore`."""
        restore = self.begin_restore(sequence, self.prompt.token_ids, in_memory_tokens, logits)
        restore.run()
        self.adopt_restore(restore)

    def begin_restore(
        self,
        sequence: KVSequence,
        token_ids: TokenIds,
        in_memory_tokens: int = 0,
        logits: Logits | None = None,
        on_logits: Callable[[Logits], None] = lambda _: None,
        on_block: Callable[[int], None] = lambda _: None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Restore:
        """Returns a restore, whose steps are still to be run, for `adopt_restore`. Does not wait. `token_ids` are the
        prompt. For a preempted reply, they are the prompt and the sampled tokens; the last one is computed in any
        case."""
        return Restore(
            self._context,
            self.nodes if token_ids is self.nodes.token_ids else self.nodes.extended(token_ids),
            sequence,
            in_memory_tokens,
            logits,
            on_logits=on_logits,
            on_block=on_block,
            is_wanted=is_wanted,
            computes_last=self.options.computes_last or len(token_ids) > len(self.prompt.token_ids),
        )

    def adopt_restore(self, restore: Restore, *, gave_up: bool = False) -> RestoreResult:
        """Takes over the result of a restore, none of whose steps runs any more, and returns it. The first result
        before `choose` is the request's, later results are the replies'. With `gave_up`, any step but `load` may still
        run, and the result is what the sequence had before. For the engine's thread."""
        restored = restore.in_memory if gave_up else restore.restored
        restore.sequence.truncate(restored.num_tokens)
        if not self.is_chosen:
            self.restored, self._load_s = restored, restore.load_s
            self._miss_reason = "error" if gave_up else restore.miss_reason
            if not gave_up:
                self._pins.callback(restore.close)
        elif not gave_up:
            restore.close()
        return restored

    def choose(self, sequence: KVSequence | None) -> None:
        """Selects what to save, given the result of the restore. For the engine's thread, before the first step. The
        sequence is None for a model that computes in memory of its own."""
        restored, self.is_chosen = self.restored, True
        if restored.last_node is not None:
            ttl_s = self._context.ttl_at(restored.stored_tokens)
            self.cache.writer.touch(restored.last_node, time.time(), ttl_s)
        self._saver.begin_saving(restored, self._select() if self._bypass is None else None)
        prompt, selection = self.prompt, self.selection
        if self._bypass is None and prompt.source is not None:
            # The search compares whole prompts, and its result is only reported.
            self._broken = self.cache.background.submit(find_lost_prefix, prompt, self._sighting, restored, selection)
        misses = is_miss(len(prompt.token_ids), restored.num_tokens)
        self._lacks_reason = misses and self._miss_reason is None
        if not misses:
            self._miss_reason = None
        if sequence is not None and self._saves:
            with self._context.guarded("not all of the prompt is saved"):
                self._save_sliding_blocks(sequence)

    def choose_ahead(self, sequence: KVSequence) -> None:
        """Selects all of a prompt that nobody has asked for yet, unless the write budget is scarce. Like `choose`."""
        self.is_chosen, selection = True, None
        if self._bypass is None and self._may_save_unselected(sequence):
            layout, settings = self.cache.layout, self.cache.settings
            grid = Rules.of(settings, layout.state_kind, layout.state_bytes).grid
            selection = selection_ahead(self.prompt, self.options.scope, layout.state_kind, grid)
        self._saver.begin_saving(self.restored, selection)

    def _select(self) -> Selection:
        """Returns the part of the prompt to save, by the policy, the write budget and the measured speeds."""
        cache, prompt, options, restored = self.cache, self.prompt, self.options, self.restored
        stored = restored.stored_tokens
        rules = Rules.of(cache.settings, cache.layout.state_kind, cache.layout.state_bytes)
        self._spending = cache.spending(options.share)
        evictor, names = cache.store.evictor, self.nodes.path.block_names
        self._sighting = sighting_of(self.namespace.seen, prompt, options, names, evictor.stays_s)
        selection = selection_of(self._sighting, rules, prompt, options, stored)
        evictor.refuse(refused_tokens(self._sighting, selection, stored) * cache.layout.bytes_per_token)
        had, is_asked = max(restored.num_tokens, stored), options.is_asked
        selection = within_budget(selection, prompt, self._spending, rules, stored=stored, had=had, is_asked=is_asked)
        if self._context.is_prefix_only and selection.keep_tail:
            # Only the states of the tail are kept, as a checkpoint.
            points = (*selection.checkpoints, selection.aligned) if cache.layout.states else ()
            selection = replace(selection, keep_tail=False, checkpoints=points, votes=())
        lacks_room = selection.kept > stored and not cache.has_disk_room(selection.kept)
        if lacks_room or (selection.reason == "no_room" and cache.is_disk_full):
            return selection.keeping_nothing("disk")
        if selection.kept and cache.must_recheck:
            # What is stored may be of a build with other bits, which goes on with it.
            return selection.keeping_nothing("upgraded")
        if selection.kept and not self._allows_saving(selection.kept):
            return selection.keeping_nothing("faster_to_compute")
        if selection.reason == "write_budget":
            cache.count("unaffordable")
        if self._spending is not None:
            cache.spend(options.share, self._spending.cost(selection, stored))
        return selection

    @property
    def _saves(self) -> bool:
        """Returns whether state is saved: the request uses the cache, the store works, and nothing has failed."""
        return self._bypass is None and self.cache.store.problem is None and not self._saver.save.has_failed

    def _allows_saving(self, num_tokens: int) -> bool:
        """Returns whether to save the state of the first `num_tokens` tokens."""
        if self.cache.bits.state != "settled" or not self.cache.has_disk_room(num_tokens):
            return False
        return self._context.allows("save", pays=self.cache.cost_model.allows(num_tokens))

    def _may_save_unselected(self, sequence: KVSequence) -> bool:
        """Returns whether state may be saved that the policy did not select."""
        spending = self.cache.spending()
        is_allowed = self.options.save and (spending is None or spending.is_ample)
        return is_allowed and self._allows_saving(sequence.num_tokens)

    def after_step(self, sequence: KVSequence) -> None:
        """Queues the selected blocks that the prefill has completed. Takes a checkpoint if one is selected here or if a
        kill would lose too much: the next step overwrites the states."""
        if not self._saves:
            return
        self.cache.writer.pause_writing()
        saver, num_tokens = self._saver, sequence.num_tokens
        with self._context.guarded("not all of the prompt is saved"):
            if num_tokens in self.selection.checkpoints:
                saver.states_at.add(num_tokens)
            elif saver.needs_interim(num_tokens) and self._may_save_unselected(sequence):
                saver.queue_interim(sequence)
            missing = saver.planner.missing(min(num_tokens, self.selection.aligned), saver.states_at)
            saver.queue(sequence, SavePlan(missing))
            self._save_sliding_blocks(sequence)

    def _save_sliding_blocks(self, sequence: KVSequence) -> None:
        """Queues complete blocks that will slide out of the memory of windows: without them, a later turn could save
        nothing."""
        if not sequence.slides(len(self.prompt.token_ids)):
            return
        missing = self._saver.planner.missing(sequence.num_tokens, self._saver.states_at)
        if missing and missing[0].position >= sequence.complete_from and self._may_save_unselected(sequence):
            self._saver.queue(sequence, SavePlan(missing), min_ttl_s=_MIN_TTL_S)

    def publish(self, sequence: KVSequence | None, logits: Logits | None, prefill_s: float) -> None:
        """Queues the rest of the selected part of the prompt, with the entry and the prompt as seen.

        The sequence is None for a model that computes in memory of its own. `logits` are the next-token logits at the
        prompt's end, shape [vocab]; None if the prompt is only a beginning and was restored. If logits are not finite,
        nothing more is saved. `prefill_s` is the time of computing the tokens that were not restored, in seconds. It is
        measured, and the prompt is remembered, even if nothing can be saved.
        """
        self.cache.writer.resume_writing()
        self.is_published = True
        if self._bypass is not None or sequence is None:
            return
        assert sequence.num_tokens == len(self.prompt.token_ids), "state length must equal key length"
        if self.restored.source == "disk":
            self.cache.cost_model.record_restore(self.restored.num_bytes, self._load_s)
        path: TokenPath | None = None
        with self._context.guarded("the prompt is not remembered"):
            self._record_prefill(prefill_s)
            path = self._remember_prompt()
        if self.cache.store.problem is not None:
            # The problem is logged once, not for every prompt.
            if self.selection.reason != "disk":
                self.cache.writer.fail(self._saver.save, "")
            return
        if logits is not None and not np.isfinite(logits.max()):
            self.cache.writer.fail(self._saver.save, "its next-token logits are not finite")
            return
        with self._context.guarded("the prompt is not saved"):
            self._save_prompt(sequence, logits, path)

    @property
    def _num_computed(self) -> int:
        """The tokens of the prompt that were not restored."""
        return len(self.prompt.token_ids) - self._saver.planner.restored.num_tokens

    def _record_prefill(self, prefill_s: float) -> None:
        if num_computed := self._num_computed:
            self._saver.token_s = prefill_s / num_computed
            self.cache.cost_model.record_prefill(num_computed, prefill_s)

    def _remember_prompt(self) -> TokenPath | None:
        """Adds the prompt to those seen and returns its path. Returns None if it is too short, only read, or lacks
        messages of its conversation."""
        path, token_ids = self.nodes.path, self.prompt.token_ids
        is_too_short = len(token_ids) < self.cache.settings.kv_cache_min_tokens
        if is_too_short or not self.options.save or self.selection.reason == "left_out":
            return None
        now, lasts_s = self.cache.store.clock(), self.cache.lasts_s(self._context.ttl_at(len(token_ids)))
        self.namespace.remember(token_ids, self.options.group, path.block_names, now, lasts_s)
        return path

    def _save_prompt(self, sequence: KVSequence, logits: Logits | None, seen: TokenPath | None) -> None:
        """Queues the rest of the prompt, with the entry, and the prompt as `seen`."""
        saver, planner, selection = self._saver, self._saver.planner, self.selection
        with_end = not planner.leaves_end(selection)
        plan = SavePlan() if saver.save.has_failed else planner.plan(selection, saver.states_at, with_end=with_end)
        self._is_stored = plan.last_node is not None
        has_tail = bool(plan.nodes) and plan.nodes[-1].kind == NodeKind.TAIL
        assert logits is not None or not selection.keep_tail, "a prompt that goes on has no tail"
        saver.queue(sequence, replace(plan, prompt=seen), logits=logits)
        has_tail |= planner.restored.has_tail
        is_end_known = logits is not None and (has_tail or self._num_computed > 0)
        if planner.state == "token" and selection.keep_tail and logits is not None and is_end_known:
            self._logits = planner.nodes.end_id, sequence.logits_bytes(logits)
            if not has_tail:
                self._save_logits()
        if self.options.save:
            for name, ttl_s in marked_nodes(planner.nodes, self.prompt.marks, self.options.ttl_s):
                self.cache.writer.touch(name, time.time(), ttl_s, hits=0)

    def _save_logits(self) -> None:
        """Stores the logits at the prompt's end as a note."""
        if self._logits is None or self._saver.save.has_failed:
            return
        (end_id, logits), self._logits = self._logits, None
        # As a node does, the note says which build has computed it.
        content = bytes(logits) + self.cache.bits.digest
        token_ids = self.prompt.token_ids
        notes = self._context.notes(self._context.ttl_at(len(token_ids)))
        # Compressing them takes milliseconds, for which the engine's thread does not wait.
        self.cache.run_aside(partial(notes.put, NoteKind.LOGITS, end_id, content, token_ids))

    def publish_reply(self, sequence: KVSequence, token_ids: TokenIds) -> None:
        """Queues the selected part of the reply, if the model is exact at every token: decoding then computes the same
        bits as a prefill. `token_ids` are the tokens in the sequence, of the prompt and the reply. Queues nothing if
        the write budget has no room for it."""
        assert sequence.num_tokens == len(token_ids), "state length must equal key length"
        self.reply = token_ids[len(self.prompt.token_ids) :]
        if not self._saves or self.cache.layout.state_kind not in AT_ANY_TOKEN:
            return
        with self._context.guarded("the reply is not saved"):
            sequence.complete_pages()
            self._save_reply(sequence, self.nodes.extended(token_ids))

    def _save_reply(self, sequence: KVSequence, nodes: PromptNodes) -> None:
        saver, planner, num_tokens = self._saver, self._saver.planner, len(nodes.token_ids)
        stop, spending = planner.reply_stop(num_tokens, self.selection), self._spending
        stored, is_asked = planner.restored.stored_tokens, self.options.is_asked
        if stop and spending is not None and not spending.allows_reply(num_tokens, stored, is_asked=is_asked):
            stop = 0
        if not stop:
            self._save_end(sequence)
            return
        if spending is not None:
            num_new = max(0, num_tokens - self.selection.kept)
            self.cache.spend(self.options.share, num_new * spending.bytes_per_token)
        if self.cache.layout.states:
            saver.states_at.add(sequence.num_tokens)
        plan = planner.plan_reply(nodes, stop, self.selection, saver.states_at)
        if plan.last_node is not None:
            saver.queue(sequence, replace(plan, has_entry=True))
            # The reply takes the place of the tail.
            self._save_logits()

    def _save_end(self, sequence: KVSequence) -> None:
        """Queues the end of a prompt that was left for a reply, because the reply is not saved."""
        planner, selection = self._saver.planner, self.selection
        if self.is_published and planner.leaves_end(selection):
            self._saver.queue(sequence, planner.plan(selection, self._saver.states_at))

    def save_partial(self, sequence: KVSequence, token_ids: TokenIds) -> None:
        """Queues the state of a request that is cancelled or waits for memory, so that the request continues there when
        it comes again. `token_ids` are the tokens in the sequence. State that the policy did not select is kept for at
        least ten minutes."""
        is_exact = len(token_ids) <= len(self.prompt.token_ids) or self.cache.layout.state_kind in AT_ANY_TOKEN
        if not self._saves or not is_exact:
            # On the grid, decoding computes other bits than a prefill.
            return
        with self._context.guarded("the state of the cancelled or waiting request is not saved"):
            sequence.complete_pages()
            self._save_end(sequence)
            if self._may_save_unselected(sequence):
                self._save_all(sequence, self.nodes.extended(token_ids), _MIN_TTL_S)

    def _save_all(self, sequence: KVSequence, nodes: PromptNodes, min_ttl_s: float) -> None:
        """Queues all state that the sequence has and the store lacks. `nodes` are for the tokens in the sequence. The
        time to live of state that the policy did not select is at least `min_ttl_s`."""
        saver, planner, num_tokens = self._saver, self._saver.planner, sequence.num_tokens
        if len(nodes.token_ids) > len(planner.nodes.token_ids):
            planner.nodes = nodes
        restored, is_block_end = planner.restored, num_tokens % nodes.block_size == 0
        has_more = num_tokens >= restored.num_tokens + LEAST_TOKENS
        if self.cache.layout.states and has_more and (is_block_end or planner.state in AT_ANY_TOKEN):
            saver.states_at.add(num_tokens)
        saver.queue(sequence, SavePlan(planner.missing(num_tokens, saver.states_at)), min_ttl_s=min_ttl_s)
        if planner.state == "token" and not is_block_end and num_tokens > restored.stored_tokens:
            saver.queue(sequence, SavePlan((planner.nodes.partial_block(num_tokens),)), min_ttl_s=min_ttl_s)

    def save_idle(self, sequence: KVSequence) -> None:
        """Queues the state of a prompt that the store lacks, as far as the sequence has it, and ends the request
        without counting it. The prompt has one token more than the sequence. For a thread that has the sequence for
        itself."""
        try:
            if self._bypass is None:
                self.fetch(sequence, in_memory_tokens=sequence.num_tokens)
                self._saver.begin_saving(replace(self.restored, num_tokens=self.restored.stored_tokens))
                if self._saves and self._may_save_unselected(sequence):
                    with self._context.guarded("idle state is not saved"):
                        self._save_all(sequence, self.nodes, min_ttl_s=0.0)
        finally:
            self.leave()

    def close(self) -> CacheReport:
        """Releases what the request holds, counts it, and returns the report."""
        restored = self.restored
        try:
            broken = self._found_break()
            if self._lacks_reason:
                self._miss_reason = why_missed(
                    self.prompt, self._sighting, restored, self.selection, broken, self.cache.settings
                )
        finally:
            self.leave()
        if self._bypass is None:
            self._upload()
        self.cache.counters["prompt_tokens"] += len(self.prompt.token_ids)
        if restored.num_tokens:
            self.cache.restored_tokens[restored.source] += restored.num_tokens
            self.cache.counters["restored_bytes"] += restored.num_bytes
        if self._miss_reason is not None:
            self.cache.misses[self._miss_reason] += 1
        if self._bypass is None and self.cache.has_own_threads:
            # The state of a draft model belongs to another request, which is counted.
            self._record_savings()
        save = self._saver.save
        saved: Saved = "queued" if save.has_nodes else "stored" if self._is_stored else "none"
        report = CacheReport(
            selection=self.selection,
            restored=restored.num_tokens,
            source=restored.source,
            miss_reason=self._miss_reason,
            stored_with=restored.otherwise.options if self._miss_reason == "other_settings" else {},
            matched=restored.matched,
            refused=restored.refused,
            restore_ms=restored.restore_ms,
            saved=saved if save.lost is None else "dropped",
            dropped_because=None if save.lost is None else save.lost or _STORE_FAILS,
            broken=broken,
            broken_line=self.prompt.source.line_at(broken.at) if broken and self.prompt.source else "",
            broken_tool=self.prompt.source.tool_at(broken.at) if broken and self.prompt.source else "",
            broken_date=bool(broken and self.prompt.source and self.prompt.source.is_date_at(broken.at)),
            recomputed=self._lost_tokens(broken),
            rewriting=self.prompt.rewriting,
            replayed=self.prompt.replayed,
            unverified=restored.num_unverified,
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

    def _lost_tokens(self, broken: Break | None) -> tuple[Lost, ...]:
        """Returns the tokens that are computed again. Leaves out fewer than lie between two restorable positions."""
        if self._bypass is not None:
            return ()
        least = LEAST_TOKENS if self.cache.layout.state_kind == "token" else self.cache.settings.block_size
        return lost_tokens(self.prompt, self.restored, self.selection, broken, self._miss_reason, least)

    def _record_savings(self) -> None:
        """Counts the request, with the seconds that the cache saved."""
        restored = self.restored
        prefill_s = restored.prefill_s or restored.num_tokens * (self.cache.cost_model.prefill_s_per_token or 0.0)
        counts = Tally(
            requests=1,
            prompt_tokens=len(self.prompt.token_ids),
            restored_tokens=restored.num_tokens,
            saved_s=max(0.0, prefill_s - restored.restore_ms / 1e3),
        )
        self.cache.tiered.savings.record_request(self.epoch, self.namespace.root, self.namespace.record, counts)

    def _upload(self) -> None:
        """Queues the stored part of the prompt and its reply for the shared tier, by `--remote-write`."""
        cache, nodes = self.cache, self.nodes
        if cache.remote is None or not self.options.save or self.restored.num_unverified:
            return
        num_tokens = self.selection.shared(cache.settings.remote_write, len(nodes.token_ids), self.restored.num_tokens)
        if num_tokens >= nodes.block_size:
            is_current = partial(cache.store.is_current, self.epoch)
            cache.remote.upload(Upload(nodes, num_tokens, self.namespace.record, cache.tiers, is_current))

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
        origin = PromptOrigin("partial", PromptDigest.of(cache.epoch(options.tenant).secret, token_ids))
        request = CachedRequest(cache, Prompt(np.append(token_ids, token_ids[-1:])), options, origin=origin)
        # The request is new, its state is not.
        if not cache.is_gone(owner):
            request.save_idle(sequence)
