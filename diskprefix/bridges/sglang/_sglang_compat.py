"""Everything that the backend needs from SGLang, and the versions that it was tried with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from diskprefix.bridges.shared.versions import check_interface
from diskprefix.identity import canonical
from diskprefix.kernel_settings import device_kind
from diskprefix.model_identity import weights_digest

TRIED = ("0.5.23",)

try:
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        PoolHitPolicy,
        PoolName,
        PoolTransferResult,
    )
    from sglang.srt.runtime_context import get_server_args
    from sglang.version import __version__ as _version
except ImportError as error:
    raise ImportError(f"{error}: this diskprefix needs SGLang {', '.join(TRIED)}") from error

__all__ = ["HiCacheStorage", "PoolHitPolicy", "PoolName", "PoolTransferResult"]

ENGINE = "sglang"
VERSION = str(_version)

_FACTORY_NAMES = ("backend_name", "module_path", "class_name", "interface_v1", "file_storage_path")
"""Keys of the extra config that SGLang itself reads, or adds, and leaves there."""
_RANK_NAMES = (
    "tp_size",
    "pp_rank",
    "pp_size",
    "attn_cp_rank",
    "attn_cp_size",
    "dcp_rank",
    "dcp_size",
    "logical_page_size",
)
_NUMBERS = (
    *("dtype", "quantization", "kv_cache_dtype", "attention_backend", "prefill_attention_backend"),
    *("decode_attention_backend", "revision", "load_format", "random_seed", "lora_paths", "json_model_override_args"),
    *("speculative_algorithm", "speculative_draft_model_path", "enable_deterministic_inference", "page_size"),
)
"""Arguments of SGLang's server that change the numbers it computes, or the form of its pages."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def check_version(backend: type) -> None:
    """Raises `ImportError` with one line if SGLang's interface has methods that a backend lacks. Logs one line for a
    version that was not tried."""
    check_interface("SGLang", VERSION, TRIED, "backends", backend)


def settings_of(storage_config: Any) -> dict[str, Any]:
    """Returns the keys of the extra config that are ours."""
    given = dict(storage_config.extra_config or {})
    return {name: value for name, value in given.items() if name not in _FACTORY_NAMES}


def numbers_of(storage_config: Any) -> dict[str, str]:
    """Returns everything that changes the numbers of a rank, except the form of its pages."""
    arguments = _server_arguments()
    return {
        "engine": ENGINE,
        "sglang_version": VERSION,
        "torch_version": torch.__version__,
        "model_name": str(storage_config.model_name or ""),
        "weights_digest": _weights(str(arguments.get("model_path") or "")),
        "arguments": canonical({name: arguments.get(name) for name in _NUMBERS}),
        "device": device_kind(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "ranks": canonical({name: getattr(storage_config, name, None) for name in _RANK_NAMES}),
        "is_mla": str(bool(storage_config.is_mla_model)),
    }


def rank_of(storage_config: Any, pool: str) -> str:
    """Returns the rank that has a pool's pages: none for pages that all ranks hold alike."""
    is_alike = storage_config.is_mla_model and pool != PoolName.MAMBA.value
    return "all" if is_alike else str(storage_config.tp_rank)


def _server_arguments() -> Mapping[str, Any]:
    """Returns the arguments of SGLang's server, none if the backend was created without a server."""
    try:
        arguments: Mapping[str, Any] = vars(get_server_args())
    except (TypeError, ValueError, AttributeError):
        return {}
    return arguments


def _weights(model_path: str) -> str:
    """Returns the digest of a model's weight files if they are in a folder, otherwise its name: SGLang fetches a model
    of a hub into a folder of its own."""
    folder = Path(model_path)
    if model_path and folder.is_file():
        return weights_digest([folder])
    if model_path and folder.is_dir():
        for pattern in _WEIGHTS:
            if files := sorted(folder.glob(pattern)):
                return weights_digest(files)
    return f"name {model_path}"
