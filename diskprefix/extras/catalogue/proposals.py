"""Models of the hub for those who have none: `launch`, `doctor` and the refusal of an unknown name propose one."""

from __future__ import annotations

from diskprefix.model.load.fit import ROOM_BYTES
from diskprefix.model.load.memory import available_ram_bytes

_PROPOSED = {
    "unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_M": 23_500_000_000,
    "unsloth/gemma-4-26B-A4B-it-GGUF:UD-Q4_K_M": 17_100_000_000,
    "ggml-org/gpt-oss-20b-GGUF:MXFP4": 12_110_000_000,
    "unsloth/gemma-4-E4B-it-GGUF:Q4_K_M": 8_740_000_000,
    "unsloth/Qwen3.5-9B-GGUF:Q4_K_M": 7_930_000_000,
    "unsloth/gemma-4-E2B-it-GGUF:Q4_K_M": 6_230_000_000,
    "unsloth/Qwen3.5-4B-GGUF:Q8_0": 5_420_000_000,
    "unsloth/Qwen3.5-4B-GGUF:Q4_K_M": 4_130_000_000,
    "unsloth/Qwen3.5-2B-GGUF:Q4_K_M": 1_800_000_000,
}
"""Models that call tools well, and the bytes of their weights in memory, from the largest to the smallest.

The bytes are parameters × bits: 5.1 to 5.4 bits for each parameter of Q4_K_M, 8.5 of Q8_0, 4.6 of the MXFP4 file. What
is not kept as quants has 16 bits: the recurrent layers of Qwen (0.4 to 1.6 billion parameters) and the embeddings of
each layer of Gemma 4 E2B and E4B (2.3 and 2.8 billion).
"""
_KV_BYTES = 5 << 28
"""Memory for KV. In half of it each of the models has a context of 16 384 tokens."""


def proposed() -> str:
    """Returns the largest that fits into the free memory, or else the smallest."""
    free = available_ram_bytes()
    fitting = (name for name, num_bytes in _PROPOSED.items() if num_bytes + ROOM_BYTES + _KV_BYTES <= free)
    return next(fitting, [*_PROPOSED][-1])
