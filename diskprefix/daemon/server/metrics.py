"""The metrics for Prometheus: counts and times of requests, and figures of the engine that are read at each scrape.

Names follow Prometheus' conventions: base units (seconds, bytes), the unit in the name, `_total` for a counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from diskprefix.daemon.engine.gauges import Distribution
from diskprefix.daemon.engine.request import DoneEvent
from diskprefix.daemon.server.log_context import OUTCOMES, LogContext
from diskprefix.daemon.server.serving import Serving
from diskprefix.values import MISS_REASONS, CacheOutcome
from diskprefix.version import __version__

_COUNTERS = {
    "saved_s": ("saved_seconds", "Time that computing the restored tokens would have taken, less the restore times."),
    "restored_bytes": ("store_read_bytes", "Bytes of state that were restored."),
    "saved_tokens": ("store_written_tokens", "Tokens whose state was written."),
    "saved_bytes": ("store_written_bytes", "Bytes of state that were written, before compression."),
    "dropped": (
        "store_dropped_saves",
        "Prompts not saved: the store failed, the buffer, budget or disk was full, or its tenant was purged.",
    ),
    "unaffordable": ("store_unaffordable_prompts", "Prompts not saved, or not whole, for --kv-cache-write-budget."),
    "process_disk_written_bytes": ("store_disk_written_bytes", "Bytes that the daemon has written to the file."),
    "evicted_blocks": ("store_evicted_blocks", "Blocks removed to stay within the budget."),
    "expired_blocks": ("store_expired_blocks", "Blocks removed after their time to live without use."),
    "quarantined": ("store_quarantined_records", "Records set aside because they failed their checks."),
    "errors": ("cache_errors", "Failures of the cache that became misses."),
    "stalled_reads": ("cache_stalled_reads", "Reads of the disk that prompts did not wait for, as they hung."),
    "outdated": ("cache_outdated", "Times that an earlier version's state was found to have other bits."),
    "ahead_tokens": ("ahead_tokens", "Prompt tokens that were computed while nobody waited (--ahead)."),
}
"""Name of a count in the cache's report → name and help of its metric."""
_GAUGES = {
    "entries": ("store_entries", "Saved prompts in the store."),
    "blocks": ("store_blocks", "Blocks in the store."),
    "used_bytes": ("store_used_bytes", "Bytes of the store's pages that hold data."),
    "ghost_bytes": (
        "store_ghost_bytes",
        "Of these, bytes about prompts that were seen and are not saved (at most 1/16 of the budget).",
    ),
    "file_bytes": ("store_file_bytes", "Bytes of the store's file: pages that hold data, and free ones."),
    "budget_bytes": ("store_budget_bytes", "Bytes that the store may use (--kv-cache-budget)."),
    "disk_written_bytes": ("store_disk_written_ever_bytes", "Bytes that all processes have written to the file."),
    "disk_written_last_day_bytes": ("store_disk_written_last_day_bytes", "Of these, bytes of the last 24 hours."),
    "write_budget_bytes": ("store_write_budget_bytes", "Bytes for 24 hours (--kv-cache-write-budget), 0: no limit."),
    "pending_bytes": ("store_pending_bytes", "Bytes that wait to be written."),
}
_GATE = {
    "prefill_s_per_token": ("prefill_seconds_per_token", "Measured: computing one more token of a prompt."),
    "restore_s_per_byte": ("restore_seconds_per_byte", "Measured: restoring one more byte."),
    "restore_fixed_s": ("restore_fixed_seconds", "Measured: the time of a restore of no bytes."),
    "remote_s_per_byte": ("remote_seconds_per_byte", "Measured: fetching one more byte from --remote-tier."),
    "remote_fixed_s": ("remote_fixed_seconds", "Measured: the time of a fetch of no bytes from --remote-tier."),
}
_REMOTE = {
    "fetched": ("remote_fetched_objects", "Objects that were fetched from --remote-tier."),
    "fetched_bytes": ("remote_fetched_bytes", "Bytes of these objects."),
    "missing": ("remote_missing_objects", "Objects that were requested and did not exist."),
    "failed": ("remote_failures", "Requests to the object store that failed, after retries."),
    "late": ("remote_deadlines", "Prompts computed as the object store took too long."),
    "skipped": ("remote_skipped", "Prompts that did not use the object store, as it had failed several times."),
    "slower": ("remote_slower", "Prompts that did not use the object store, as computing is faster."),
    "written": ("remote_written_objects", "Objects that were written."),
    "written_bytes": ("remote_written_bytes", "Bytes of these objects."),
    "dropped": ("remote_dropped_prompts", "Prompts that could not be written."),
}


class EngineCollector(Collector):
    """One scrape. `stats` is the report of the loaded model's cache."""

    def __init__(self, serving: Serving | None, stats: dict[str, Any]) -> None:
        self._serving = serving
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        serving = self._serving
        yield _info("build", "The version of diskprefix.", version=__version__)
        yield _gauge("ready", "1 once the model is loaded.", serving is not None)
        if serving is not None:
            engine = serving.engine
            served = {"model": serving.model_name, "device": engine.device, "dtype": engine.dtype}
            yield _info("model", "The served model.", **served, fingerprint=serving.fingerprint)
            yield from _engine_metrics(serving)
            yield from _cache_metrics(self._stats)
            yield from _gate_metrics(self._stats["gate"])
            yield from _remote_metrics(self._stats["remote"])


def _engine_metrics(serving: Serving) -> Iterator[Metric]:
    inbox, memory, figures = serving.inbox, serving.engine.memory_stats(), serving.engine.figures
    yield _gauge("requests_running", "Requests in the engine.", inbox.num_running)
    yield _gauge("requests_waiting", "Requests in the queue.", inbox.queue_depth)
    text = "Time that the engine has been in its current step; 0 while it is idle."
    yield _gauge("engine_working_seconds", text, inbox.heartbeat.working_s)
    yield _gauge("kv_sequences", "Sequences that have memory.", memory["running"])
    yield _gauge("kv_kept_tokens", "Tokens whose state is in memory and that no sequence uses.", memory["kept_tokens"])
    yield _gauge("kv_kept_bytes", "Memory of these tokens, which other sequences may take.", memory["kept_bytes"])
    yield _gauge("kv_memory_bytes", "Memory that the state of sequences takes.", memory["used_bytes"])
    yield _gauge("kv_memory_limit_bytes", "Memory that it may take (--kv-memory).", memory["limit_bytes"])
    yield _histogram("step_seconds", "Time of each forward of the model.", figures.step_s)
    yield _histogram("step_rows", "Tokens that are computed in each forward.", figures.step_rows)
    yield _histogram("inter_token_seconds", "Time from one token of a request to the next.", figures.gap_s)
    ahead = serving.engine.ahead.figures
    yield _counter("ahead_cpu_seconds", "Processor time of the work ahead of requests (--ahead).", ahead["cpu_s"])
    yield _gauge("ahead_waiting", "Prompts that wait to be computed ahead of requests.", ahead["waiting"])
    yield _counter("preemptions", "Sequences that gave their memory to others.", figures.preemptions)


def _cache_metrics(stats: dict[str, Any]) -> Iterator[Metric]:
    # Reported from zero on: a series that appears with its first event has no rate before the second.
    misses = {reason: stats["misses"].get(reason, 0) for reason in MISS_REASONS}
    text = "Requests that restored nothing, or less than half of a long prompt."
    yield _by_label("cache_misses", text, "reason", misses)
    for name, (metric, text) in _COUNTERS.items():
        yield _counter(metric, text, stats[name])
    for name, (metric, text) in _GAUGES.items():
        yield _gauge(metric, text, stats[name])
    yield _gauge("store_degraded", "1 while the store cannot be used.", stats["state"] == "degraded")


def _gate_metrics(gate: dict[str, Any]) -> Iterator[Metric]:
    for figure, (name, text) in _GATE.items():
        # A speed that was not measured yet has no value.
        yield GaugeMetricFamily(f"diskprefix_gate_{name}", text, value=gate[figure])
    counts = {"restore": "skipped_restores", "save": "skipped_saves", "fetch": "skipped_fetches"}
    skipped = {use: gate[count] for use, count in counts.items()}
    text = "Restores, saves and fetches left out, as computing is faster."
    yield _by_label("gate_skipped", text, "use", skipped)


def _remote_metrics(remote: dict[str, Any] | None) -> Iterator[Metric]:
    """Yields the metrics of the remote tier. Yields none without one."""
    if remote is None:
        return
    for name, (metric, text) in _REMOTE.items():
        yield _counter(metric, text, remote[name])
    text = "Objects that failed their checks and were not used."
    yield _by_label("remote_refused_objects", text, "reason", remote["refused"])
    yield _gauge("remote_failing", "1 while the object store is left alone.", remote["state"] == "failing")


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"diskprefix_{name}", text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"diskprefix_{name}", text, value=float(value))


def _by_label(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """Returns a counter with a series for each value of `label`."""
    family = CounterMetricFamily(f"diskprefix_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family


def _info(name: str, text: str, **labels: str) -> Metric:
    """Returns a gauge that is always 1, as in Prometheus' own exporters."""
    family = GaugeMetricFamily(f"diskprefix_{name}_info", text, labels=list(labels))
    family.add_metric(list(labels.values()), 1.0)
    return family


def _histogram(name: str, text: str, values: Distribution) -> Metric:
    # Reads the sum first: the buckets, whose last is the count, then hold every value of the sum.
    total, counts = values.sum, values.cumulative()
    bounds = [*map(str, values.bounds), "+Inf"]
    buckets = list(zip(bounds, counts, strict=True))
    return HistogramMetricFamily(f"diskprefix_{name}", text, buckets=buckets, sum_value=total)


# The creation times of the series would double the length of a scrape.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)

_PHASES = {
    "queue": "Time from the arrival of a request in the queue until the engine takes it.",
    "prefill": "Time that the steps of a prompt's computation take.",
    "decode": "Time from the first token of a reply to the last.",
}


class ServerMetrics:
    """The server's counters and histograms. Each scrape returns them with the engine's figures."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, buckets=_SECONDS, registry=registry)
        self._http = counter("diskprefix_http_requests", "HTTP requests answered.", ["route", "status"])
        self._requests = counter(
            "diskprefix_requests",
            "Requests for a reply, by how they ended: completed, cancelled (the client left), rejected (the queue was "
            "full, or the daemon stopped), invalid (400 and the like) or failed.",
            ["outcome"],
        )
        self._prompt_tokens = counter(
            "diskprefix_prompt_tokens",
            "Prompt tokens of completed requests, by where their state came from: computed, memory, disk or remote.",
            ["source"],
        )
        self._lost_tokens = counter(
            "diskprefix_recomputed_tokens",
            "Prompt tokens of completed requests that were computed although an earlier prompt had them, by cause: the "
            "words of miss_reason.",
            ["cause"],
        )
        self._reply_tokens = counter("diskprefix_generation_tokens", "Tokens of the replies to completed requests.")
        self._draft_tokens = counter(
            "diskprefix_draft_tokens",
            "Draft tokens that were verified for completed requests (--speculative), by result.",
            ["result"],
        )
        self._images_encoded = counter("diskprefix_images_encoded", "Pictures that were encoded.")
        self._images_restored = counter(
            "diskprefix_images_restored", "Pictures whose encoder's output was read from the store."
        )
        self._encode_seconds = counter("diskprefix_image_encode_seconds", "Seconds that encoding them took.")
        self._first_token = histogram(
            "diskprefix_time_to_first_token_seconds",
            "Time from the arrival of a request in the queue to its first token: hit if at least half of the prompt "
            "was restored, short if it has fewer than 512 tokens.",
            ["cache"],
        )
        self._restore = histogram(
            "diskprefix_restore_seconds",
            "Time that reading, verifying and copying stored state takes, of requests that restored something.",
        )
        self._phases = {phase: histogram(f"diskprefix_{phase}_seconds", text) for phase, text in _PHASES.items()}
        self._begin_at_zero()
        ProcessCollector(registry=registry)

    def _begin_at_zero(self) -> None:
        """Creates each series: one that appears with its first event has no rate before the second."""
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        for source in ("computed", "memory", "disk", "remote"):
            self._prompt_tokens.labels(source)
        for cause in MISS_REASONS:
            self._lost_tokens.labels(cause)
        for result in ("accepted", "rejected"):
            self._draft_tokens.labels(result)
        for cache in get_args(CacheOutcome):
            self._first_token.labels(cache)

    def count_request(self, route: str, record: LogContext) -> None:
        """Counts an HTTP request that is over."""
        self._http.labels(route, str(record.status)).inc()
        if record.outcome is not None:
            self._requests.labels(record.outcome).inc()

    def count_generation(self, done: DoneEvent) -> None:
        """Adds the figures of a request that ended well, as its response reports them."""
        self.count_tokens(done)
        cache, timings = done.cache, done.timings
        if cache.restored:
            self._restore.observe((timings.restore_ms + timings.late_restore_ms) / 1e3)
        self._first_token.labels(done.outcome).observe(timings.ttft_ms / 1e3)
        for phase, histogram in self._phases.items():
            histogram.observe(getattr(timings, f"{phase}_ms") / 1e3)

    def count_tokens(self, done: DoneEvent) -> None:
        """Adds the tokens of a request that ended well, or of a reading, which is one of many in a request."""
        usage, cache, timings = done.usage, done.cache, done.timings
        if cache.restored:
            self._prompt_tokens.labels(cache.source).inc(cache.restored)
        self._prompt_tokens.labels("computed").inc(usage.prompt_tokens - cache.restored)
        for cause, num_tokens in cache.recomputed:
            self._lost_tokens.labels(cause).inc(num_tokens)
        self._reply_tokens.inc(usage.completion_tokens)
        self._draft_tokens.labels("accepted").inc(timings.accepted_tokens)
        self._draft_tokens.labels("rejected").inc(timings.drafted_tokens - timings.accepted_tokens)
        self._images_encoded.inc(timings.images_encoded)
        self._images_restored.inc(timings.images_restored)
        self._encode_seconds.inc(timings.encode_ms / 1e3)

    async def render(self, serving: Serving | None) -> bytes:
        """Returns the text that a scrape gets. `serving` is None while the model loads."""
        stats = await serving.counts.newest() if serving else {}
        return generate_latest(self.registry) + generate_latest(EngineCollector(serving, stats))
