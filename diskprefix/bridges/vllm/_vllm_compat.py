"""Everything that the connector needs from vLLM: all imports from it, and what is read from its objects."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

try:
    import vllm
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError as error:
    raise ImportError(f"{error}: the connector of this diskprefix needs vLLM 0.32 or newer") from error

from diskprefix.bridges.shared.versions import VERSIONS, missing, untried
from diskprefix.bridges.vllm import engine_numbers
from diskprefix.bridges.vllm.engine_pages import EngineGroup, UnsupportedPages
from diskprefix.kernel_settings import device_kind

__all__ = [
    "CacheHitSource",
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "SupportsHMA",
]
log = logging.getLogger("diskprefix")

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
USED = {
    f"{_BASE}:KVConnectorBase_V1": (
        *("_get_connector_metadata", "register_kv_caches", "get_handshake_metadata", "start_load_kv", "wait_for_save"),
        *("get_transfer_results", "get_block_ids_with_load_errors", "set_xfer_handshake_metadata_pp_aware"),
        *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
        *("request_finished", "reset_cache", "get_kv_connector_stats", "build_prom_metrics", "shutdown"),
    ),
    f"{_BASE}:SupportsHMA": ("request_finished_all_groups",),
    f"{_BASE}:KVConnectorTransferResults": ("finished_recving", "failed_recving"),
    "vllm.v1.request:Request": (
        *("request_id", "prompt_token_ids", "cache_salt", "kv_transfer_params", "num_computed_tokens", "num_tokens"),
        *("num_preemptions", "all_token_ids", "lora_request", "mm_features", "prompt_embeds", "pooling_params"),
        "skip_reading_prefix_cache",
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        *("kv_connector_block_state", "num_scheduled_tokens", "total_num_scheduled_tokens"),
    ),
    "vllm.v1.core.sched.output:KVConnectorBlockState": ("get_block_ids",),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ("get_block_ids",),
    "vllm.v1.kv_cache_interface:KVCacheConfig": ("num_blocks", "kv_cache_groups"),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ("layer_names", "kv_cache_spec"),
    "vllm.config:KVTransferConfig": ("kv_connector_extra_config", "kv_load_failure_policy"),
    "vllm.config:ParallelConfig": (
        *("rank", "world_size", "tensor_parallel_size", "pipeline_parallel_size"),
        *("decode_context_parallel_size", "prefill_context_parallel_size"),
    ),
}
"""The attributes of vLLM's classes that the connector reads, calls or overrides."""


def check_version() -> str | None:
    """Returns a line that names a version that was not tried, or None. Raises `ImportError` with one line if the
    version lacks something that the connector needs."""
    if lacking := missing(USED):
        raise ImportError(
            f"diskprefix cannot be a connector of vLLM {vllm.__version__}: it has no {', '.join(lacking)}"
        )
    return untried(vllm.__version__, [row for row in VERSIONS if row.runs_connector])


def warn_of_failures(kv_transfer_config: Any) -> None:
    """Logs a warning if requests fail when a block cannot be loaded, which is vLLM's default."""
    policy = kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        log.warning(
            '[disk-cache] a request fails if a block of it cannot be loaded: kv_load_failure_policy is "%s"; '
            'set it to "recompute"',
            policy,
        )


def rank_of(vllm_config: Any) -> tuple[int, int]:
    """Returns the rank of this process and the number of ranks."""
    parallel = vllm_config.parallel_config
    return parallel.rank % parallel.world_size, parallel.world_size


def engine_groups(vllm_config: Any, kv_cache_config: Any) -> tuple[EngineGroup, ...]:
    """Returns the groups of layers with a common block table. Raises `UnsupportedPages` with one line if the state
    cannot be cut into blocks of consecutive tokens."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise UnsupportedPages("context parallelism spreads the tokens of a page over ranks")
    return tuple(_engine_group(group) for group in kv_cache_config.kv_cache_groups)


def _engine_group(group: Any) -> EngineGroup:
    spec = inner = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        inner = next(iter(spec.kv_cache_specs.values()))
    if not isinstance(inner, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec):
        raise UnsupportedPages(f"{group.layer_names[0]} ({type(inner).__name__}) has no keys and values of each token")
    if getattr(group, "host_resident", False):
        raise UnsupportedPages(f"{group.layer_names[0]} has pages outside the device's pool")
    window = getattr(inner, "sliding_window", None) or getattr(inner, "attention_chunk_size", None)
    return EngineGroup(tuple(group.layer_names), spec.block_size, window)


def numbers_of(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """Returns everything that changes the numbers of this rank, except the tenant and the form of its pages."""
    layers = vllm_config.compilation_config.static_forward_context
    names = (name for group in kv_cache_config.kv_cache_groups for name in group.layer_names if name in layers)
    return engine_numbers.numbers_of(
        vllm_config,
        vllm.__version__,
        device=device_kind(torch.device(vllm_config.device_config.device)),
        attention=",".join(sorted({_attention(layers[name]) for name in names})),
    )


def _attention(layer: Any) -> str:
    """Returns the name of a layer's attention backend, for CPUs with the instruction set that it packs keys for."""
    backend = layer.get_attn_backend().get_name()
    isa = getattr(layer, "isa", "")
    return f"{backend}:{isa}" if isa else str(backend)


def why_not_cached(request: Any) -> str | None:
    """Returns the reason why equal tokens may not mean equal prompts, one of `stats.MISSES`; None if they do."""
    if request.lora_request is not None:
        return "lora"
    if request.mm_features:
        return "media"
    if request.prompt_embeds is not None:
        return "embeddings"
    if request.skip_reading_prefix_cache:
        # With `prompt_logprobs`, vLLM computes the whole prompt.
        return "no_reading"
    return "pooling" if request.pooling_params is not None else None


def scheduled(output: Any, requests: Mapping[str, Any]) -> Sequence[tuple[str, int, Sequence[Sequence[int]]]]:
    """Returns, for each of `requests` in a step: its id, the number of computed tokens after the step, and its blocks
    by group."""
    state = output.kv_connector_block_state
    return [
        (request_id, requests[request_id].num_computed_tokens + number, state.get_block_ids(request_id))
        for request_id, number in output.num_scheduled_tokens.items()
        if request_id in requests
    ]
