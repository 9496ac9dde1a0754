"""The connector that vLLM loads. See README.md."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diskprefix.bridges.shared.connector_settings import connector_settings
from diskprefix.bridges.shared.step_orders import StepOrders
from diskprefix.bridges.shared.timed_opening import open_in_time
from diskprefix.bridges.vllm import _vllm_compat as compat
from diskprefix.bridges.vllm.engine_pages import EngineGroup, Pages, UnsupportedPages
from diskprefix.bridges.vllm.scheduler_side import SchedulerSide
from diskprefix.bridges.vllm.stats import DiskPrefixMetrics, DiskPrefixStats
from diskprefix.bridges.vllm.worker import WorkerSide
from diskprefix.prefixstore.state_identity import StateIdentity

log = logging.getLogger("diskprefix")

_IDLE_S = 0.02
"""Seconds for which a step that computes nothing waits for a load or a fetch. Without the wait, vLLM would repeat such
steps in a tight loop, on the cores that decode."""


@dataclass
class StepMetadata(compat.KVConnectorMetadata):  # type: ignore[misc]
    """The plan of a step. `is_idle`: the step computes no token."""

    plan: StepOrders
    is_idle: bool = False


@dataclass
class RankMetadata(compat.KVConnectorHandshakeMetadata):  # type: ignore[misc]
    identity: StateIdentity


class DiskPrefixConnector(compat.KVConnectorBase_V1, compat.SupportsHMA):  # type: ignore[misc]
    """The prefix cache on disk for vLLM. One instance is in the scheduler's process, and one in each worker's."""

    _cache_hit_source = compat.CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """Raises `ImportError` for a version of vLLM that lacks something, and `DiskPrefixError` for wrong settings,
        each with one line. A model whose pages cannot be stored is served without the cache, as is one whose store
        cannot be opened in time."""
        untried = compat.check_version()
        super().__init__(vllm_config, role, kv_cache_config)
        is_scheduler = role == compat.KVConnectorRole.SCHEDULER
        if is_scheduler and untried is not None:
            log.warning("[disk-cache] %s", untried)
        self._groups = self._groups_of(vllm_config, kv_cache_config, logs=is_scheduler)
        self._sizes = tuple(group.block_size for group in self._groups)
        self._keeps_part = len(self._groups) == 1 and self._groups[0].window is None
        """vLLM can keep the blocks before the first bad one, except with a window: blocks that the earlier tokens need
        were not loaded."""
        if is_scheduler:
            compat.warn_of_failures(self._kv_transfer_config)
        config = self._kv_transfer_config.kv_connector_extra_config or {}
        self._settings = connector_settings(config, math.lcm(*self._sizes))
        self._shared = open_in_time(self._settings) if self._groups else None
        """None: requests are served without the cache."""
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._identity: StateIdentity | None = None
        self._requests: dict[str, Any] = {}
        self._bad_blocks: set[int] = set()
        self._patience_s = 0.0

    @property
    def block_size(self) -> int:
        """The number of tokens in a block of the store."""
        return self._settings.block_size

    @property
    def requires_kv_delivery(self) -> bool:
        """False: vLLM need not wait for saves, because a dropped save only costs a later miss."""
        return False

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self._shared is None:
            return
        try:
            pages = Pages(kv_caches, self._groups, self._kv_cache_config.num_blocks)
        except UnsupportedPages as error:
            _log_served_without(error)
            return
        rank, num_ranks = compat.rank_of(self._vllm_config)
        model = self._vllm_config.model_config
        self._identity = StateIdentity.of_tensors(
            Path(model.model).name,
            compat.numbers_of(self._vllm_config, self._kv_cache_config),
            tuple(group.layout for group in pages.groups),
            self._settings.block_size,
            shard=(rank, num_ranks),
            tokenizer=str(model.tokenizer),
        )
        self._worker = WorkerSide(self._shared, pages, self._identity, rank)

    def get_handshake_metadata(self) -> RankMetadata | None:
        return None if self._identity is None else RankMetadata(self._identity)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        del forward_context, kwargs
        if self._worker is not None:
            metadata = self._metadata()
            self._patience_s = _IDLE_S if metadata.is_idle else 0.0
            self._worker.load(metadata.plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: requests are computed only after their load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: all layers are saved at the end of the step."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._metadata().plan)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        del finished_req_ids
        if self._worker is None:
            return compat.KVConnectorTransferResults()
        loaded, failed, self._bad_blocks = self._worker.take_results(self._patience_s)
        if self._keeps_part:
            failed = set()
        return compat.KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad if self._keeps_part else set()

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], RankMetadata]) -> None:
        ranks = [metadata[place].identity for place in sorted(metadata)]
        _, num_ranks = compat.rank_of(self._vllm_config)
        # A rank that cannot store its pages has sent nothing.
        if self._shared is not None and len(ranks) == num_ranks:
            self._scheduler = SchedulerSide(self._shared, ranks, self._sizes)

    def on_new_request(self, request: Any) -> None:
        if self._scheduler is not None:
            self._requests[request.request_id] = request
            self._scheduler.add(request, not_cached=compat.why_not_cached(request))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduler is None:
            return 0, False
        num_tokens = self._scheduler.match(request.request_id, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduler is not None and num_external_tokens > 0:
            self._scheduler.plan_load(request.request_id, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        if self._scheduler is None:
            return StepMetadata(StepOrders())
        plan = self._scheduler.plan(compat.scheduled(scheduler_output, self._requests))
        is_idle = scheduler_output.total_num_scheduled_tokens == 0
        if is_idle and not plan.loads:
            self._scheduler.wait_for_fetch(_IDLE_S)
        return StepMetadata(plan, is_idle)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        del block_ids
        self._requests.pop(request.request_id, None)
        return False, None if self._scheduler is None else self._scheduler.finish(request.request_id)

    def reset_cache(self) -> bool:
        """Switches the cache off: vLLM calls this before its weights change, and nothing says whether they did."""
        if self._scheduler is not None:
            self._scheduler.switch_off()
        return True

    # Both sides.

    def get_kv_connector_stats(self) -> DiskPrefixStats | None:
        side = self._scheduler or self._worker
        counts = side.take_counts() if side is not None else Counter()
        return DiskPrefixStats(data=dict(counts)) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> DiskPrefixStats:
        return DiskPrefixStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> DiskPrefixMetrics:
        return DiskPrefixMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()
        self._worker = self._scheduler = None
        if self._shared is not None and not self._shared.release():
            log.warning("[disk-cache] not everything was saved: writing took too long")

    @staticmethod
    def _groups_of(vllm_config: Any, kv_cache_config: Any, *, logs: bool) -> tuple[EngineGroup, ...]:
        """Returns the groups of layers with a common block table; none if their state cannot be stored."""
        try:
            return compat.engine_groups(vllm_config, kv_cache_config)
        except UnsupportedPages as error:
            if logs:
                _log_served_without(error)
            return ()

    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata


def _log_served_without(error: UnsupportedPages) -> None:
    log.warning("[disk-cache] this model is served without the cache: %s", error)
