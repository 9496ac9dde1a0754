"""The connector's counts, in the form of vLLM's statistics of connectors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

from diskprefix.extras.remote.sealing import RefusalReason
from diskprefix.extras.vllm._vllm_compat import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "requests": "Requests that asked the prefix cache on disk.",
    "hits": "Requests for which something was stored.",
    "restored_tokens": "Prompt tokens that were loaded from disk.",
    "loaded_blocks": "Blocks that were loaded, of all ranks.",
    "loaded_bytes": "Bytes of KV that were loaded, of all ranks.",
    "load_us": "Microseconds that loads took, of all ranks.",
    "load_errors": "Loads that failed; what was missing was computed.",
    "saved_blocks": "Blocks that were handed to the writer, of all ranks.",
    "saved_bytes": "Bytes of KV that were handed to the writer, of all ranks.",
    "dropped": "Requests of which not all was saved, as the write buffer was full.",
    "remote_fetched": "Objects that were fetched from the shared tier.",
    "remote_fetched_bytes": "Bytes of the objects that were fetched.",
    "remote_missing": "Objects that were asked for and are not in the shared tier.",
    "remote_late": "Requests that stopped waiting for the shared tier at the deadline.",
    "remote_skipped": "Requests that did not ask the shared tier, because it had failed or had been too slow.",
    "remote_slower": "Requests that did not ask the shared tier, because computing is faster.",
    "remote_failed": "Fetches that failed.",
    "remote_written": "Objects that were written to the shared tier.",
    "remote_written_bytes": "Bytes of the objects that were written.",
    "remote_dropped": "Prompts that were not written to the shared tier.",
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
)
"""Why nothing was restored for a request."""
REFUSALS = get_args(RefusalReason)
"""Why an object of the shared tier was not used."""


class DiskPrefixStats(KVConnectorStats):  # type: ignore[misc]
    """Counts since the last time, by name."""

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
    """The same for Prometheus, at vLLM's own `/metrics`."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._each_engine(f"vllm:diskprefix_{name}", text, labelnames) for name, text in COUNTERS.items()
        }
        reasons = [*labelnames, "reason"]
        for name, prefix, text, known in (
            ("misses", "miss", "Requests for which nothing was restored, by reason.", MISSES),
            ("remote_refused", "refused", "Objects of the shared tier that were refused, by reason.", REFUSALS),
        ):
            counter = self._counter_cls(name=f"vllm:diskprefix_{name}", documentation=text, labelnames=reasons)
            self._counters |= {
                f"{prefix}_{reason}": {engine: counter.labels(*values, reason) for engine, values in self._engines()}
                for reason in known
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name][engine_idx].inc(number)

    def _each_engine(self, name: str, text: str, labelnames: list[str]) -> dict[int, Any]:
        counter = self._counter_cls(name=name, documentation=text, labelnames=labelnames)
        return {engine: counter.labels(*values) for engine, values in self._engines()}

    def _engines(self) -> list[tuple[int, list[object]]]:
        return list(self.per_engine_labelvalues.items())
