"""The matrices of a .gguf file are packed beside the imports of a start, also before it is known which are wanted."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread, Timer

import pytest
import torch

from diskprefix.errors import ModelError, SettingsError
from diskprefix.model.load import beside, loader
from diskprefix.model.load.fingerprint import DigestAhead
from diskprefix.model.load.fit import ROOM_BYTES
from diskprefix.model.load.gguf import converted_folder
from diskprefix.model.load.gguf_file import read_tensors
from diskprefix.model.load.loader import BegunWeights, begin_weights, load_model
from diskprefix.model.quants.file_matrix import FileMatrix, load_matrices
from diskprefix.model.quants.matrix_packing import MatrixPacking, as_they_stand
from diskprefix.native.library import Operators, operators
from diskprefix.settings import Settings
from tests.model import tiny

pytestmark = [
    pytest.mark.usefixtures("cache"),
    pytest.mark.skipif(operators() is None, reason="no compiled operators"),
]

PROGRAM = """
import sys
from diskprefix.model.load.loader import begin_weights
from diskprefix.settings import Settings
assert all(begin_weights(Settings(model=model)) is not None for model in sys.argv[1:])
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
def test_all_that_is_wanted_at_the_end_is_packed_and_nothing_else(
    num_helpers: int, gguf: Path, compiled: Operators, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "_num_helpers", lambda: num_helpers)
    packing = MatrixPacking(compiled, as_they_stand(read_tensors([gguf])[1], "auto"))
    wanted = load_matrices(converted_folder(gguf, print, "auto"), [gguf]).values()
    assert {matrix.order is None for matrix in wanted} == {True, False}
    packing.want(wanted)
    found = packing.finish()
    assert found.keys() == {matrix.key for matrix in wanted}
    for matrix in wanted:
        assert torch.equal(found[matrix.key], packed_alone(compiled, matrix))


def test_a_load_has_no_more_threads_than_processors_and_leaves_none_when_it_fails(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, digests = list[Thread](), list[Thread]()
    own = Thread.start

    def start(self: Thread) -> None:
        {"weights": started, "digest": digests}.get(self.name, []).append(self)
        own(self)
        assert sum(one.is_alive() for one in started) <= 3

    monkeypatch.setattr(Thread, "start", start)
    monkeypatch.setattr(beside, "_num_helpers", lambda: 3)
    begun = begin_weights(Settings(model=str(gguf)))
    load_model(Settings(model=str(gguf)), print, begun=begun)
    assert started
    other = tiny.write_gguf(tmp_path / "other.gguf", quantised="Q4_1", seed=1)
    waiting, is_stopped = Event(), Event()

    def slow(_: DigestAhead) -> None:
        waiting.set()
        assert is_stopped.wait(60)

    monkeypatch.setattr(DigestAhead, "_require_wanted", slow)
    begun = begin_weights(Settings(model=str(other)))
    assert begun is not None
    assert waiting.wait(60)
    monkeypatch.undo()
    Timer(0.01, is_stopped.set).start()
    with pytest.raises(SettingsError):
        load_model(Settings(model=str(other), weights="int4", dtype="float32"), print, begun=begun)
    assert not [one for one in (*started, *digests) if one.is_alive()]


def parameters(model: Path, begun: BegunWeights | None) -> list[torch.Tensor]:
    loaded = load_model(Settings(model=str(model)), print, begun=begun)
    return [tensor.clone() for tensor in (*loaded.model.parameters(), *loaded.model.buffers())]


@pytest.mark.parametrize("is_converted", [False, True])
def test_a_model_whose_packing_was_begun_is_the_same(is_converted: bool, gguf: Path) -> None:
    expected = parameters(gguf.rename(gguf.with_name("other.gguf")), None) if is_converted else None
    gguf = gguf.with_name("other.gguf") if is_converted else gguf
    begun = begin_weights(Settings(model=str(gguf)))
    assert begun is not None
    assert begun.packing is not None
    found = parameters(gguf, begun)
    expected = expected or parameters(gguf, None)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert not begun.packing._unwanted


def test_weights_are_begun_without_transformers(gguf: Path, tmp_path: Path) -> None:
    models = [str(gguf), str(tiny.write_folder(tmp_path / "m"))]
    subprocess.run([sys.executable, "-c", PROGRAM, *models], check=True, env=dict(os.environ))


def test_packing_that_was_begun_for_another_file_is_not_used(gguf: Path) -> None:
    other = begin_weights(Settings(model=str(tiny.write_gguf(gguf.with_name("other.gguf"), quantised="Q8_0"))))
    assert all(map(torch.equal, parameters(gguf, other), parameters(gguf, None)))


@pytest.mark.parametrize(
    "settings",
    [Settings(model=None), Settings(model="folder"), Settings(weights="native"), Settings(dtype="float32")],
)
def test_nothing_begins_for_other_models(settings: Settings, gguf: Path) -> None:
    named = settings if settings.model == "folder" or settings.weights == settings.dtype == "auto" else None
    assert begin_weights(named or replace(settings, model=str(gguf))) is None


def test_nothing_begins_where_memory_is_short(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "available_ram_bytes", lambda: ROOM_BYTES)
    begun = begin_weights(Settings(model=str(gguf)))
    assert begun is not None
    assert begun.packing is None
    converted_folder(gguf, print, "auto")
    begun = begin_weights(Settings(model=str(gguf)))
    assert begun is not None
    assert begun.packing is None


def test_a_file_that_ends_early_is_reported_at_the_end(gguf: Path, compiled: Operators) -> None:
    matrices = as_they_stand(read_tensors([gguf])[1], "auto")
    with gguf.open("r+b") as content:
        content.truncate(matrices[-1].tensors[0].offset + 20)
    with pytest.raises(ModelError, match="is cut short: it does not hold all of"):
        MatrixPacking(compiled, matrices).finish()


def test_a_file_that_changes_after_packing_began_is_refused(gguf: Path) -> None:
    begun = begin_weights(Settings(model=str(gguf)))
    assert begun is not None
    os.utime(gguf, (1, 1))
    with pytest.raises(ModelError, match="was changed while it was read; start again"):
        load_model(Settings(model=str(gguf)), print, begun=begun)
