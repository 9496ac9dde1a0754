"""The kernels in Triton's interpreter: what they compute, and that a row has the same bits in any company."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def test_the_kernels_compute_what_torch_does_and_a_row_has_the_same_bits_in_any_company() -> None:
    pytest.importorskip("triton")
    # The interpreter is chosen when Triton is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run(
        [sys.executable, "-m", "tests.accelerator.interpreted"], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "done"
