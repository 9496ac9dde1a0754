"""The hardware, kernel packages and switches that decide how a model's numbers are rounded."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ENVIRONMENT = """
    CUBLAS_WORKSPACE_CONFIG DNNL_CPU_ISA_HINTS DNNL_DEFAULT_FPMATH_MODE DNNL_MAX_CPU_ISA MKL_CBWR
    MKL_ENABLE_INSTRUCTIONS NVIDIA_TF32_OVERRIDE ONEDNN_CPU_ISA_HINTS ONEDNN_DEFAULT_FPMATH_MODE ONEDNN_MAX_CPU_ISA
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    KMP_DYNAMIC MKL_DYNAMIC OMP_DYNAMIC OMP_THREAD_LIMIT
"""
"""Environment variables that change numbers and that torch does not report: precisions, kernels, and numbers of threads
that change on the way. ATEN_CPU_CAPABILITY is not among them, because `cpu_kind` names the result of it."""

_OF_PROCESSOR = (
    *("vendor_id", "cpu family", "model", "stepping", "flags"),
    *("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features"),
)
"""The lines of `/proc/cpuinfo` that tell CPUs apart."""

_KERNELS = "bitsandbytes causal_conv1d fla flash_attn kernels mamba_ssm mambapy torchao xformers"
"""The modules whose kernels transformers uses where they are installed."""


def environment() -> dict[str, str]:
    """Returns the environment variables that change numbers, as far as they are set and not empty."""
    return {name: os.environ[name].strip() for name in _ENVIRONMENT.split() if os.environ.get(name, "").strip()}


@cache
def kernel_packages() -> dict[str, str]:
    """Returns the installed packages of kernels with their versions. They are looked up once, as transformers does."""
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str] = {}
    for module in _KERNELS.split():
        if find_spec(module) is not None:
            try:
                versions[module] = version("flash-linear-attention" if module == "fla" else module)
            except PackageNotFoundError:
                versions[module] = "unknown"
    return versions


def matmul_precision() -> str:
    """Returns torch's float32 matmul precision, or `mixed` where it is set for single backends (see `switches`)."""
    import torch

    return str(_read_setting(torch.get_float32_matmul_precision))


def switches(model: Any) -> dict[str, Any]:
    """Returns torch's switches of kernels and precision that are not at their defaults."""
    import torch

    # Any: torch leaves most of them without types.
    backends: Any = torch.backends
    cuda, cudnn, mkldnn, device = backends.cuda, backends.cudnn, backends.mkldnn, model.device.type
    settings: dict[str, tuple[Callable[[], Any], Any]] = {
        "flash_sdp": (cuda.flash_sdp_enabled, True),
        "mem_efficient_sdp": (cuda.mem_efficient_sdp_enabled, True),
        "math_sdp": (cuda.math_sdp_enabled, True),
        "cudnn_sdp": (cuda.cudnn_sdp_enabled, True),
        "fp16_reduced_precision_reduction": (lambda: cuda.matmul.allow_fp16_reduced_precision_reduction, True),
        "bf16_reduced_precision_reduction": (lambda: cuda.matmul.allow_bf16_reduced_precision_reduction, True),
        "fp16_accumulation": (lambda: cuda.matmul.allow_fp16_accumulation, False),
        "cuda_matmul_fp32": (lambda: _fp32(cuda.matmul), "ieee"),
        "mkldnn": (lambda: mkldnn.enabled, True),
        "mkldnn_deterministic": (lambda: mkldnn.deterministic, False),
        "mkldnn_matmul_fp32": (lambda: _fp32(mkldnn.matmul), "ieee"),
        "cudnn": (lambda: cudnn.enabled, True),
        "cudnn_tf32": (lambda: cudnn.allow_tf32, True),
        "cudnn_benchmark": (lambda: cudnn.benchmark, False),
        "cudnn_deterministic": (lambda: cudnn.deterministic, False),
        "deterministic": (torch.are_deterministic_algorithms_enabled, False),
        "autocast": (lambda: torch.is_autocast_enabled(device) and str(torch.get_autocast_dtype(device)), False),
        "default_dtype": (torch.get_default_dtype, torch.float32),
        "flush_denormal": (lambda: not torch.tensor(1e-39) * 1.0, False),
        "compiled": (lambda: getattr(model, "_compiled_call_impl", None) is not None, False),
    }
    return {name: value for name, (read, default) in settings.items() if (value := _read_setting(read)) != default}


def _fp32(backend: Any) -> str:
    """Returns the precision of float32 products. torch says `none` before it is set, and means `ieee`."""
    precision = str(backend.fp32_precision)
    return "ieee" if precision == "none" else precision


def _read_setting(read: Callable[[], Any]) -> Any:
    """Returns the value of a switch. torch refuses to tell a setting that was changed through its newer names, which
    are read too."""
    try:
        return read()
    except RuntimeError:
        return "mixed"


def device_kind(device: torch.device) -> str:
    """Returns the type of the device, with the name of the GPU if it has one. GPUs of AMD are `cuda` too."""
    import torch

    if device.type not in ("cuda", "xpu"):
        return device.type
    return f"{device.type} {torch.get_device_module(device).get_device_name(device)}"


def processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """Returns the kernel's description of the first CPU: maker, model and features. The same library may give other
    bits on another CPU."""
    try:
        lines = file.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return "; ".join(" ".join(line.split()) for line in lines if line.partition(":")[0].strip() in _OF_PROCESSOR)


def cpu_kind() -> str:
    """Returns the vector instructions that torch uses, and a digest of all it knows of this CPU but its cores: oneDNN
    and MKL choose their kernels by vendor, instruction set (AMX, bf16) and cache sizes themselves."""
    import torch

    offers = {key: value for key, value in torch.cpu.get_capabilities().items() if not key.startswith("num_")}
    text = json.dumps(offers, sort_keys=True, separators=(",", ":"))
    return f"{torch.backends.cpu.get_cpu_capability()} {hashlib.sha256(text.encode()).hexdigest()[:12]}"
