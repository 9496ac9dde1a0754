"""The corpus of `tools/fuzz`, replayed without a fuzzer."""

from __future__ import annotations

import random
import struct
import subprocess
from pathlib import Path

import pytest

from diskprefix.native import build
from tests.examples import examples, thorough
from tools.fuzzing import compiled, corpus, running
from tools.fuzzing.python_targets import TARGETS

NATIVE = compiled.names()
EDGES = [sign + 2**bits for bits in (31, 32, 63) for sign in (-1, 0)]
NUMBERS = (0, 1, 2, 3, 9, 12, 13, 31, 255, 2**16, *EDGES, 2**62, 2**64 - 1)
"""Those that overflow sums and products or point behind the end."""


def damaged(content: bytes, choose: random.Random) -> bytes:
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


@pytest.mark.slow
def test_the_operators_pass_the_corpus(tmp_path: Path) -> None:
    if not build.is_complete("runnable"):
        build.build("runnable")
    arguments = []
    for name in NATIVE:
        corpus.write_inputs(tmp_path / name, corpus.inputs_of(name).values())
        arguments += [name, str(tmp_path / name)]
    replayer = compiled.replayer(tmp_path, build.LIBRARY)
    done = subprocess.run([replayer, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    assert len(done.stderr.splitlines()) == sum(len(corpus.inputs_of(name)) for name in NATIVE)


@pytest.mark.parametrize("name", TARGETS)
def test_readers_of_foreign_bytes_pass_the_corpus_and_damaged_inputs(name: str, tmp_path: Path) -> None:
    check, choose = TARGETS[name].opened(tmp_path), random.Random(1)
    inputs = [*corpus.inputs_of(name).values(), *TARGETS[name].seeds(tmp_path)]
    for data in inputs:
        check(data)
    for _ in range(examples(20)):
        check(damaged(choose.choice(inputs), choose))


@thorough
@pytest.mark.parametrize("name", [*NATIVE, *TARGETS])
def test_a_minute_of_fuzzing_finds_nothing(name: str, tmp_path: Path) -> None:
    [target] = running.targets([name])
    assert running.run(target, 60, tmp_path).finding == ""
