"""The supported versions of vLLM, and all imports from it."""

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
    raise ImportError(f"{error}: this diskprefix needs vLLM 0.32") from error

from diskprefix.extras.vllm import engine_numbers
from diskprefix.extras.vllm.engine_pages import EngineGroup
from diskprefix.model.load.kernel_settings import device_kind

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

SUPPORTED = ("0.32",)


def check_version() -> None:
    """Raises `ImportError` with one line if vLLM's version is not supported."""
    if not vllm.__version__.startswith(tuple(f"{version}." for version in SUPPORTED)):
        raise ImportError(f"this diskprefix supports vLLM {', '.join(SUPPORTED)}, and {vllm.__version__} is installed")


def check_parallel(vllm_config: Any) -> None:
    """Raises `ValueError` if the pages of a rank do not hold consecutive tokens, as with context parallelism."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ValueError("diskprefix cannot cache pages that context parallelism spreads over ranks; leave it out")


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


def engine_groups(kv_cache_config: Any) -> tuple[EngineGroup, ...]:
    """Returns the groups of layers with a common block table. Raises `ValueError` with one line for a model whose state
    cannot be cut into blocks."""
    return tuple(_engine_group(group) for group in kv_cache_config.kv_cache_groups)


def _engine_group(group: Any) -> EngineGroup:
    spec = inner = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        inner = next(iter(spec.kv_cache_specs.values()))
    if not isinstance(inner, FullAttentionSpec | SlidingWindowSpec | ChunkedLocalAttentionSpec):
        raise ValueError(
            f"diskprefix cannot cache this model under vLLM: {type(inner).__name__} of {group.layer_names[0]} "
            "has state that exists at one position only; leave --kv-transfer-config out"
        )
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
