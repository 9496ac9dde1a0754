"""A `.gguf` file in llama.cpp's library: what is refused, how many layers a device gets, and the identity."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError, SettingsError
from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.files.gguf.gguf_header import FileTensor, GgufHeader
from diskprefix.runtime.files.gguf.metadata import Metadata
from diskprefix.runtime.llama import load_llama as loading
from diskprefix.runtime.llama.llama_library import Library
from diskprefix.runtime.llama.llama_rehearsal import Rehearsed, rehearse
from diskprefix.runtime.llama.load_llama import LoadedLlama, cells_of, load_llama
from tests.runtime.llama.scripted_library import ScriptedLlama
from tests.runtime.plan.tiny import write_gguf

MIB = 1 << 20
BLOCKS = loading._Shape(num_blocks=4, block_bytes=100 * MIB, all_bytes=1000 * MIB, row_bytes=1024, positions=1 << 20)
"""600 MiB are outside of the blocks. 16,384 tokens take 16 MiB in each block."""


class Loading:
    """Loads a file into a scripted library, without a child process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.api, self.file, self.keys = ScriptedLlama(), write_gguf(folder / "tiny.gguf"), list[str]()
        self.api.__file__ = str(folder / "llama_cpp.py")
        (folder / "lib").mkdir()
        library = Library(self.api)
        monkeypatch.setattr(loading, "open_library", lambda: library)

        def rehearsed(path: Path, options: Any, key: str, _report: Any) -> Rehearsed:
            self.keys.append(key)
            return rehearse(library, path, options)

        monkeypatch.setattr(loading, "rehearsed", rehearsed)

    def __call__(self, **changes: Any) -> LoadedLlama:
        asked: dict[str, Any] = {
            "model": str(self.file),
            "runtime": "llama",
            "block_size": 64,
            "device": "cpu",
        } | changes
        return load_llama(Settings(**asked), lambda _line: None)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loading:
    return Loading(tmp_path, monkeypatch)


def identity(loaded: LoadedLlama) -> str:
    return loaded.fingerprint.identity(64, 1, loaded.runtime.layout.describe())


def test_a_file_is_loaded_with_its_tokenizer_and_a_runtime_that_computes(load: Loading) -> None:
    found = load()
    assert (found.loaded.reason, found.loaded.device, found.loaded.dtype) == ("", "cpu", "float16")
    assert (found.loaded.name, found.loaded.config.model_type) == ("tiny", "llama")
    assert found.loaded.tokenizer.encode("he")
    assert found.loaded.in_memory.done()
    assert set(found.loaded.timings) >= {"imports", "source", "tokenizer", "digest", "weights"}
    sequence = KVSequence(PagePool(found.runtime.layout, block_size=64))
    (logits,) = found.runtime.run([Rows(sequence, np.arange(3))]).logits
    assert np.isfinite(logits).all()
    assert [parameters.n_gpu_layers for parameters in load.api.loaded] == [0, 0]


def test_a_model_that_fails_its_rehearsal_is_served_without_the_cache(load: Loading) -> None:
    load.api.skips_cell = True
    found = load()
    assert found.runtime.layout.unsupported == (found.loaded.reason,)
    (logits,) = found.runtime.run([Rows(found.runtime.new_state(), np.arange(3))]).logits
    assert np.isfinite(logits).all()


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"draft_model": "other"}, "--draft-model"),
        ({"dtype": "float32"}, "--dtype"),
        ({"weights": "native"}, "--weights"),
        ({"kernels": "avx2"}, "--kernels"),
        ({"speculative": "mtp"}, "--speculative"),
        ({"speculative": "ngram"}, "--speculative"),
        ({"gpu_layers": 2}, "--gpu-layers"),
        ({"device": "cuda"}, "--device"),
    ],
)
def test_what_the_library_does_not_do_is_refused_before_anything_is_loaded(
    load: Loading, changes: dict[str, Any], flag: str
) -> None:
    with pytest.raises(SettingsError, match=f"^{flag}: "):
        load(**changes)
    assert load.api.loaded == []


def test_a_folder_is_refused(load: Loading, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(SettingsError, match=r"reads .gguf files, and .* is none; choose --runtime plan or grid"):
        load(model=str(folder))


def test_a_model_that_does_not_fit_is_refused(load: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_ram_bytes", lambda: 1000)
    with pytest.raises(ModelError, match=r"tiny.gguf in llama.cpp"):
        load()


@pytest.mark.parametrize(
    ("asked", "free_mib", "expected"),
    [
        # 768 MiB stay free.
        ({}, 768 + 600 + 4 * 116, 5),
        ({}, 768 + 600 + 4 * 116 - 1, 4),
        ({}, 768 + 3 * 116, 3),
        ({}, 768 + 3 * 116 - 1, 2),
        ({}, 700, 0),
        # Some drivers do not know.
        ({}, 0, 5),
        ({"context": 1024}, 768 + 600 + 4 * 101, 5),
        ({"gpu_layers": 1}, 99_999, 1),
        ({"gpu_layers": 99}, 700, 5),
        ({"gpu_layers": 0}, 99_999, 0),
    ],
)
def test_a_device_gets_all_layers_or_those_that_have_room(asked: dict[str, Any], free_mib: int, expected: int) -> None:
    api = ScriptedLlama()
    api.gpus = {"CUDA0": (1, free_mib * MIB)}
    device = Library(api).devices()[1]
    assert loading._num_layers(Settings(**asked), BLOCKS, device) == expected


@pytest.mark.parametrize("given", [None, 1])
def test_the_layers_of_the_named_device_are_loaded_there_and_need_no_main_memory(
    load: Loading, given: int | None
) -> None:
    load.api.gpus = {"CUDA0": (1, 1 << 40), "CUDA1": (1, 1 << 40)}
    found = load(device="cuda:1", gpu_layers=given)
    assert [parameters.n_gpu_layers for parameters in load.api.loaded] == [given or 3] * 2
    assert found.loaded.device == "CUDA1"
    handles = [ctypes.cast(one.devices, ctypes.POINTER(ctypes.c_void_p))[0] for one in load.api.loaded[-1:]]
    assert handles == [3]
    whole = load().loaded.fit.needs.weights["file"]
    assert found.loaded.fit.needs.weights["file"] == whole * (2 if given else 0) // 3


def test_layers_without_room_on_the_device_are_said_at_the_load_and_by_the_placement(
    load: Loading, caplog: pytest.LogCaptureFixture
) -> None:
    line = "CUDA0 (1.0 MiB are free) computes 0 of 3 layers, and the CPU the others"
    load.api.gpus = {"CUDA0": (1, 1 << 20)}
    settings: dict[str, Any] = {"model": str(load.file), "runtime": "llama"}
    assert load(device="auto").loaded.device == "CUDA0"
    assert [record.message for record in caplog.records if "layers" in record.message] == [
        f"[llama] {line}. {loading.MAKE_ROOM}"
    ]
    placed = loading.placement_of(Settings(**settings))
    assert (placed.line, placed.num_layers, placed.of_layers) == (line, 0, 3)
    load.api.gpus = {"CUDA0": (1, 1 << 40)}
    whole = loading.placement_of(Settings(**settings))
    assert (whole.line, whole.needs.weights) == ("CUDA0 computes all 3 layers", {"file": 0})
    assert loading.placement_of(Settings(**settings, device="cpu")).line == "the CPU computes all layers"


def test_everything_that_changes_the_bits_changes_the_identity(load: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    load.api.gpus = {"CUDA0": (1, 1 << 40), "CUDA1": (1, 1 << 40)}
    found = [load(), load(kv_type="q8"), load(block_size=32), load(device="CUDA0")]
    found += [load(device="CUDA0", gpu_layers=1), load(device="CUDA1")]
    monkeypatch.setenv("GGML_VK_DISABLE_F16", "1")
    found.append(load())
    monkeypatch.delenv("GGML_VK_DISABLE_F16")
    monkeypatch.setattr(loading, "num_threads", lambda: 3)
    found.append(load())
    load.api.seed = 1
    found.append(load())
    identities = [identity(one) for one in found]
    assert len(set(identities)) == len(identities)
    assert len(set(load.keys)) == len(load.keys) - 1, "the seed is no part of the name of a rehearsal"


def test_a_build_of_other_bytes_and_equal_bits_keeps_the_identity_but_is_rehearsed(
    load: Loading, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = load()
    (tmp_path / "lib/libggml-cpu.so").write_bytes(b"other")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path / "lib"))
    other = load()
    assert identity(one) == identity(other)
    assert one.build != other.build
    assert load.keys[0] != load.keys[1]


def test_a_portable_identity_does_not_name_the_machine(load: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    one = load(fingerprint="portable")
    load.api.seed = 1
    monkeypatch.setattr(loading, "num_threads", lambda: 3)
    monkeypatch.setattr(loading, "processor", lambda: "another")
    assert identity(load(fingerprint="portable")) == identity(one)
    assert identity(load(fingerprint="portable", kv_type="q8")) != identity(one)


def test_the_free_memory_of_a_device_is_read_again() -> None:
    api = ScriptedLlama()
    api.gpus = {"CUDA0": (1, 5)}
    library = Library(api)
    device = library.devices()[1]
    api.gpus = {"CUDA0": (1, 3)}
    assert loading._free_bytes(library, device) == 3
    api.gpus = {"CUDA0": (1, 0)}
    assert loading._free_bytes(library, device) == 1 << 62


@pytest.mark.parametrize(
    ("context", "cells"),
    [(None, (4097, 0)), (4096, (0, 4096)), (100, (0, 4096)), (4097, (4097, 0)), (1 << 20, (4097, 0))],
)
def test_all_contexts_of_a_file_with_factors_for_long_texts_take_the_same_factors(
    context: int | None, cells: tuple[int, int]
) -> None:
    values = {"phi3.rope.scaling.original_context_length": 4096, "phi3.context_length": 131_072}
    header = GgufHeader({"general.architecture": "phi3"} | values, {}, {}, ())
    tensors = [
        FileTensor(f"rope_factors_{name}.weight", "F32", (2,), Path(), 0, np.dtype("f4"), (2,))
        for name in ("long", "short")
    ]
    assert cells_of(Metadata(header, tensors), context) == cells
    assert cells_of(Metadata(header, tensors[1:]), context) == (0, 0)


def test_a_model_whose_indexer_the_library_does_not_use_is_loaded_with_a_warning(
    load: Loading, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load()
    assert "attends to all tokens" not in caplog.text
    load(model=str(write_gguf(tmp_path / "sparse.gguf", architecture="minimax-m3")))
    assert [record.levelname for record in caplog.records if "attends to all tokens" in record.message] == ["WARNING"]
