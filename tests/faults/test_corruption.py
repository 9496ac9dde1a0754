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

from diskprefix.errors import StoreCorrupt
from diskprefix.prefixstore.store.btree_check import require_sound_meta, require_survivable
from tests.examples import thorough
from tests.faults.file_damage import FILE_DAMAGE, PAGE, RECORD_DAMAGE, STRUCTURES, DataFile, extremes
from tests.faults.seeds import seeds_of
from tools.faults.corruption import VERDICTS, build

ROOT = Path(__file__).parent.parent.parent
KINDS = ("no damage", *FILE_DAMAGE, *RECORD_DAMAGE)
NUMBERS = [(name, index) for name, (_, types) in STRUCTURES.items() for index in range(len(types))]
WITHOUT_THE_CHECK = """
from diskprefix.prefixstore.store import environment, opening
environment.require_survivable = environment.is_sound_run = lambda *_: True
opening.mend_runs = lambda _path: False
opening.require_sound_meta = lambda _path: None
from tools.faults.corruption import main
main()
"""


def matrix(seeds: range, folder: Path, *program: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and cases of the tool. It runs thousands."""
    arguments = ["--cases", str(len(seeds)), "--seed", str(seeds[0]), "--json", "--folder", str(folder)]
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


@pytest.mark.parametrize("cases", [4, pytest.param(len(KINDS), marks=pytest.mark.slow)])
def test_no_damage_leads_to_a_wrong_byte_a_crash_a_hang_or_a_crash_loop(cases: int, tmp_path: Path) -> None:
    code, found = matrix(seeds_of("corruption", cases), tmp_path)
    verdicts = {kind: Counter(case["verdict"] for case in found if case["kind"] == kind) for kind in KINDS}
    assert [case for case in found if case["verdict"] not in VERDICTS] == []
    assert code == 0
    assert len(found) == cases
    if cases == len(KINDS):
        assert {kind for kind in KINDS if verdicts[kind].total() != 1} == set()
        assert verdicts["no damage"] == {"nothing lost": 1}
        assert verdicts["swapped payloads"] == {"part lost": 1}


def run(program: str, folder: Path) -> str:
    """Returns what a program prints that has a store in `original`. No threads run in it, so it may fork."""
    names = "build, run_case, run_file"
    begin = f"from pathlib import Path\nfrom tools.faults.corruption import {names}\nfolder = Path({str(folder)!r})\n"
    program = begin + "original = build(folder / 'original')\n" + program
    return subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT
    ).stdout


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        # Keys that are listed and not found: LMDB reads such a file to its end, and the writer comes upon it.
        ("swapped pages", 454),
        # A length that no memory has room for.
        ("damaged meta pages", 1338),
        # A page number whose place in the file fits no number of the system.
        ("damaged meta pages", 442),
        ("damaged meta pages", 1514),
        # Headers of payloads: an error that the binding does not expect, and a wrong list of free pages later.
        ("extreme numbers in the structure", 1331),
        ("extreme numbers in the structure", 1683),
        # The pages of one payload over those of another, with the header: LMDB freed the wrong ones, and two payloads
        # then shared pages.
        ("misdirected writes", 503),
        ("misdirected writes", 903),
        ("misdirected writes", 1319),
    ],
)
def test_what_ended_the_writer_or_a_start_is_mended_or_moved_aside(kind: str, seed: int, tmp_path: Path) -> None:
    """What is lost depends on the names of the nodes, which differ from run to run."""
    verdict = run(f"print(run_case(folder / 'case', original, {kind!r}, {seed}).verdict)", tmp_path)
    assert verdict.strip() in ("nothing lost", "part lost", "fresh store")


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("structure", "index"), [(name, n) for name, one in STRUCTURES.items() for n in range(len(one[1]))]
)
def test_each_number_of_the_file_is_compared_before_it_is_used(structure: str, index: int, tmp_path: Path) -> None:
    program = (
        "from tests.faults.file_damage import DataFile, extremes\n"
        f"for place, value in extremes(DataFile(bytearray(original.data)), {structure!r}, {index}):\n"
        "    data = original.data[:place] + value + original.data[place + len(value) :]\n"
        f"    print(run_file(folder / 'case', original, data, {structure!r}, int.from_bytes(value, 'little')))\n"
    )
    verdicts = run(program, tmp_path).splitlines()
    assert len(verdicts) >= 2
    assert [case for case in verdicts if not any(f"verdict={known!r}" in case for known in VERDICTS)] == []


def test_whatever_a_page_number_or_a_count_is_the_check_of_the_file_knows_what_it_says(tmp_path: Path) -> None:
    sound = DataFile(bytearray(build(tmp_path).data))
    path, checked = tmp_path / "data.mdb", Counter[str]()
    with path.open("r+b", buffering=0) as file:
        for structure, index in NUMBERS:
            if STRUCTURES[structure][1][index] != "Q":
                continue
            for place, value in extremes(sound, structure, index):
                os.pwrite(file.fileno(), value, place)
                checked[check(path, file.fileno())] += 1
                os.pwrite(file.fileno(), sound.data[place : place + len(value)], place)
    assert checked["damaged"] > checked["sound"] > 0


def check(path: Path, fd: int) -> str:
    """What the check of a file says, which LMDB opens at the newer of its two commits."""
    commits = [int.from_bytes(os.pread(fd, 8, page + 144), "little") for page in (0, PAGE)]
    try:
        require_sound_meta(path)
        assert require_survivable(path, fd, max(commits))
    except StoreCorrupt:
        return "damaged"
    return "sound"


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
    code, cases = matrix(range(7000, 7000 + len(KINDS)), tmp_path, "-c", WITHOUT_THE_CHECK)
    assert code == 1
    assert any(case["verdict"].startswith("signal") for case in cases)
