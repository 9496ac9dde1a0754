"""How many random examples a test tries."""

from __future__ import annotations

import os

_FACTOR = int(os.environ.get("DISKPREFIX_TEST_EXAMPLES", "1"))


def examples(least: int) -> int:
    """Returns `least`, times what the environment variable DISKPREFIX_TEST_EXAMPLES says."""
    return least * _FACTOR
