"""Whether stored state is finite. What is not finite spreads to every token after it, so it is never stored."""

from __future__ import annotations

import numpy as np
import torch

from diskprefix.kv.layout import Layout

_EXPONENTS: dict[torch.dtype, tuple[type[np.signedinteger], type[np.unsignedinteger], int]] = {
    torch.bfloat16: (np.int16, np.uint16, 0x7F80),
    torch.float16: (np.int16, np.uint16, 0x7C00),
    torch.float32: (np.int32, np.uint32, 0x7F800000),
}
"""Integers of the same size, and the bits of infinity. Those of NaN are greater; the sign is apart."""


def is_finite(payload: memoryview, layout: Layout, num_tokens: int) -> bool:
    """Whether the per-token state of `num_tokens` tokens, which `payload` begins with, has neither infinity nor NaN.
    Values of other types than bf16, fp16 and fp32 count as finite."""
    start = 0
    for group in layout.groups if num_tokens else ():
        end = start + group.bytes_per_token * num_tokens
        if group.dtype in _EXPONENTS and not _is_finite(payload[start:end], *_EXPONENTS[group.dtype]):
            return False
        start = end
    return True


def _is_finite(
    values: memoryview, signed: type[np.signedinteger], unsigned: type[np.unsignedinteger], infinity: int
) -> bool:
    # As signed numbers those above zero come last, as unsigned ones those below zero: the two maxima tell.
    largest = int(np.frombuffer(values, dtype=signed).max(initial=0))
    last = int(np.frombuffer(values, dtype=unsigned).max(initial=0))
    return largest < infinity and last < np.iinfo(signed).max + 1 + infinity
