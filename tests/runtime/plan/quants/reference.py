"""The numbers of quants as other programs read them: the library `gguf`, and llama.cpp's own.

`gguf` has no `Q1_0` and no `Q2_0` yet. `python -m tests.runtime.plan.quants.reference` prints digests of what the
functions of llama.cpp's compiled library give, where `tools/bench models` has installed it.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from diskprefix.folders import cache_home
from diskprefix.runtime.load.tiny_models import below

Array = np.ndarray[Any, Any]
SIZES: dict[str, tuple[int, int]] = {
    **{kind.name: size for kind, size in gguf.GGML_QUANT_SIZES.items()},
    "Q1_0": (128, 18),
    "Q2_0": (64, 18),
}
"""The weights and bytes of a block (`gguf.GGML_QUANT_SIZES` and `ggml-common.h`)."""
COMPARED = ("NVFP4", "Q1_0", "Q2_0")
"""Types that are compared with llama.cpp's library."""


def dequantised(kind: str, content: Array) -> Array:
    """Returns the numbers of rows, float32 [rows, columns]."""
    if kind not in ("Q1_0", "Q2_0"):
        found: Array = gguf.dequantize(content, gguf.GGMLQuantizationType[kind])
        return found
    blocks = content.reshape(len(content), -1, SIZES[kind][1])
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[..., 2:], axis=-1, bitorder="little").astype(np.float32)
    numbers = 2 * bits - 1 if kind == "Q1_0" else bits[..., ::2] + 2 * bits[..., 1::2] - 1
    return np.asarray((numbers * scales).reshape(len(content), -1))


def made_up(kind: str) -> Array:
    """Returns rows with any bytes, and float16 scales that are numbers."""
    weights, num_bytes = SIZES[kind]
    blocks = below(256, 8 * 512 // weights * num_bytes, 1).astype(np.uint8).reshape(8, -1, num_bytes)
    if kind != "NVFP4":
        blocks[..., 1] = blocks[..., 1] & 0xBF
    return blocks.reshape(8, -1)


def of_llama_cpp(kind: str, content: Array) -> Array | None:
    """Returns the numbers of rows as llama.cpp's library reads them, None if it is not installed."""
    installed = cache_home() / "environments" / "llama.cpp" / "node_modules" / "@node-llama-cpp"
    found = next(iter(sorted(installed.glob("*/bins/*/libggml-base.so"))), None)
    return None if found is None else _called(found, kind, content)


def _called(library: Path, kind: str, content: Array) -> Array:
    function = getattr(ctypes.CDLL(str(library)), f"dequantize_row_{kind.lower()}")
    function.restype, function.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    weights, num_bytes = SIZES[kind]
    out = np.empty(content.size // num_bytes * weights, np.float32)
    function(content.ctypes.data, out.ctypes.data, out.size)
    return out.reshape(len(content), -1)


def digest(numbers: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(numbers, "<f4").tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    for name in COMPARED:
        numbers = of_llama_cpp(name, made_up(name))
        print(f'    "{name}": "{"not installed" if numbers is None else digest(numbers)}",')
