"""llama.cpp's library is used only if it is the one that is known. Everything else is an error with what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diskprefix.daemon.settings import Settings
from diskprefix.errors import ModelError, SettingsError
from diskprefix.runtime.llama.devices import device_named, is_chosen
from diskprefix.runtime.llama.llama_context import LlamaModel, LlamaOptions
from diskprefix.runtime.llama.llama_library import INSTALL, VERSION, Library, open_library
from tests.runtime.llama.scripted_library import ScriptedLlama

GIB = 1 << 30
GPUS = {
    "CUDA0": (1, 8 * GIB),
    "CUDA1": (1, 9 * GIB),
    "Vulkan0": (2, 0),
    "SYCL0": (1, 1),
    "MTL0": (1, 1),
    "BLAS": (3, 0),
}

Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a package `llama_cpp` with two files. Afterwards it is what it was."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "llama_cpp"}
    monkeypatch.setenv("GGML_NO_BACKTRACE", "1")

    def forget() -> None:
        open_library.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "llama_cpp"]:
            del sys.modules[name]

    def write(package: str, declarations: str) -> None:
        folder = tmp_path / "llama_cpp"
        folder.mkdir()
        (folder / "__init__.py").write_text(package)
        (folder / "llama_cpp.py").write_text(declarations)
        monkeypatch.syspath_prepend(tmp_path)

    forget()
    yield write
    forget()
    sys.modules.update(before)


def test_without_the_library_the_message_says_how_to_install_it(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    del install
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(SettingsError, match="library is not installed; install it: ") as raised:
        open_library()
    assert INSTALL in raised.value.message
    assert f"llama-cpp-python=={VERSION}" in INSTALL


@pytest.mark.parametrize(
    ("package", "declarations", "reason"),
    [
        ("__version__ = '0.3.30'", "", "needs llama-cpp-python 0.3.36, whose structures it knows; this is 0.3.30"),
        ("import no_such_part", "", "No module named 'no_such_part'"),
        ("", "raise OSError('libgomp.so.1: no such file')", "libgomp.so.1: no such file"),
        ("", "raise RuntimeError('Failed to load shared library')", "Failed to load shared library"),
        ("", "raise AttributeError('undefined symbol: llama_process')", "undefined symbol: llama_process"),
    ],
)
def test_another_version_or_a_broken_library_is_refused(
    install: Install, package: str, declarations: str, reason: str
) -> None:
    install(package, declarations)
    with pytest.raises(ModelError) as raised:
        open_library()
    assert reason in raised.value.message
    assert raised.value.message.endswith(INSTALL)


def test_the_library_that_is_known_is_opened_once(install: Install) -> None:
    install(
        f"__version__ = {VERSION!r}",
        "import sys\nfrom tests.runtime.llama.scripted_library import ScriptedLlama\n"
        "sys.modules[__name__] = ScriptedLlama()",
    )
    assert isinstance(open_library().api, ScriptedLlama)
    assert open_library() is open_library()


@pytest.mark.parametrize("name", ["swa_full", "kv_unified", "defrag_thold", "n_samplers", "check_tensors"])
def test_a_library_with_another_layout_of_its_parameters_is_refused(name: str) -> None:
    api = ScriptedLlama()
    values = api.model_defaults if hasattr(api.model_defaults, name) else api.context_defaults
    right = getattr(values, name)
    setattr(values, name, 7)
    with pytest.raises(ModelError, match=rf"{name} is 7 where it should be {right}; unset LLAMA_CPP_LIB_PATH, or"):
        Library(api)


def test_the_reason_of_a_failure_is_what_the_library_said_since_then() -> None:
    api = ScriptedLlama()
    library = Library(api)
    api.say("an older error")
    library.forget_reason()
    assert library.reason == "it gives no reason"
    api.say("load_tensors: layer 3 is on the CPU", level=2)
    api.say("llama_model_load: error loading model: it is cut\n")
    api.say("again\n")
    assert library.reason == "error loading model: it is cut again"


def test_a_file_that_is_not_loaded_is_an_error_with_the_reason(tmp_path: Path) -> None:
    api = ScriptedLlama()
    api.load_error = "unknown model architecture: 'x'"
    with pytest.raises(ModelError, match=r"cannot load .*x.gguf: unknown model architecture: 'x'$"):
        LlamaModel(Library(api), tmp_path / "x.gguf", LlamaOptions())
    api.load_error, api.has_encoder = "", True
    with pytest.raises(ModelError, match="a model with an encoder"):
        LlamaModel(Library(api), tmp_path / "x.gguf", LlamaOptions())


def test_the_build_follows_the_files_of_the_library_and_the_abilities_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = ScriptedLlama()
    api.__file__ = str(tmp_path / "llama_cpp.py")
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libllama.so").write_bytes(b"1")
    library = Library(api)
    builds = [library.build]
    (folder / "libother.so").write_bytes(b"2")
    assert library.build == builds[0]
    (folder / "libggml-cuda.so").write_bytes(b"2")
    builds.append(library.build)
    (folder / "libllama.so").write_bytes(b"12")
    builds.append(library.build)
    monkeypatch.setattr(api, "llama_print_system_info", lambda: b"AVX = 0")
    builds.append(library.build)
    assert len(set(builds)) == len(builds)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(folder))
    api.__file__ = "/nowhere/llama_cpp.py"
    assert library.build == builds[-1]


def with_gpus(*names: str) -> Library:
    api = ScriptedLlama()
    api.gpus = {name: GPUS[name] for name in names}
    return Library(api)


def test_every_device_has_its_kind_and_its_memory() -> None:
    found = with_gpus(*GPUS).devices()
    assert [(device.name, device.kind) for device in found[:2]] == [("CPU", "cpu"), ("CUDA0", "gpu")]
    assert [device.kind for device in found[-4:]] == ["gpu", "gpu", "gpu", "accelerator"]
    assert [device.free_bytes for device in found[:3]] == [0, 8 * GIB, 9 * GIB]
    assert found[1].description == "a CUDA0"
    assert len({device.handle for device in found}) == len(found)


def test_a_library_without_functions_for_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library = with_gpus()
    monkeypatch.setattr(library.api, "load_shared_library", lambda *_: SimpleNamespace())
    with pytest.raises(ModelError, match="has no function ggml_backend_dev_count; install it again"):
        library.devices()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auto", "CUDA0"),
        ("cuda", "CUDA0"),
        ("cuda:1", "CUDA1"),
        ("CUDA1", "CUDA1"),
        ("vulkan0", "Vulkan0"),
        ("Vulkan0", "Vulkan0"),
        ("xpu", "SYCL0"),
        ("mps", "MTL0"),
        ("BLAS", "BLAS"),
    ],
)
def test_a_device_has_the_names_of_every_engine_and_its_own(name: str, expected: str) -> None:
    device = device_named(with_gpus(*GPUS), name)
    assert device is not None
    assert device.name == expected


@pytest.mark.parametrize("name", ["cuda:2", "cuda:x", "cuda:-1", "rocm", "npu"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(SettingsError, match=rf"has no {name}; it has CPU, CUDA0, CUDA1\. It is compiled for a GPU"):
        device_named(with_gpus("CUDA0", "CUDA1"), name)


def test_the_cpu_and_a_library_without_a_gpu_need_no_device() -> None:
    assert device_named(with_gpus("CUDA0"), "cpu") is None
    assert device_named(with_gpus("BLAS"), "auto") is None


@pytest.mark.parametrize(
    ("asked", "gpus", "expected"),
    [
        ({"runtime": "llama", "device": "cpu"}, (), True),
        ({"runtime": "plan"}, ("CUDA0",), False),
        ({}, ("CUDA0",), True),
        ({}, (), False),
        ({}, ("BLAS",), False),
        ({"device": "cpu"}, ("CUDA0",), False),
        ({"device": "mps"}, ("CUDA0",), False),
        ({"device": "Vulkan0"}, ("Vulkan0",), True),
        # The embedded model is a file, and so may be one of the hub.
        ({"model": None}, ("CUDA0",), True),
        ({"model": "org/name:q8"}, ("CUDA0",), True),
        ({"model": "folder"}, ("CUDA0",), False),
    ],
)
def test_auto_takes_the_library_for_a_file_if_it_has_the_device(
    asked: dict[str, Any], gpus: tuple[str, ...], expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.gguf").touch()
    settings = Settings(**({"model": "x.gguf"} | asked))

    def found(model: str | None, _progress: object) -> tuple[Path, str]:
        return tmp_path if model == "folder" else tmp_path / "x.gguf", "x"

    monkeypatch.setattr("diskprefix.runtime.llama.devices.find_model", found)
    monkeypatch.setattr("diskprefix.runtime.llama.llama_library.open_library", lambda: with_gpus(*gpus))
    monkeypatch.setattr("diskprefix.runtime.llama.devices.find_spec", lambda _name: True)
    assert is_chosen(settings, lambda _line: None) is expected
    monkeypatch.setattr("diskprefix.runtime.llama.devices.find_spec", lambda _name: None)
    assert is_chosen(settings, lambda _line: None) is (settings.runtime == "llama")


def test_auto_does_without_a_library_that_cannot_be_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> Library:
        raise ModelError("it needs another version")

    monkeypatch.setattr("diskprefix.runtime.llama.llama_library.open_library", refuse)
    monkeypatch.setattr("diskprefix.runtime.llama.devices.find_spec", lambda _name: True)
    assert not is_chosen(Settings(model="x.gguf"), lambda _line: None)
    assert "not used: it needs another version" in caplog.text
