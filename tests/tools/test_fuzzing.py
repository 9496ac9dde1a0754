"""`tools/fuzz`: its corpus, replayed without a fuzzer, and what it says of a run."""

from __future__ import annotations

import random
import struct
import subprocess
from pathlib import Path

import pytest

from diskprefix.native import build
from tests.examples import examples, thorough
from tools.fuzzing import compiled, corpus, mutants, running
from tools.fuzzing.python_targets import TARGETS, Wrong

NATIVE = compiled.names()
SAID = """#2\tINITED cov: 5 ft: 6 corp: 1/1b exec/s: 0 rss: 30Mb
#900\tDONE   cov: 70 ft: 90 corp: 12/99b exec/s: 9 rss: 31Mb
Done 900 runs in 7 second(s)
stat::number_of_executed_units: 900
"""

EDGES = [sign + 2**bits for bits in (31, 32, 63) for sign in (-1, 0)]
NUMBERS = (0, 1, 2, 3, 9, 12, 13, 31, 255, 2**16, *EDGES, 2**62, 2**64 - 1)
"""Those that overflow sums and products or point behind the end."""


def damaged(content: bytes, choose: random.Random) -> bytes:
    """Returns `content` with one to three mutations."""
    changed = bytearray(content)
    for _ in range(choose.randint(1, 3)):
        at = choose.randrange(max(1, len(changed)))
        match choose.randrange(6):
            case 0:
                del changed[at:]
            case 1:
                changed[at : at + 1] = bytes([choose.randrange(256)])
            case 2:
                del changed[at : at + choose.choice((1, 4, 8, 100))]
            case 3:
                changed[at:at] = choose.randbytes(choose.choice((1, 4, 8, 100)))
            case 4:
                changed[at : at + 8] = struct.pack("<Q", choose.choice((*NUMBERS, len(content))))
            case _:
                changed[at : at + 4] = struct.pack("<I", choose.choice((*NUMBERS, len(content))) % 2**32)
    return bytes(changed)


def test_each_target_has_inputs_and_all_are_small() -> None:
    archives = {path.name.removesuffix("_seed_corpus.zip"): path for path in corpus.FOLDER.iterdir()}
    assert set(archives) == {*NATIVE, *TARGETS}
    assert sum(path.stat().st_size for path in archives.values()) <= corpus.MOST_BYTES


def test_the_operators_pass_the_corpus(tmp_path: Path) -> None:
    if not build.is_current():
        build.build()
    arguments = []
    for name in NATIVE:
        corpus.write_inputs(tmp_path / name, corpus.inputs_of(name).values())
        arguments += [name, str(tmp_path / name)]
    replayer = compiled.replayer(tmp_path, build.LIBRARY)
    done = subprocess.run([replayer, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert len(done.stderr.splitlines()) == sum(len(corpus.inputs_of(name)) for name in NATIVE)


@pytest.mark.parametrize("name", TARGETS)
def test_what_reads_strange_bytes_passes_the_corpus_and_damaged_inputs(name: str, tmp_path: Path) -> None:
    check, choose = TARGETS[name].opened(tmp_path), random.Random(1)
    inputs = [*corpus.inputs_of(name).values(), *TARGETS[name].seeds(tmp_path)]
    for data in inputs:
        check(data)
    for _ in range(examples(20)):
        check(damaged(choose.choice(inputs), choose))


def test_a_wrong_answer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.fuzzing.python_targets.join_with_numpy", lambda *_: False)
    check, sound = TARGETS["stored_piece"].opened(tmp_path), list(TARGETS["stored_piece"].seeds(tmp_path))
    with pytest.raises(Wrong, match="do not agree"):
        list(map(check, sound))


def test_a_run_says_how_much_was_tried_and_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "home", lambda: tmp_path / "home")
    target = running.Fuzzed("pack", "C++", ("pack",), 100)
    outcome = running.outcome_of(target, SAID, tmp_path)
    assert (outcome.executions, outcome.seconds, outcome.edges, outcome.inputs) == (900, 7, 70, 12)
    assert not outcome.finding
    (tmp_path / "crash-1").write_bytes(b"bad")
    for said, finding in (
        ("a.h:5:1: runtime error: division by zero\nSUMMARY: x", "a.h:5:1: runtime error: division by zero"),
        (" === Uncaught Python exception: ===\nWrong: what\nTraceback", "Wrong: what"),
        ("a line", "it ended early: a line"),
    ):
        outcome = running.outcome_of(target, said, tmp_path)
        assert outcome.finding == finding
        assert Path(outcome.input).read_bytes() == b"bad"
    assert running.outcome_of(target, "no library", tmp_path / "home").finding == "it ended early: no library"


def test_a_mutant_changes_one_place_that_is_there() -> None:
    for mutant in mutants.MUTANTS:
        text = (compiled.NATIVE / "source" / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, mutant.taken_away
        assert mutant.target in NATIVE


def test_a_mutant_that_does_not_run_or_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "compiled", lambda *_, **_options: tmp_path)
    early = running.Outcome("pack", "C++", 0, 0, 0, 0, finding="it ended early: no library")
    monkeypatch.setattr(running, "run", lambda *_: early)
    with pytest.raises(running.CannotFuzz, match="no library"):
        mutants.tried(["pack"], tmp_path)
    with pytest.raises(running.CannotFuzz, match="no mutant of layer"):
        mutants.tried(["pack", "layer"], tmp_path)


@thorough
@pytest.mark.parametrize("name", [*NATIVE, *TARGETS])
def test_a_minute_of_fuzzing_finds_nothing(name: str, tmp_path: Path) -> None:
    [target] = running.targets([name])
    assert running.run(target, 60, tmp_path).finding == ""


@thorough
def test_a_missing_check_is_found(tmp_path: Path) -> None:
    assert [row["finding"] for row in mutants.tried(["planes_join"], tmp_path) if not row["finding"]] == []
