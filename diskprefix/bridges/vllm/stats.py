"""The connector's counts, for vLLM's log and its `/metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from diskprefix.bridges.vllm._vllm_compat import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "requests": "Requests that asked the prefix cache on disk.",
    "hits": "Requests with a stored prefix.",
    "restored_tokens": "Prompt tokens loaded from disk.",
    "loaded_blocks": "Blocks loaded, of all ranks.",
    "loaded_bytes": "Bytes of KV loaded, of all ranks.",
    "load_us": "Microseconds spent in loads, of all ranks.",
    "load_errors": "Loads that failed. The missing tokens were computed.",
    "saved_blocks": "Blocks handed to the writer, of all ranks.",
    "saved_bytes": "Bytes of KV handed to the writer, of all ranks.",
    "fetched_bytes": "Bytes of KV fetched from the bucket that machines share, of all ranks.",
    "fetches_cut": "Requests whose fetch from the bucket was ended early: it failed, or took too long.",
    "dropped": "Requests that were not saved completely, because the write buffer was full.",
}
MISSES = (
    "not_stored",
    "other_numbers",
    "no_tokens",
    "bad_parameters",
    "lora",
    "media",
    "embeddings",
    "no_reading",
    "pooling",
    "store",
    "reset",
)
"""The reasons why nothing is restored."""


class DiskPrefixStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last report, by name."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> DiskPrefixStats:
        return DiskPrefixStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        return {name: number for name, number in self.data.items() if name in COUNTERS}

    def is_empty(self) -> bool:
        return not self.data


class DiskPrefixMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The same counts for Prometheus."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        engines = per_engine_labelvalues.items()
        self._counters: dict[str, dict[int, Any]] = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:diskprefix_{name}", documentation=text, labelnames=labelnames)
            self._counters[name] = {engine: counter.labels(*values) for engine, values in engines}
        reasons = [*labelnames, "reason"]
        text = "Requests for which nothing was restored, by reason."
        counter = self._counter_cls(name="vllm:diskprefix_misses", documentation=text, labelnames=reasons)
        for reason in MISSES:
            self._counters[f"miss_{reason}"] = {engine: counter.labels(*values, reason) for engine, values in engines}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(number)
