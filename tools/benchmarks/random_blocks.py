"""Random tensors in the types of GGUF files. Their mean is zero: with another mean all positions give nearly the same
logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Generator = np.random.Generator

_UNIFORM_4, _UNIFORM_6, _UNIFORM_8 = 4.61, 18.47, 73.3
"""Standard deviations of uniform whole numbers of 4 bits, 6 bits and from -127 to 127."""
_MXFP4_RMS, _MXFP4_BIAS = 2.93, 127
_HALF_OF_16 = 7.5


def random_blocks(kind: str, shape: tuple[int, ...], std: float, choose: Generator, mean: float = 0.0) -> Array:
    """Returns a tensor of type `kind` and torch's `shape`. Quantised types are uint8 [..., bytes of a row] and have the
    mean zero. `std` is the standard deviation of its numbers."""
    if kind == "F32":
        return choose.normal(mean, std, shape).astype(np.float32)
    size, block_bytes, fill = _TYPES[kind]
    count = int(np.prod(shape)) // size
    blocks = choose.integers(0, 256, (count, block_bytes), np.uint8)
    fill(blocks, std, choose)
    return blocks.reshape(*shape[:-1], shape[-1] // size * block_bytes)


def _halves(values: Array | float, count: int) -> Array:
    """Returns float16 numbers as bytes [count, 2]."""
    return np.broadcast_to(np.asarray(values, np.float16), (count,)).copy().view(np.uint8).reshape(count, 2)


def _signs(count: int, choose: Generator) -> Array:
    return choose.choice(np.array([-1.0, 1.0], np.float32), count)


def _fill_q8_0(blocks: Array, std: float, choose: Generator) -> None:
    numbers = blocks[:, 2:].view(np.int8)
    # Quantised files have no -128.
    numbers[numbers == -128] = 0
    blocks[:, :2] = _halves(_signs(len(blocks), choose) * std / _UNIFORM_8, len(blocks))


def _fill_q4_0(blocks: Array, std: float, choose: Generator) -> None:
    blocks[:, :2] = _halves(_signs(len(blocks), choose) * std / _UNIFORM_4, len(blocks))


def _fill_q4_k(blocks: Array, std: float, _choose: Generator) -> None:
    """Numbers are scale × (q - 7.5): each group's minimum is its scale, times that of the block."""
    scale = std / (_UNIFORM_4 * 36.5)
    blocks[:, :2] = _halves(scale, len(blocks))
    blocks[:, 2:4] = _halves(_HALF_OF_16 * scale, len(blocks))
    # Twelve bytes hold eight scales and eight minima of six bits; equal bytes in these places make equal numbers.
    blocks[:, 8:12] = blocks[:, 4:8]
    low = blocks[:, 12:16] & 15
    blocks[:, 12:16] = low | low << 4


def _fill_q6_k(blocks: Array, std: float, _choose: Generator) -> None:
    """Scales have six bits and both signs."""
    blocks[:, 192:208] = ((blocks[:, 192:208] & 63).astype(np.int8) - 32).view(np.uint8)
    blocks[:, 208:] = _halves(std / (_UNIFORM_6 * _UNIFORM_6), len(blocks))


def _fill_mxfp4(blocks: Array, std: float, choose: Generator) -> None:
    """The scale is a power of two: the one below what is wanted, or the one above."""
    exponent = np.floor(np.log2(std / _MXFP4_RMS)) + _MXFP4_BIAS
    blocks[:, 0] = exponent + choose.integers(0, 2, len(blocks))


_TYPES: dict[str, tuple[int, int, Callable[[Array, float, Generator], None]]] = {
    "Q4_0": (32, 18, _fill_q4_0),
    "Q8_0": (32, 34, _fill_q8_0),
    "Q4_K": (256, 144, _fill_q4_k),
    "Q6_K": (256, 210, _fill_q6_k),
    "MXFP4": (32, 17, _fill_mxfp4),
}
"""Numbers and bytes of a block, and the function that makes random bytes a block."""


def num_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a tensor of type `kind` and torch's `shape`."""
    count = int(np.prod(shape, dtype=np.int64))
    if kind == "F32":
        return 4 * count
    size, block_bytes, _ = _TYPES[kind]
    return count // size * block_bytes
