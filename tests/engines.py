"""The engine that computes the models of real daemons in tests.

With DISKPREFIX_TEST_ENGINE=llama, `write_chat_model` writes a `.gguf` file instead of safetensors, and daemons get
`--engine llama`. `tools/llama tests` sets it for the suites that it names.
"""

from __future__ import annotations

import os

import pytest

ENGINE = os.environ.get("DISKPREFIX_TEST_ENGINE", "auto")
"""The value of `--engine` for daemons of tests."""


def not_by_llama(reason: str) -> pytest.MarkDecorator:
    """Returns the mark of tests that llama.cpp's library cannot pass by design, for a `reason`."""
    return pytest.mark.skipif(ENGINE == "llama", reason=f"not with --engine llama: {reason}")
