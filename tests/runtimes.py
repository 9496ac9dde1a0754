"""The runtime that computes the models of real daemons in tests.

With DISKPREFIX_TEST_RUNTIME=llama, `write_chat_model` writes a `.gguf` file instead of safetensors, and daemons get
`--runtime llama`. `tools/llama tests` sets it for the suites that it names.
"""

from __future__ import annotations

import os

import pytest

RUNTIME = os.environ.get("DISKPREFIX_TEST_RUNTIME", "auto")
"""The value of `--runtime` for daemons of tests."""


REPLIES_LATER = "replies are computed again in idle time before they are saved"
"""A reason for `not_by_llama`."""


def not_by_llama(reason: str) -> pytest.MarkDecorator:
    """Returns the mark of tests that llama.cpp's library cannot pass by design, for a `reason`."""
    return pytest.mark.skipif(RUNTIME == "llama", reason=f"not with --runtime llama: {reason}")


def restorable(num_tokens: int, block_size: int = 16) -> int:
    """Returns how many of the first tokens of a prompt can be restored if `num_tokens` of them were saved before: the
    library's state is exact at multiples of the block size."""
    return num_tokens - num_tokens % block_size if RUNTIME == "llama" else num_tokens
