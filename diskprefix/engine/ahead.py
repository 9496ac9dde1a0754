"""Computes prompts before they are asked for, while nobody waits: above all the history as the chat template will write
it at the next question, without the thoughts of earlier turns."""

from __future__ import annotations

import logging
import time

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.engine.ahead_jobs import AheadJob, AheadJobs
from diskprefix.engine.idle_work import IdleWork, Steps
from diskprefix.tokens import LEAST_TOKENS
from diskprefix.values import CacheOptions, CacheReport, Prompt

log = logging.getLogger("diskprefix")


class Ahead:
    """The idle task that computes the jobs."""

    def __init__(self, idle: IdleWork, jobs: AheadJobs) -> None:
        self._idle, self._jobs = idle, jobs
        self._job: AheadJob | None = None

    @property
    def wait_s(self) -> float | None:
        return self._jobs.wait_s

    def begin(self) -> Steps | None:
        self._job = self._jobs.next()
        return None if self._job is None else self._compute(self._job)

    def give_up(self, reason: str) -> None:
        log.info("[engine] a prompt is not computed ahead: %s", reason)
        if self._job is not None:
            self._jobs.drop(self._job)

    def _compute(self, job: AheadJob) -> Steps:
        model, cache, options = job.model, job.model.cache, job.options
        yield (made := self._idle.read(job.make))
        prompt: Prompt | None = made.result()
        if prompt is None or len(prompt.token_ids) < cache.settings.kv_cache_min_tokens:
            self._jobs.drop(job)
            return
        token_ids = prompt.token_ids
        with self._idle.restoring(model, prompt, options, job.owner) as restored:
            yield restored.reading
            sequence, cached, start = restored.sequence, restored.cached, restored.num_restored()
            # What was asked before a purge is not stored after it.
            is_gone = job.owner.purged_at != cached.epoch.purged_at
            if len(token_ids) - start >= LEAST_TOKENS and not is_gone:
                cached.choose_ahead(sequence)
                if model is self._idle.served:
                    self._record(prompt, options, cached, start)
                # Bound: each step computes a token or more.
                while sequence.num_tokens < len(token_ids):
                    began_s, num_tokens = time.process_time(), sequence.num_tokens
                    self._idle.compute(model, sequence, token_ids)
                    model.pages.set_ready(sequence, sequence.num_tokens)
                    cache.counters["ahead_tokens"] += sequence.num_tokens - num_tokens
                    cached.after_step(sequence)
                    if not self._jobs.spend(job, time.process_time() - began_s):
                        # The rest is computed when there is time again, unless it was purged.
                        return
                    yield None
                cached.save_partial(sequence, token_ids)
                log.info("[engine] %d of %d tokens were computed ahead", len(token_ids) - start, len(token_ids))
        self._jobs.drop(job)

    def _record(self, prompt: Prompt, options: CacheOptions, cached: CachedRequest, restored: int) -> None:
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
