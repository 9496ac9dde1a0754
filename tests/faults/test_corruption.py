"""`tools/bench corruption`, scaled down: a daemon's store on damaged files, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.examples import thorough
from tests.faults.file_damage import FILE_DAMAGE, RECORD_DAMAGE, DataFile
from tools.faults.corruption import VERDICTS, build

ROOT = Path(__file__).parent.parent.parent
CASES = 1
"""Of each kind. The tool runs thousands."""
KINDS = ("no damage", *FILE_DAMAGE, *RECORD_DAMAGE)
WITHOUT_THE_CHECK = """
from diskprefix.store import environment, opening
environment.require_survivable = environment.is_sound_run = lambda *_: True
opening.mend_runs = lambda _path: False
opening.require_sound_meta = lambda _path: None
from tools.faults.corruption import main
main()
"""


def matrix(cases: int, folder: Path, *program: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and cases of the tool."""
    arguments = ["--cases", str(cases), "--seed", "7000", "--json", "--folder", str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *(program or ("-m", "tools", "corruption")), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    return done.returncode, json.loads(done.stdout)["cases"]


@pytest.mark.slow
def test_no_damage_leads_to_a_wrong_byte_a_crash_a_hang_or_a_crash_loop(tmp_path: Path) -> None:
    code, cases = matrix(CASES * len(KINDS), tmp_path)
    verdicts = {kind: Counter(case["verdict"] for case in cases if case["kind"] == kind) for kind in KINDS}
    assert [case for case in cases if case["verdict"] not in VERDICTS] == []
    assert code == 0
    assert verdicts["no damage"] == {"nothing lost": CASES}
    assert verdicts["swapped payloads"] == {"part lost": CASES}
    assert all(verdicts[kind].total() == CASES for kind in KINDS)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("kind", "seed", "verdict"),
    [
        # Keys that are listed and not found: LMDB reads such a file to its end, and the writer comes upon it.
        ("swapped pages", 454, "fresh store"),
        # A length that no memory has room for.
        ("damaged meta pages", 1338, "fresh store"),
        # Headers of payloads: an error that the binding does not expect, and a wrong list of free pages later.
        ("extreme numbers in the structure", 1331, "nothing lost"),
        ("extreme numbers in the structure", 1683, "nothing lost"),
    ],
)
def test_what_ended_the_writer_or_a_start_is_mended_or_moved_aside(
    kind: str, seed: int, verdict: str, tmp_path: Path
) -> None:
    made = f"run_case(folder / 'case', build(folder / 'original'), {kind!r}, {seed})"
    program = (
        "from pathlib import Path\nfrom tools.faults.corruption import build, run_case\n"
        f"folder = Path({str(tmp_path)!r})\nprint({made}.verdict)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    assert done.stdout == f"{verdict}\n"


def records(data: bytes) -> tuple[list[int], dict[bytes, list[tuple[int, bytes]]]]:
    """The pages of a file that LMDB reads, and the place and bytes of every record. Between records, LMDB leaves bytes
    that differ from run to run, such as addresses in memory."""
    file = DataFile(bytearray(data))
    places = file.databases.items()
    return file.structure, {name: [(at, data[at : at + size]) for at, size in some] for name, some in places}


def test_the_store_that_a_seed_damages_is_the_same_in_every_run(tmp_path: Path) -> None:
    one, other = build(tmp_path / "one"), build(tmp_path / "other")
    assert records(one.data) == records(other.data)
    assert records(one.older) == records(other.older)


@thorough
@pytest.mark.slow
def test_without_the_check_of_the_file_the_matrix_finds_crash_loops(tmp_path: Path) -> None:
    """So the test above can fail: LMDB does not survive this damage, however often it starts."""
    code, cases = matrix(len(KINDS), tmp_path, "-c", WITHOUT_THE_CHECK)
    assert code == 1
    assert any(case["verdict"].startswith("signal") for case in cases)
