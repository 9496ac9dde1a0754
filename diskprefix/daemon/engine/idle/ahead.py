"""Computes prompts ahead of requests while the engine is idle: mainly the history as the chat template will write it
for the next question, without the thoughts of earlier turns. On the grid that includes the last reply, whose rows have
other bits when they are computed one by one."""

from __future__ import annotations

import logging
import time
from functools import partial

from diskprefix.daemon.engine.idle.ahead_jobs import AheadJob, AheadJobs
from diskprefix.daemon.engine.idle.idle_work import IdleWork, Steps
from diskprefix.errors import CacheError
from diskprefix.prefixstore.cache.cache import PrefixCache
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.cache.context import RequestContext
from diskprefix.prefixstore.cache.matching import Matcher
from diskprefix.prefixstore.cache.tiers.nodes import PromptNodes
from diskprefix.prefixstore.cache.tiers.tier import open_views
from diskprefix.prefixstore.store.reads import Patience
from diskprefix.tokens import LEAST_TOKENS, TokenPath, floor_to_grid
from diskprefix.values import CacheOptions, CacheReport, Prompt

log = logging.getLogger("diskprefix")


class Ahead:
    """The idle task that computes the jobs."""

    goes_beside = False

    def __init__(self, idle: IdleWork, jobs: AheadJobs) -> None:
        self._idle, self._jobs = idle, jobs
        self._job: AheadJob | None = None

    @property
    def wait_s(self) -> float | None:
        return self._jobs.wait_s

    def next_steps(self) -> Steps | None:
        self._job = self._jobs.next()
        return None if self._job is None else self._compute(self._job)

    def give_up(self, reason: str) -> None:
        log.debug("[engine] a prompt is not computed ahead: %s", reason)
        if self._job is not None:
            self._jobs.drop_job(self._job)

    def _compute(self, job: AheadJob) -> Steps:
        model, cache, options = job.model, job.model.cache, job.options
        yield (made := self._idle.submit_read(partial(prompt_to_compute, job)))
        prompt: Prompt | None = made.result()
        if prompt is None:
            self._jobs.drop_job(job)
            return
        token_ids = prompt.token_ids
        with self._idle.restoring(model, prompt, options, job.owner, job.origin) as restored:
            yield restored.reading
            sequence, cached, start = restored.sequence, restored.cached, restored.num_restored()
            # State of a request from before a purge is not stored after it.
            if len(token_ids) - start >= LEAST_TOKENS and not cache.is_gone(job.owner):
                cached.choose_ahead(sequence)
                if model is self._idle.served:
                    self._record_prompt(prompt, options, cached, start)
                # Bound: each step computes at least one token.
                while sequence.num_tokens < len(token_ids):
                    began_s, num_tokens = time.process_time(), sequence.num_tokens
                    self._idle.compute_step(model, sequence, token_ids)
                    model.pages.set_ready(sequence, sequence.num_tokens)
                    cache.counters["ahead_tokens"] += sequence.num_tokens - num_tokens
                    job.num_ready = sequence.num_tokens
                    cached.after_step(sequence)
                    if not self._jobs.spend(job, time.process_time() - began_s):
                        # The rest is computed in the next turn of its share, unless the prompt was purged.
                        return
                    yield None
                cached.save_partial(sequence, token_ids)
                log.debug("[engine] %d of %d tokens were computed ahead", len(token_ids) - start, len(token_ids))
        self._jobs.drop_job(job)

    def _record_prompt(self, prompt: Prompt, options: CacheOptions, cached: CachedRequest, restored: int) -> None:
        if (recorder := self._idle.served.recorder) is not None:
            recorder.record_request(
                *(prompt, options, CacheReport(selection=cached.selection, restored=restored)),
                root=cached.namespace.root,
                when=time.time(),
                reply=prompt.token_ids[:0],
                prefill_ms=0.0,
                remembered=False,
                is_ahead=True,
            )


def prompt_to_compute(job: AheadJob, patience: Patience | None = None) -> Prompt | None:
    """Returns the prompt of a job, None if there is nothing to compute. Sets the job's counts. Waits for the disk; for
    `patience` see `Reads.ask`."""
    cache, prompt = job.model.cache, job.make()
    if prompt is not None and cache.layout.exact_at == "grid":
        # The rest of the prompt would be a step that the next prompt does not take.
        prompt = prompt.until(floor_to_grid(len(prompt.token_ids), cache.settings.block_size))
    if prompt is None or len(prompt.token_ids) < cache.settings.kv_cache_min_tokens:
        return None
    job.num_tokens, job.num_ready = len(prompt.token_ids), _num_ready(job, prompt, patience)
    return prompt if job.num_tokens - job.num_ready >= LEAST_TOKENS else None


def _num_ready(job: AheadJob, prompt: Prompt, patience: Patience | None) -> int:
    """Returns how many of a prompt's first tokens are in memory, or in a tier from which they can be restored. A tier
    that fails has none."""
    cache = job.model.cache
    context = RequestContext(cache, cache.begin(job.options), prompt, job.options, is_prefix_only=True)
    if context.bypass is not None:
        return 0
    token_ids, size = prompt.token_ids, cache.settings.block_size
    in_memory = job.model.pages.match_prefix(job.owner, job.owner.path(token_ids, size)).prefix.num_tokens
    # The file may have another secret than the names in memory.
    stored = TokenPath(context.epoch.secret, context.namespace.root, token_ids, size)
    try:
        return max(in_memory, cache.store.reads.ask(partial(_num_stored, cache, stored), patience))
    except CacheError:
        return in_memory


def _num_stored(cache: PrefixCache, path: TokenPath) -> int:
    with open_views(cache.tiers) as views:
        nodes = PromptNodes(path, cache.payload_layout)
        matcher = Matcher(nodes, views, cache.layout.state_kind, needs_logits=False)
        matcher.match()
        return matcher.restorable()[1]
