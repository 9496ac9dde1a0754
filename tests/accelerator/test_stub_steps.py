"""The engine's way on an accelerator, with a stub that counts copies and waits: see `stub_device`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.graph_checks import NUM_STEPS
from tests.examples import thorough
from tools.accelerator.parts import INTERPRETED


@pytest.mark.slow
@pytest.mark.parametrize(
    "models", [("qwen3_5",), pytest.param(("llama", "lfm2", "mamba2", "qwen3_next"), marks=thorough)], ids=" ".join
)
def test_a_decode_step_is_one_copy_to_the_device_and_one_back_and_has_the_same_bits_recorded(
    models: tuple[str, ...], tmp_path: Path
) -> None:
    """With 1 and 3 replies, greedy and sampled, and without an engine also of models with recurrent layers."""
    pytest.importorskip("triton")
    environment = (
        os.environ | INTERPRETED | {"ATEN_CPU_CAPABILITY": "default", "XDG_CACHE_HOME": str(tmp_path / "memo")}
    )
    command = [sys.executable, "-m", "tests.accelerator.stub_steps", str(tmp_path), *models]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-4000:]
    rows = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    lines, guesses, of_models = rows[:4], rows[4], rows[5:]
    assert [(line["recorded"], line["replies"]) for line in lines] == [(r, n) for r in (False, True) for n in (1, 3)]
    for line in lines:
        assert line["same"], line
        assert (line["uploads"], line["downloads"], line["waits"]) == (1, 1, 1), line
    first, both = (line["replays"] for line in lines[2:])
    assert 0 < first < both
    assert guesses == {"guesses": [0, 1, 2], "downloads": 1, "waits": 1}
    assert [row["model"] for row in of_models] == [*models]
    for row in of_models:
        assert row["replays"] == row["steps"] == NUM_STEPS, row
        assert bool(row["states"]) == (row["model"] != "llama")
