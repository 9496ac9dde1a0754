"""Everything in vLLM's configuration that changes the numbers it computes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import huggingface_hub
import torch

from diskprefix.identity import canonical, plain
from diskprefix.kernel_settings import cpu_kind, environment
from diskprefix.model_identity import architecture, weights_digest

_NUMERIC_ENVIRONMENT = (
    *("VLLM_BATCH_INVARIANT", "VLLM_CPU_ATTN_SPLIT_KV", "VLLM_CPU_INT4_W4A8", "VLLM_CPU_SGL_KERNEL"),
)
"""vLLM's variables that choose kernels, besides `attention` in `numbers_of`."""


def numbers_of(vllm_config: Any, version: str, *, device: str, attention: str) -> dict[str, str]:
    """Returns everything that changes the numbers of a rank, except the tenant and the form of its pages. `version` is
    vLLM's, `device` names the kind of device, `attention` the backends."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    is_cpu = torch.device(vllm_config.device_config.device).type == "cpu"
    return {
        "engine": "vllm",
        "vllm_version": version,
        "torch_version": torch.__version__,
        "weights_digest": _weights(vllm_config),
        "model_class": ",".join(model.architectures),
        "architecture": canonical(architecture(model.hf_text_config.to_dict())),
        "dtype": plain(model.dtype),
        "quantisation": canonical(
            {"method": model.quantization, "config": getattr(model.hf_config, "quantization_config", None)}
        ),
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "attention": attention,
        "compilation": canonical({"mode": vllm_config.compilation_config.mode, "eager": model.enforce_eager}),
        "parallel": f"tensor={parallel.tensor_parallel_size},pipeline={parallel.pipeline_parallel_size}",
        "device": device,
        "cpu": cpu_kind() if is_cpu else "",
        "environment": canonical(environment() | {n: os.environ[n] for n in _NUMERIC_ENVIRONMENT if os.environ.get(n)}),
    }


def _weights(vllm_config: Any) -> str:
    """Returns the digest of the weight files. Dummy weights are identified by their seed."""
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    if "dummy" in load_format:
        return f"dummy {model.seed}"
    folder = Path(model.model)
    if not folder.exists():
        folder = Path(huggingface_hub.snapshot_download(model.model, revision=model.revision, local_files_only=True))
    if folder.is_file():
        return weights_digest([folder])
    for pattern in ("*.safetensors", "*.bin", "*.pt", "*.gguf"):
        if files := sorted(folder.glob(pattern)):
            return weights_digest(files)
    raise ValueError(f"diskprefix cannot tell which weights these are: {folder} has no file of weights")
