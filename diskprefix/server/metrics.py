"""What the server counts for Prometheus: requests, and what their responses say.

Names and units follow Prometheus' conventions: base units (seconds, bytes), the unit in the name, `_total` for a
counter.
"""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from diskprefix.engine.request import DoneEvent
from diskprefix.server.collected import EngineCollector
from diskprefix.server.log_context import OUTCOMES, LogContext
from diskprefix.server.serving import Serving
from diskprefix.version import __version__

# The creation times of the series would double the length of a scrape.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)

_PHASES = {
    "queue": "Time from the arrival of a request in the queue until the engine takes it.",
    "prefill": "Time that the steps of a prompt's computation take.",
    "decode": "Time from the first token of a reply to the last.",
}


class ServerMetrics:
    """Counters and histograms, kept in this object, and read with those of the engine at each scrape."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._http = Counter(
            "diskprefix_http_requests", "HTTP requests answered.", ["route", "status"], registry=registry
        )
        self._requests = Counter(
            "diskprefix_requests",
            "Requests for a reply, by how they ended: completed, cancelled (the client left), rejected (the queue was "
            "full, or the daemon stopped), invalid (400 and the like) or failed.",
            ["outcome"],
            registry=registry,
        )
        self._prompt_tokens = Counter(
            "diskprefix_prompt_tokens",
            "Prompt tokens of completed requests, by where their state came from: computed, memory, disk or remote.",
            ["source"],
            registry=registry,
        )
        self._reply_tokens = Counter(
            "diskprefix_generation_tokens", "Tokens of the replies to completed requests.", registry=registry
        )
        self._draft_tokens = Counter(
            "diskprefix_draft_tokens",
            "Guessed tokens that were computed for completed requests (--speculative), and what became of them.",
            ["result"],
            registry=registry,
        )
        self._first_token = Histogram(
            "diskprefix_time_to_first_token_seconds",
            "Time from the arrival of a request in the queue to its first token: hit if something was restored.",
            ["cache"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._restore = Histogram(
            "diskprefix_restore_seconds",
            "Time that reading, verifying and copying stored state takes, of requests that restored something.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._phases = {
            phase: Histogram(f"diskprefix_{phase}_seconds", text, buckets=_SECONDS, registry=registry)
            for phase, text in _PHASES.items()
        }
        self._begin_at_zero()
        ProcessCollector(registry=registry)

    def _begin_at_zero(self) -> None:
        """A series that appears with its first event has no rate before the second."""
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        for source in ("computed", "memory", "disk", "remote"):
            self._prompt_tokens.labels(source)
        for result in ("accepted", "rejected"):
            self._draft_tokens.labels(result)
        for cache in ("hit", "miss"):
            self._first_token.labels(cache)

    def count_request(self, route: str, record: LogContext) -> None:
        """Counts an HTTP request that is over."""
        self._http.labels(route, str(record.status)).inc()
        if record.outcome is not None:
            self._requests.labels(record.outcome).inc()

    def count_generation(self, done: DoneEvent) -> None:
        """Adds the figures of a request that ended well: those that its response tells."""
        usage, cache, timings = done.usage, done.cache, done.timings
        if cache.restored:
            self._prompt_tokens.labels(cache.source).inc(cache.restored)
            self._restore.observe(timings.restore_ms / 1e3)
        self._prompt_tokens.labels("computed").inc(usage.prompt_tokens - cache.restored)
        self._reply_tokens.inc(usage.completion_tokens)
        self._draft_tokens.labels("accepted").inc(timings.accepted_tokens)
        self._draft_tokens.labels("rejected").inc(timings.drafted_tokens - timings.accepted_tokens)
        self._first_token.labels("hit" if cache.restored else "miss").observe(timings.ttft_ms / 1e3)
        for phase, histogram in self._phases.items():
            histogram.observe(getattr(timings, f"{phase}_ms") / 1e3)

    async def render(self, serving: Serving | None) -> bytes:
        """Returns the text that a scrape gets. `serving` is None while the model loads."""
        stats = await serving.cache_stats() if serving else {}
        return generate_latest(self.registry) + generate_latest(EngineCollector(__version__, serving, stats))
