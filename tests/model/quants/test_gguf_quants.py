"""The quantised types of GGUF files: their forms, and matrices made of their rows."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch

from diskprefix.model.quants.quant_form import FILE_FORMS, form_of

_HALVES = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "IQ1_M": (),
}
"""At which bytes of a block there are float16 numbers, where not at the first one alone."""


def content_of(kind: str, rows: int = 16, columns: int = 512) -> np.ndarray[Any, Any]:
    """Random blocks with random finite scales."""
    rng = np.random.default_rng(len(kind))
    weights, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (rows, columns // weights, num_bytes), dtype=np.uint8)
    for at in _HALVES.get(kind, (0,)):
        numbers = rng.normal(0, 0.01, blocks[..., :1].shape).astype(np.float16)
        blocks[..., at : at + 2] = numbers.view(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = rng.integers(100, 140, blocks[..., 0].shape)
    if kind == "IQ1_M":  # The first bits of its float16.
        blocks[..., 55] = blocks[..., 55] & 15 | 32
    return blocks.reshape(rows, -1)


def dequantised(kind: str, content: np.ndarray[Any, Any]) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.dequantize(content, gguf.GGMLQuantizationType[kind])).bfloat16()


def test_memory_is_hardly_more_than_the_file() -> None:
    """The few that take more are decoded codes of a grid."""
    more = {}
    for kind, form in FILE_FORMS.items():
        weights, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        more[kind] = form.weight_bits / (num_bytes * 8 / weights)
    grids = {kind for kind in FILE_FORMS if kind.startswith(("IQ1", "IQ2", "IQ3", "TQ1"))}
    assert {kind for kind, times in more.items() if times > 1.05} == grids
    assert form_of("F16") is None
