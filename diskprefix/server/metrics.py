"""Prometheus metrics. Figures of the cache are read from the cache at each scrape."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from diskprefix.engine.request import DoneEvent
from diskprefix.server.serving import Serving

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)

_CACHE_COUNTERS = {
    "hits": "Requests that restored something.",
    "restored_tokens": "Tokens restored.",
    "restored_bytes": "Bytes restored.",
    "saved_tokens": "Tokens written.",
    "saved_bytes": "Bytes written, before compression.",
    "dropped": "Publications refused because the buffer or the budget was full.",
    "evicted_blocks": "Blocks evicted to stay within the budget.",
    "expired_blocks": "Blocks removed because they were not used for the time to live.",
    "quarantined": "Records set aside because they failed their checks.",
    "errors": "Cache errors that became misses.",
}
_CACHE_GAUGES = {
    "entries": "Entries in the store.",
    "blocks": "Blocks in the store.",
    "used_bytes": "Bytes of the pages that hold data.",
    "file_bytes": "Bytes of the file: pages that hold data, and free ones.",
    "budget_bytes": "Bytes that the store may use.",
    "pending_bytes": "Bytes waiting to be written.",
}
_GATE_GAUGES = {
    "prefill_s_per_token": ("prefill_seconds_per_token", "Measured: computing one more token of a prompt."),
    "restore_s_per_byte": ("restore_seconds_per_byte", "Measured: restoring one more byte."),
    "restore_fixed_s": ("restore_fixed_seconds", "Measured: what a restore takes whatever its size."),
}
"""Name of a figure in the gate's report → name and help of its metric."""


class ServerMetrics:
    """What the server counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "diskprefix_requests", "HTTP requests answered.", ["route", "status"], registry=self.registry
        )
        self._tokens = Counter("diskprefix_tokens", "Tokens of finished requests.", ["kind"], registry=self.registry)
        self._seconds = {
            phase: Histogram(f"diskprefix_{phase}_seconds", text, buckets=_SECONDS, registry=self.registry)
            for phase, text in (
                ("ttft", "Arrival in the queue to the first token."),
                ("queue", "Waiting for the engine."),
                ("restore", "Restoring from the cache."),
                ("prefill", "Computing the rest of the prompt."),
                ("decode", "Generating the reply."),
            )
        }
        for kind in ("prompt", "completion", "restored", "drafted", "accepted"):
            self._tokens.labels(kind)
        ProcessCollector(registry=self.registry)

    def count_request(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def count_generation(self, done: DoneEvent) -> None:
        """Adds the figures of a request that ended well."""
        self._tokens.labels("prompt").inc(done.usage.prompt_tokens)
        self._tokens.labels("completion").inc(done.usage.completion_tokens)
        self._tokens.labels("restored").inc(done.cache.restored)
        self._tokens.labels("drafted").inc(done.timings.drafted_tokens)
        self._tokens.labels("accepted").inc(done.timings.accepted_tokens)
        for phase, histogram in self._seconds.items():
            histogram.observe(getattr(done.timings, f"{phase}_ms") / 1000)

    async def render(self, serving: Serving | None) -> bytes:
        """Returns the text that a scrape gets. `serving` is None while the model loads."""
        stats = await serving.cache_stats() if serving else {}
        return generate_latest(self.registry) + generate_latest(_EngineCollector(serving, stats))


_KV_MEMORY_GAUGES = {
    "limit_bytes": "What --kv-memory allows for the state of requests.",
    "used_bytes": "Memory that the state of requests takes.",
    "max_entries": "What --kv-memory-entries allows.",
    "entries": "Requests that ended and whose state is in memory.",
    "entry_tokens": "The tokens of those.",
    "running": "Replies that are being computed.",
}


class _EngineCollector(Collector):
    """Figures of the queue and the cache, for one scrape."""

    def __init__(self, serving: Serving | None, stats: dict[str, Any]) -> None:
        self._serving = serving
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        serving = self._serving
        yield GaugeMetricFamily("diskprefix_ready", "1 once the model is loaded.", value=float(serving is not None))
        if serving is None:
            return
        inbox = serving.inbox
        yield GaugeMetricFamily("diskprefix_queue_depth", "Requests that wait.", value=inbox.queue_depth)
        yield GaugeMetricFamily("diskprefix_running", "Requests in the engine.", value=float(inbox.num_running))
        for name, value in serving.engine.memory_stats().items():
            yield GaugeMetricFamily(f"diskprefix_kv_memory_{name}", _KV_MEMORY_GAUGES[name], value=value)
        yield from _cache_metrics(self._stats)


def _cache_metrics(stats: dict[str, Any]) -> Iterator[Metric]:
    for name, text in _CACHE_COUNTERS.items():
        yield CounterMetricFamily(f"diskprefix_cache_{name}", text, value=stats[name])
    for name, text in _CACHE_GAUGES.items():
        yield GaugeMetricFamily(f"diskprefix_cache_{name}", text, value=stats[name])
    degraded = float(stats["state"] == "degraded")
    yield GaugeMetricFamily("diskprefix_cache_degraded", "1 while the store cannot be used.", value=degraded)
    misses = CounterMetricFamily("diskprefix_cache_misses", "Requests that restored nothing.", labels=["reason"])
    for reason, count in stats["misses"].items():
        misses.add_metric([reason], count)
    yield misses
    # A speed that was not measured yet has no value.
    gate = stats["gate"]
    for figure, (name, text) in _GATE_GAUGES.items():
        yield GaugeMetricFamily(f"diskprefix_gate_{name}", text, value=gate[figure])
    skipped = CounterMetricFamily(
        "diskprefix_gate_skipped", "Restores and saves left out, as computing is faster.", labels=["use"]
    )
    for use in ("restore", "save"):
        skipped.add_metric([use], gate[f"skipped_{use}s"])
    yield skipped
