"""The identity of the numbers that a model computes on the grid. Two runs may share KV only if they have the same root.

README.md tells what belongs to it. A field of the configuration that is not known goes in, because a needless miss
costs time and a wrong hit gives a wrong answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from diskprefix.identity import Fingerprint, canonical, plain
from diskprefix.kernel_settings import (
    cpu_kind,
    device_kind,
    environment,
    kernel_packages,
    matmul_precision,
    switches,
)
from diskprefix.model_identity import architecture
from diskprefix.runtime.load.code_digest import code_digest

_VERSIONS = ("torch_version", "transformers_version", "gguf_version", "numpy_version")
_NOT_PORTABLE = ("device", "cpu", "kernels", "threads", *_VERSIONS)


def fingerprint_of_modules(model: Any, weights_digest: str, mode: str = "strict") -> Fingerprint:
    """Returns everything that changes the numbers of a loaded model of transformers. In mode `portable` the root leaves
    out the fields of `_NOT_PORTABLE`."""
    from importlib.metadata import version

    import torch

    config, is_cpu = model.config, model.device.type == "cpu"
    quantisation = getattr(config, "quantization_config", None)
    if_set = {
        # The installed packages whose kernels transformers uses instead of its own.
        "kernels": canonical(kernel_packages()),
        "switches": canonical(switches(model)),
        # Where the kernels of a CPU cut sums.
        "threads": str(torch.get_num_threads()) if is_cpu else "",
    }
    named = {
        "weights_digest": weights_digest,
        "model_class": type(model).__name__,
        "architecture": canonical(architecture(config.to_dict())),
        "dtype": plain(model.dtype),
        "quantisation": canonical(_as_dict(quantisation) if quantisation else {}),
        "adapters": _adapters(model),
        "attention": _implementations(config, "_attn_implementation"),
        "experts": _implementations(config, "_experts_implementation"),
        "matmul_precision": matmul_precision(),
        "environment": canonical(environment()),
        "device": device_kind(model.device),
        "cpu": cpu_kind() if is_cpu else "",
        "torch_version": torch.__version__,
        "transformers_version": version("transformers"),
        # Its tables make weights of quants; numpy computes with them.
        "gguf_version": version("gguf"),
        "numpy_version": version("numpy"),
        "code": code_digest(),
        "mode": mode,
    }
    left_out = _NOT_PORTABLE if mode == "portable" else ()
    return Fingerprint(named | {name: value for name, value in if_set.items() if value}, frozenset(left_out))


def _implementations(config: Any, attribute: str) -> str:
    """Returns the kernels of a configuration and of those inside it: `sdpa`, or `sdpa,text_config=eager`."""
    names = [str(getattr(config, attribute, None) or "")]
    for key in sorted(getattr(config, "sub_configs", {})):
        inner = getattr(getattr(config, key, None), attribute, None)
        if inner:
            names.append(f"{key}={inner}")
    return ",".join(names)


def _adapters(model: Any) -> str:
    configs: Mapping[str, Any] = getattr(model, "peft_config", None) or {}
    if not configs:
        return ""
    active = getattr(model, "active_adapters", None)
    active = active() if callable(active) else active
    described = {
        name: {"config": architecture(_as_dict(config)), "content": _parameters_digest(model, name)}
        for name, config in configs.items()
    }
    return canonical({"active": sorted([active] if isinstance(active, str) else active or []), "adapters": described})


def _parameters_digest(model: Any, adapter: str) -> str:
    """Returns the SHA-256 of the parameters of one adapter, which peft names `….lora_A.<adapter>.weight`."""
    import torch

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if adapter in name.split("."):
            content = parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
            digest.update(f"{len(name)}:{name}:{parameter.dtype}:{tuple(parameter.shape)}:".encode())
            digest.update(content.tobytes())
    return digest.hexdigest()


def _as_dict(config: Any) -> dict[str, Any]:
    return dict(config) if isinstance(config, Mapping) else dict(config.to_dict())
