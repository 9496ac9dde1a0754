"""How many random examples a test tries."""

from __future__ import annotations

import os

import pytest

_FACTOR = int(os.environ.get("DISKPREFIX_TEST_EXAMPLES", "1"))

thorough = pytest.mark.skipif(_FACTOR == 1, reason="takes long: set DISKPREFIX_TEST_EXAMPLES=2")
"""For what a benchmark checks too each time it runs."""


def examples(least: int) -> int:
    """Returns `least`, times what the environment variable DISKPREFIX_TEST_EXAMPLES says."""
    return least * _FACTOR
