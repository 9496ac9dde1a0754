"""What a load imports, seen in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.model.tiny import write_gguf

PROGRAM = """
import json, sys
from diskprefix.model.load.loader import load_model
from diskprefix.settings import Settings

reasons = [load_model(Settings(model=model), print).reason for model in sys.argv[1:]]
print(json.dumps([reasons, [name for name in ("torch", "transformers") if name in sys.modules]]))
"""


@pytest.mark.usefixtures("cache")
def test_a_file_and_a_folder_that_have_plans_are_loaded_without_torch_and_transformers(
    chat_model: Path, tmp_path: Path
) -> None:
    models = [str(chat_model), str(write_gguf(tmp_path / "tiny.gguf", quantised="Q4_1"))]
    answer = subprocess.run([sys.executable, "-c", PROGRAM, *models], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout.splitlines()[-1]) == [["", ""], []]
