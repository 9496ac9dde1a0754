"""Checkpoints in FP8 on an accelerator, in Triton's interpreter: see `float8_checks`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples import thorough
from tests.model.quants.test_published import FLOAT8
from tools.accelerator.parts import INTERPRETED


@pytest.mark.slow
@pytest.mark.parametrize("names", [("blocks of 128",), pytest.param(tuple(FLOAT8), marks=thorough)], ids=len)
def test_a_checkpoint_in_fp8_stays_so_and_a_row_has_the_same_bits_in_any_company(
    names: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    # The interpreter is chosen when Triton is imported.
    environment = os.environ | INTERPRETED | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "tests.accelerator.float8_checks", str(tmp_path), *names]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout.splitlines() == [*names, "experts"]
