"""A part of each matrix, which turns with the commit: what a matrix shows is seen at most some commits later, without
anybody who runs all of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.cache_folder import USERS
from tests.daemon.chat.families.sources import VOCABULARIES
from tests.exactness import worker
from tests.exactness.rows import DTYPES, answers_of, judged
from tests.faults.seeds import part_of
from tools.__main__ import SECTIONS
from tools.benchmarks import files, templates
from tools.benchmarks.file_models import CASES
from tools.benchmarks.sources import SOURCES
from tools.benchmarks.template_engines import Sandbox, Transformers
from tools.benchmarks.template_sources import Found
from tools.benchmarks.token_ids import FOLDERS
from tools.faults import exactness

ROOT = Path(__file__).parents[2]
FIGURES = "figures.json"
OTHERWISE = {
    "kills": "tests/faults/test_kills.py",
    "packed": "tests/faults/test_packed_weights.py",
    "witness": "programs of others, which are installed for it",
    "streams": "tests/tools/test_streams.py",
    "fuzz": "tests/tools/test_bench.py",
    "walls": "tests/tools/test_taken_away.py, and weekly",
}
"""Matrices whose rows cannot be tried one by one in seconds, and what runs instead."""


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Returns what finds one of `SOURCES` in the user's folder, and skips the test if it was not fetched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(USERS))

    def find(name: str) -> Any:
        return SOURCES[name](lambda _line: pytest.skip(f"needs {name}: `tools/bench sources` fetches it"))

    return find


def rows_of(*arguments: str) -> Any:
    """Returns the rows of a matrix. Fails if one is wrong."""
    command = [sys.executable, "-P", "-m", "tools", *arguments, "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{arguments}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
    return json.loads(done.stdout)


def measure_file(name: str, folder: Path) -> None:
    """Writes the figures of a row. The converter brings a library into the process whose version is another one."""
    files.load_converter(SOURCES["converter"](print))
    libraries = SOURCES["libraries-of-llama.cpp"](print)
    figures = files.measured(CASES[name], libraries, folder)
    (folder / FIGURES).write_text(json.dumps(figures), encoding="utf-8")


def test_the_file_of_this_commits_architecture_is_read_right(found: Callable[[str], Any], tmp_path: Path) -> None:
    found("converter")
    found("libraries-of-llama.cpp")
    (name,) = part_of("files", list(CASES))
    assert forked.run(measure_file, name, tmp_path) == 0
    by_form = json.loads((tmp_path / FIGURES).read_bytes())
    assert by_form
    assert {form: figures["fault"] for form, figures in by_form.items() if figures["fault"]} == {}, name


def test_this_commits_architecture_is_restored_bit_for_bit(tmp_path: Path) -> None:
    rows = [(name, dtype) for name in exactness.chosen_names(None, real=False)[0] for dtype in DTYPES]
    ((name, dtype),) = part_of("exactness", rows)
    (job,) = exactness.tiny_jobs([name], (dtype,), tmp_path, 8)
    for phase in ("save", "restore"):
        assert forked.run(worker.do, phase, job) == -signal.SIGKILL
    row = judged(job, answers_of(job, "save"), answers_of(job, "restore"))
    assert row.is_as_it_should_be, row


def test_this_commits_templates_are_written_as_transformers_writes_them(found: Callable[[str], Any]) -> None:
    published: list[Found] = found("templates")
    engines = {templates._SANDBOX: Sandbox()}
    results = [templates.result_of(each, Transformers(), engines) for each in part_of("templates", published, 2)]
    assert templates.faults(results) == []


def test_this_commits_vocabulary_gives_the_token_ids_of_other_programs(found: Callable[[str], Any]) -> None:
    found("libraries-of-llama.cpp")
    found("vocabularies")
    (name,) = part_of("tokenizers", [*VOCABULARIES, *FOLDERS])
    assert {pair["vocabulary"] for pair in rows_of("tokenizers", "--only", name)} == {name}


def test_a_part_of_each_matrix_turns_with_the_commit() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    drawn = {name for text in texts for name in re.findall(r'(?:part_of|seeds_of)\(f?"([\w-]+)', text)}
    assert SECTIONS["Matrices"].keys() - drawn == OTHERWISE.keys()
