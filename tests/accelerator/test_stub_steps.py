"""The engine's way on an accelerator, with a stub that counts copies and waits: see `stub_device`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.accelerator.parts import INTERPRETED


@pytest.mark.slow
def test_a_decode_step_is_one_copy_to_the_device_and_one_back_and_has_the_same_bits_recorded(tmp_path: Path) -> None:
    """With 1 and 8 replies, greedy and sampled; a step of 3 sequences is recorded with a row more."""
    pytest.importorskip("triton")
    environment = (
        os.environ | INTERPRETED | {"ATEN_CPU_CAPABILITY": "default", "XDG_CACHE_HOME": str(tmp_path / "memo")}
    )
    command = [sys.executable, "-m", "tests.accelerator.stub_steps", str(tmp_path)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-4000:]
    *lines, last = (json.loads(line) for line in found.stdout.splitlines() if line.startswith("{"))
    assert [(line["recorded"], line["replies"]) for line in lines] == [(r, n) for r in (False, True) for n in (1, 8)]
    for line in lines:
        assert line["same"], line
        assert (line["uploads"], line["downloads"], line["waits"]) == (1, 1, 1), line
    first, both = (line["replays"] for line in lines[2:])
    assert 0 < first < both
    assert last["replayed"] == [6]
