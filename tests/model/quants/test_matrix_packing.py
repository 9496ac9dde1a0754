"""The matrices of a .gguf file are packed beside the imports of a start, also before it is known which are wanted."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from diskprefix.errors import ModelError, SettingsError
from diskprefix.model.load import loader
from diskprefix.model.load.fit import ROOM_BYTES
from diskprefix.model.load.gguf import converted_folder
from diskprefix.model.load.loader import BegunPacking, begin_packing, load_model
from diskprefix.model.quants import matrix_packing
from diskprefix.model.quants.file_matrix import FileMatrix, load_matrices
from diskprefix.model.quants.matrix_packing import MatrixPacking
from diskprefix.native.library import Operators, operators
from diskprefix.settings import Settings
from tests.model import tiny

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(operators() is None, reason="no compiled operators"),
]

PROGRAM = """
import sys
from diskprefix.model.load.loader import begin_packing
from diskprefix.settings import Settings
assert all(begin_packing(Settings(model=model)) is not None for model in sys.argv[1:])
assert not [name for name in ("transformers", "torch._dynamo") if name in sys.modules]
"""


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_1")


@pytest.fixture
def compiled() -> Operators:
    found = operators()
    assert found is not None
    return found


def packed_alone(compiled: Operators, matrix: FileMatrix) -> torch.Tensor:
    out = torch.zeros(matrix.packed_shape, dtype=torch.uint8)
    for task in matrix.tasks(compiled, out.flatten(0, -3)):
        task()
    return out


@pytest.mark.parametrize("num_helpers", [0, 1, 5])
def test_all_that_is_wanted_is_packed_as_alone(
    num_helpers: int, gguf: Path, compiled: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix_packing, "_num_helpers", lambda: num_helpers)
    wanted = load_matrices(converted_folder(gguf, print, "auto"), [gguf]).values()
    assert {matrix.order is None for matrix in wanted} == {True, False}
    found = MatrixPacking(compiled, wanted).finish()
    assert found.keys() == {matrix.key for matrix in wanted}
    for matrix in wanted:
        assert torch.equal(found[matrix.key], packed_alone(compiled, matrix))


def test_a_load_that_fails_leaves_no_thread(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, own = list[Thread](), Thread.start

    def start(self: Thread) -> None:
        if self.name == "weights":
            started.append(self)
        own(self)

    monkeypatch.setattr(Thread, "start", start)
    monkeypatch.setattr(matrix_packing, "_num_helpers", lambda: 3)
    converted_folder(gguf, print, "auto")
    begun = begin_packing(Settings(model=str(gguf)))
    with pytest.raises(SettingsError):
        load_model(Settings(model=str(gguf), weights="int4", dtype="float32"), print, begun=begun)
    assert len(started) == 3
    assert not [one for one in started if one.is_alive()]


def parameters(model: Path, begun: BegunPacking | None) -> list[torch.Tensor]:
    loaded = load_model(Settings(model=str(model)), print, begun=begun)
    return [tensor.clone() for tensor in (*loaded.model.parameters(), *loaded.model.buffers())]


def test_a_model_whose_packing_was_begun_is_the_same_and_that_of_another_file_is_not_used(gguf: Path) -> None:
    expected = parameters(gguf, None)
    other = tiny.write_gguf(gguf.with_name("other.gguf"), quantised="Q8_0")
    assert begin_packing(Settings(model=str(other))) is None, "it is not converted yet"
    converted_folder(other, print, "auto")
    for named in (gguf, other):
        begun = begin_packing(Settings(model=str(named)))
        assert begun is not None
        found = parameters(gguf, begun)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def test_packing_begins_without_transformers(gguf: Path) -> None:
    converted_folder(gguf, print, "auto")
    subprocess.run([sys.executable, "-c", PROGRAM, str(gguf)], check=True, env=dict(os.environ))


def test_nothing_begins_for_other_models_and_where_memory_is_short(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(model=str(gguf))
    for weights in ("auto", "native"):
        converted_folder(gguf, print, weights)
    changes: list[dict[str, Any]] = [
        *({"model": None}, {"model": "folder"}, {"weights": "native"}, {"dtype": "float32"}, {"device": "mps"})
    ]
    for changed in changes:
        assert begin_packing(replace(settings, **changed)) is None
    monkeypatch.setattr(loader, "available_ram_bytes", lambda: ROOM_BYTES)
    assert begin_packing(settings) is None


def test_a_file_that_ends_early_is_reported_at_the_end(gguf: Path, compiled: Operators) -> None:
    matrices = [*load_matrices(converted_folder(gguf, print, "auto"), [gguf]).values()]
    with gguf.open("r+b") as content:
        content.truncate(matrices[-1].tensors[0].offset + 20)
    with pytest.raises(ModelError, match="is cut short: it does not hold all of"):
        MatrixPacking(compiled, matrices).finish()


def test_a_file_that_changes_after_packing_began_is_refused(gguf: Path) -> None:
    converted_folder(gguf, print, "auto")
    begun = begin_packing(Settings(model=str(gguf)))
    assert begun is not None
    os.utime(gguf, (1, 1))
    with pytest.raises(ModelError, match="was changed while it was read; start again"):
        load_model(Settings(model=str(gguf)), print, begun=begun)
