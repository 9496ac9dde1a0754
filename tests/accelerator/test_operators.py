"""The kernels in Triton's interpreter: what they compute, and that a row has the same bits in any company."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tools.accelerator.parts import INTERPRETED, Task


@pytest.mark.slow
def test_the_kernels_compute_what_torch_does_and_a_row_has_the_same_bits_in_any_company(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    # The interpreter is chosen when Triton is imported.
    environment = {**os.environ, **INTERPRETED}
    task = json.dumps(asdict(Task("kernels", "tiny", "cpu", str(tmp_path))))
    command = [sys.executable, "-m", "tools.accelerator.parts", task]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert len(rows) > 4
    assert {row["state"] for row in rows} == {"pass"}, found.stdout
