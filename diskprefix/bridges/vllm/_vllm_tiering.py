"""Everything that a tier of vLLM's offloading needs from vLLM: all imports, and what is read from its objects."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    import vllm
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform
    from vllm.v1.kv_offload.base import (
        LookupResult,
        Medium,
        OffloadPolicy,
        RequestOffloadingContext,
        get_offload_block_hash,
        get_offload_group_idx,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
except ImportError as error:
    raise ImportError(f"{error}: the tier of this diskprefix needs vLLM 0.28 or newer") from error

from diskprefix.bridges.shared.versions import VERSIONS, Version, missing, untried, version_of
from diskprefix.bridges.vllm import engine_numbers
from diskprefix.identity import canonical
from diskprefix.prefixstore.chunk_store import DIGEST_BYTES, ChunkKey

__all__ = ["JobResult", "LookupResult", "Medium", "OffloadPolicy", "RequestOffloadingContext", "SecondaryTierManager"]

_TIERING = "vllm.v1.kv_offload.tiering.base"
USED = {
    f"{_TIERING}:SecondaryTierManager": (
        *("on_new_request", "on_request_finished", "on_schedule_end", "lookup", "submit_load", "submit_store"),
        *("get_finished_jobs", "drain_jobs", "shutdown"),
    ),
    f"{_TIERING}:TransferJob": ("job_id", "keys", "req_context"),
    f"{_TIERING}:JobResult": ("job_id", "success", "successful_keys"),
    "vllm.v1.kv_offload.base:ReqContext": ("req_id",),
    "vllm.v1.kv_offload.config:OffloadingConfig": ("model", "groups", "cache", "parallel"),
}
"""The attributes of vLLM's classes that the tier reads, calls or overrides, besides those that `VERSIONS` names."""
_KERNEL_PACKAGES = ("flash-attn", "flashinfer-python", "triton")
"""vLLM may choose a backend from these packages."""
_KERNEL_WORDS = ("ATTN", "ATTENTION", "FLASH", "LAYOUT", "MLA")
"""Words in the names of vLLM's variables that choose kernels."""
_DIGESTS = ("sha256", "sha256_cbor")
_PROCESS_FIELDS = ("rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local")
"""Engines that differ only in these fields share their chunks."""


def engine_config() -> Any:
    """Returns the configuration of the engine that is creating a tier in this call.

    vLLM gives a tier a summary, which names neither weights nor quantisation. The whole configuration is an argument of
    the connector that creates the tiers, up the stack. Raises `ImportError` if it is not there.
    """
    frame = inspect.currentframe()
    while frame is not None:
        config = frame.f_locals.get("vllm_config")
        if isinstance(config, VllmConfig):
            return config
        frame = frame.f_back
    raise ImportError(f"this diskprefix cannot find the configuration of vLLM {vllm.__version__}")


def check_version() -> str | None:
    """Returns a line that names a version that was not tried, or None. Raises `ImportError` with one line if the
    version lacks something that the tier needs."""
    job = f"{_TIERING}:TransferJob"
    if lacking := missing(USED | {job: (*USED[job], _version().chunk_slots)}):
        raise ImportError(f"diskprefix cannot be a tier of vLLM {vllm.__version__}: it has no {', '.join(lacking)}")
    return untried(vllm.__version__, VERSIONS)


def _version() -> Version:
    return version_of(vllm.__version__)


def check_keys(vllm_config: Any) -> None:
    """Raises `ValueError` with one line if equal keys may stand for different state, or different keys for equal
    state."""
    digest = vllm_config.cache_config.prefix_caching_hash_algo
    if digest not in _DIGESTS:
        raise ValueError(
            f"the tier of diskprefix cannot rely on prefix_caching_hash_algo {digest}; choose {' or '.join(_DIGESTS)}"
        )
    if not (_version().agrees_on_keys or os.environ.get("PYTHONHASHSEED")):
        raise ValueError(
            f"set PYTHONHASHSEED to a number that stays the same: without it each process of vLLM {vllm.__version__} "
            "has other keys, and nothing would be found after a restart"
        )
    if vllm_config.lora_config is not None:
        raise ValueError(
            "the tier of diskprefix cannot serve LoRA adapters: vLLM's keys have their names, not their weights"
        )


def tier_numbers(vllm_config: Any, offloading: Any) -> dict[str, str]:
    """Returns everything that changes the numbers of all ranks, and the form of a chunk. `offloading` is the summary
    that a tier gets. The scheduler's process has no layers, so the values from which vLLM chooses attention stand for
    the backend."""
    return engine_numbers.numbers_of(
        vllm_config,
        vllm.__version__,
        device=f"{current_platform.device_type} {current_platform.get_device_name()}".strip(),
        attention=canonical(
            {
                "config": asdict(vllm_config.attention_config),
                "environment": {name: value for name, value in os.environ.items() if _chooses_kernels(name)},
                "packages": _kernel_packages(),
            }
        ),
    ) | {
        "chunk": chunk_form(offloading, asdict(offloading.parallel)),
        "drafts": canonical({"of": getattr(vllm_config.speculative_config, "model", None)}),
    }


def chunk_form(offloading: Any, parallel: Mapping[str, Any]) -> str:
    """Returns the layout of a chunk as a text. `parallel` has the fields of `offloading.parallel`."""
    return canonical(
        {
            "groups": [(group.tokens_per_block, group.layer_names) for group in offloading.groups],
            "blocks": offloading.cache.blocks_per_chunk,
            "hash_tokens": offloading.cache.tokens_per_hash,
            "layout": getattr(offloading, "kv_cache_layout", None),
            "canonical": getattr(offloading, "canonical_layout", False),
            "ranks": {name: value for name, value in parallel.items() if name not in _PROCESS_FIELDS},
        }
    )


def _chooses_kernels(variable: str) -> bool:
    return variable.startswith("VLLM_") and any(word in variable for word in _KERNEL_WORDS)


def _kernel_packages() -> dict[str, str]:
    """Returns the versions of the installed ones of `_KERNEL_PACKAGES`."""
    versions = {}
    for name in _KERNEL_PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def chunk_key(key: Any) -> ChunkKey:
    """Returns the parts of an `OffloadKey`."""
    digest = bytes(get_offload_block_hash(key))
    assert len(digest) == DIGEST_BYTES, "see `check_keys`"
    return ChunkKey(digest, get_offload_group_idx(key))


def slots_of(job: Any) -> list[int]:
    """Returns the places of a job's chunks in the primary tier."""
    return [int(slot) for slot in getattr(job, _version().chunk_slots)]
