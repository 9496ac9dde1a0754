"""Models of the hub for those who have none: `launch`, `doctor` and the refusal of an unknown name propose one."""

from __future__ import annotations

from diskprefix.model.load.memory import available_ram_bytes

_PROPOSED = {
    "unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_M": 24_900_000_000,
    "unsloth/gemma-4-26B-A4B-it-GGUF:UD-Q4_K_M": 19_500_000_000,
    "ggml-org/gpt-oss-20b-GGUF:MXFP4": 13_700_000_000,
    "unsloth/gemma-4-E4B-it-GGUF:Q4_K_M": 10_200_000_000,
    "unsloth/Qwen3.5-9B-GGUF:Q4_K_M": 9_700_000_000,
    "unsloth/gemma-4-E2B-it-GGUF:Q4_K_M": 7_400_000_000,
    "unsloth/Qwen3.5-4B-GGUF:Q4_K_M": 5_900_000_000,
    "unsloth/Qwen3.5-2B-GGUF:Q4_K_M": 2_900_000_000,
}
"""Models that call tools well, from the largest to the smallest, and the bytes of memory that each needs for a context
of 16 384 tokens.

The bytes are those of `model.load.fit` for the shapes of the models. The files have parameters × bits: 5.1 to 5.4 bits
of each parameter in Q4_K_M, 4.6 in MXFP4. In memory the recurrent layers of Qwen (0.4 to 1.6 billion parameters) and
the embeddings of each layer of Gemma 4 E2B and E4B (2.3 and 2.8 billion) have 16 bits.
"""


def none_known() -> str:
    """Returns that no model is known, and what to do."""
    fetching = f"fetch one with `diskprefix pull {proposed()}`, or put a .gguf file below --models-dir"
    return f"no model is known: {fetching}; the daemon looks again at SIGHUP and at its next start"


def proposed() -> str:
    """Returns the largest model that fits into the free memory, or else the smallest."""
    free = available_ram_bytes()
    return next((name for name, num_bytes in _PROPOSED.items() if num_bytes <= free), [*_PROPOSED][-1])
