"""A GGUF file is converted once, and neither a kill nor a fault leaves a model that is not whole."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import stat
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from diskprefix.errors import ModelError
from diskprefix.model.load import gguf as module
from diskprefix.model.load.fit import needs_of_gguf
from diskprefix.model.load.gguf import (
    MANIFEST,
    build_once,
    converted_folder,
    is_finished,
)
from diskprefix.model.load.gguf_file import MATRICES
from diskprefix.model.quants.file_matrix import load_matrices
from diskprefix.model.quants.gguf_conversion import GgufConversion
from tests.model import tiny

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def gguf(cache: Path, tmp_path: Path) -> Path:
    assert not cache.exists()
    return tiny.write_gguf(tmp_path / "tiny.gguf")


@pytest.fixture
def converted(gguf: Path) -> Path:
    return converted_folder(gguf, print)


def one_file(work: Path) -> Path:
    """A stand-in for a conversion, where only what happens around it matters."""
    made = work / "model"
    made.mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def never(work: Path) -> Path:
    raise AssertionError(f"built again in {work}")


def test_a_gguf_becomes_a_model_with_its_weights_tokenizer_and_template(converted: Path) -> None:
    source = tiny._tensors(0)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype="auto")
    state = model.state_dict()
    for ours, theirs in (("model.embed_tokens", "token_embd"), ("lm_head", "output"), ("model.norm", "output_norm")):
        expected = torch.from_numpy(source[f"{theirs}.weight"]).to(torch.bfloat16)
        assert torch.equal(state[f"{ours}.weight"], expected)
    assert {tensor.dtype for tensor in state.values()} == {torch.bfloat16}
    tokenizer = AutoTokenizer.from_pretrained(converted)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == 1
    assert ids.count(2) == 1
    assert tokenizer.decode(ids) == text


def test_all_stop_tokens_of_the_file_end_a_reply(converted: Path) -> None:
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


def test_a_gguf_is_converted_once_and_found_by_its_content(
    gguf: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere" / "tiny.gguf"
    elsewhere.parent.mkdir()
    shutil.copyfile(gguf, elsewhere)
    monkeypatch.setattr(module, "convert", never)
    assert converted_folder(gguf, print) == converted_folder(elsewhere, print) == converted
    assert converted.name.startswith("tiny-")
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny.write_gguf(gguf, seed=1)
    assert converted_folder(gguf, print) != converted, "the same name, another content"


def test_files_beside_the_gguf_do_not_matter(gguf: Path) -> None:
    (gguf.parent / "config.json").write_text('{"model_type": "bert"}')
    (gguf.parent / "tokenizer.json").write_text("{}")
    assert json.loads((converted_folder(gguf, print) / "config.json").read_text())["model_type"] == "llama"


def test_the_files_have_the_mode_that_the_umask_gives(converted: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in converted.iterdir()} == {0o666 & ~umask}


def test_a_conversion_prints_nothing_but_its_own_lines(gguf: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    folder = converted_folder(gguf, lines.append)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    quarters = [f"converting tiny.gguf: {n} %" for n in (25, 50, 75)]
    assert lines == ["converting tiny.gguf", *quarters, f"kept in {folder}"]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other_format(path: Path) -> None:
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"format": module.CONVERSION_FORMAT + 1}))


DAMAGE = [
    ("model.safetensors", cut),
    ("model.safetensors", flip_a_bit),
    ("model.safetensors", Path.unlink),
    ("tokenizer.json", cut),
    ("config.json", Path.unlink),
    (MANIFEST, Path.unlink),
    (MANIFEST, cut),
    (MANIFEST, other_format),
    (MANIFEST, lambda path: path.write_text("[]")),
    (MANIFEST, lambda path: path.write_text('{"format": 1, "files": {}}')),
    (MANIFEST, lambda path: path.write_text('{"format": 1, "files": {"config.json": 3}}')),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGE)
def test_a_damaged_model_is_made_again(name: str, damage: Any, gguf: Path, converted: Path) -> None:
    whole = {path.name: path.read_bytes() for path in converted.iterdir()}
    damage(converted / name)
    lines: list[str] = []
    assert not is_finished(converted)
    assert converted_folder(gguf, lines.append) == converted
    assert {path.name: path.read_bytes() for path in converted.iterdir()} == whole
    assert any("making it again" in line for line in lines)
    assert sorted(path.name for path in converted.parent.iterdir()) == [f".lock-{converted.name}", converted.name]


@pytest.mark.parametrize("finished", [False, True])
def test_leftovers_of_dead_processes_are_removed(finished: bool, cache: Path) -> None:
    if finished:
        build_once("one", one_file, print)
    leftover = cache / ".partial-one" / "model"
    leftover.mkdir(parents=True)
    (leftover / "model.safetensors").write_bytes(b"half")
    build_once("one", never if finished else one_file, print)
    assert sorted(path.name for path in cache.iterdir()) == [".lock-one", "one"]


def test_leftovers_are_left_alone_while_somebody_works(cache: Path) -> None:
    build_once("one", one_file, print)
    at_work = cache / ".partial-two"
    at_work.mkdir()
    with (cache / ".lock-two").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        build_once("one", never, print)
    assert at_work.is_dir()


def test_a_second_process_waits_says_so_and_takes_what_the_first_made(cache: Path) -> None:
    cache.mkdir(parents=True)
    waiting = threading.Event()
    got: list[Path] = []

    def second() -> None:
        got.append(build_once("one", never, lambda line: waiting.set() if "waiting" in line else None))

    with (cache / ".lock-one").open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(30)
        # What the first process does under its lock.
        work = cache / "work"
        work.mkdir()
        module._publish(one_file(work), cache / "one")
        work.rmdir()
    thread.join(30)
    assert got == [cache / "one"]


def test_a_model_does_not_wait_for_another_one_that_is_being_made(cache: Path) -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(work: Path) -> Path:
        has_begun.set()
        assert may_end.wait(30)
        return one_file(work)

    thread = threading.Thread(target=build_once, args=("two", slow, print))
    thread.start()
    assert has_begun.wait(30)
    made: list[Path] = []
    other = threading.Thread(target=lambda: made.append(build_once("one", one_file, print)), daemon=True)
    other.start()
    other.join(30)
    assert made == [cache / "one"]
    may_end.set()
    thread.join(30)
    assert is_finished(cache / "two"), "the first one's work was left alone"


@pytest.mark.usefixtures("cache")
def test_any_part_of_a_split_gguf_names_the_model_of_all_parts(tmp_path: Path) -> None:
    parts = tiny.write_parts(tmp_path)
    whole = converted_folder(tiny.write_gguf(parts[0].with_name("tiny.gguf"), quantised="Q4_0"), print, "auto")
    folders = {converted_folder(part, print, "auto") for part in parts}
    assert len(folders) == 1
    (folder,) = folders
    assert folder != whole
    assert folder.name.startswith("tiny-")
    own, expected = ({path.name: path.read_bytes() for path in made.iterdir()} for made in (folder, whole))
    # These say where the parts have the tensors.
    different = {MANIFEST, MATRICES}
    assert {name: own[name] for name in own.keys() - different} == {
        name: expected[name] for name in expected.keys() - different
    }
    of_whole = load_matrices(whole, [parts[0].with_name("tiny.gguf")])
    of_parts = load_matrices(folder, parts)
    assert of_parts.keys() == of_whole.keys()
    assert all(torch.equal(of_parts[name].dequantised(), of_whole[name].dequantised()) for name in of_whole)


def test_a_file_that_is_replaced_meanwhile_is_refused(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf")

    def replace_and_run(self: GgufConversion) -> None:
        shutil.copyfile(file, tmp_path / "other.gguf")
        (tmp_path / "other.gguf").replace(file)
        run(self)

    run = GgufConversion.run
    monkeypatch.setattr(GgufConversion, "run", replace_and_run)
    with pytest.raises(ModelError, match="was changed while it was converted"):
        converted_folder(file, print)
    assert not list((cache / "models").glob("tiny-*"))


def whole_model(file: Path) -> dict[str, torch.Tensor]:
    """The tensors as transformers loads them at once."""
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    state: dict[str, torch.Tensor] = model.state_dict()
    return state


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    "options", [{"quantised": "Q4_0"}, {"quantised": "Q8_0", "experts": 4}, {"without": "output.weight"}], ids=str
)
def test_tensors_that_are_converted_one_by_one_are_those_of_the_whole_model(
    options: dict[str, Any], tmp_path: Path
) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf", **options)
    expected = whole_model(file)
    folder = converted_folder(file, print)
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        names = set(tensors.keys())
        assert expected.keys() - names == ({"lm_head.weight"} if "without" in options else set())
        assert all(torch.equal(tensors.get_tensor(name), expected[name]) for name in names)


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("weights", "count"), [("native", 21), ("auto", 7)])
def test_only_a_tensor_and_the_one_before_are_in_memory(
    weights: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_0")
    alive: set[int] = set()
    numbers = itertools.count()
    most = 0
    put = GgufConversion._put

    def counted(self: GgufConversion, users: list[str], tensor: torch.Tensor) -> None:
        nonlocal most
        number = next(numbers)
        alive.add(number)
        weakref.finalize(tensor, alive.discard, number)
        most = max(most, len(alive))
        put(self, users, tensor)

    monkeypatch.setattr(GgufConversion, "_put", counted)
    converted_folder(file, print, weights)
    assert next(numbers) == count
    assert most <= 2


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("weights", ["native", "auto", "int8", "int4"])
def test_the_size_that_is_asked_for_is_the_size_that_is_made(weights: str, tmp_path: Path) -> None:
    file = tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_1")
    needs = needs_of_gguf(file, weights)
    folder = converted_folder(file, print, weights)
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        sizes = [tensors.get_tensor(name).nbytes for name in tensors.keys()]  # noqa: SIM118 (it is no dict)
    matrices = {matrix.key: matrix for matrix in load_matrices(folder).values()}
    packed = sum(prod(matrix.packed_shape) for matrix in matrices.values())
    assert needs.weights_bytes == pytest.approx(sum(sizes) + packed, rel=0.01)


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def failing(_: Path) -> Path:
    raise ModelError("no good")


def test_a_build_that_fails_or_fills_the_disk_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="no good"):
        build_once("one", failing, print)
    monkeypatch.setattr(module, "sync", full)
    with pytest.raises(ModelError, match=r"the disk of .* is full"):
        build_once("one", one_file, print)
    assert [path.name for path in cache.iterdir()] == [".lock-one"]


def no_memory(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(module, "available_ram_bytes", lambda: 2048)


def small_disk(patch: pytest.MonkeyPatch, _: Path) -> None:
    patch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 3 * 1024**2))


def disk_that_fills_up(patch: pytest.MonkeyPatch, _: Path) -> None:
    """What the library that writes says then is not an error of the system."""

    def fail(_: Path, __: int) -> None:
        patch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 0))
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    patch.setattr(module, "require_disk", fail)


def file_in_the_place_of_the_folder(patch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "blocked").write_text("a file where a folder should be")
    patch.setenv("XDG_CACHE_HOME", str(folder / "blocked"))


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (no_memory, r"does not fit: .*, 2\.0 KiB available"),
        (small_disk, r"not enough disk space.*needed, 3\.0 MiB free"),
        (disk_that_fills_up, r"the disk of .* is full"),
        (file_in_the_place_of_the_folder, r"cannot write the cache folder .*XDG_CACHE_HOME"),
    ],
)
def test_a_machine_on_which_a_model_cannot_be_made_is_said(
    problem: Callable[[pytest.MonkeyPatch, Path], None],
    words: str,
    gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem(monkeypatch, tmp_path)
    with pytest.raises(ModelError, match=words):
        converted_folder(gguf, print)
