"""The environment with llama.cpp's library: what is missing is said before anything is compiled."""

from __future__ import annotations

import shutil
import venv
from pathlib import Path

import pytest

from tools.llama_engine import llama_environment
from tools.llama_engine.llama_environment import BACKENDS, installed
from tools.measuring.environments import NotInstalled

VULKAN = BACKENDS["vulkan"]
PACKAGES = "lib/python3.0/site-packages"


@pytest.fixture
def include(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that has all headers of Vulkan, as new as they have to be; no other one has any."""
    for name, declared, _ in VULKAN.headers:
        file = tmp_path / "include" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(declared, encoding="utf-8")
    monkeypatch.setattr(llama_environment, "_HEADERS", (str(tmp_path), str(tmp_path / "none")))
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "include"


def refusal(backend: str) -> str:
    """Returns why a backend is not installed: "compiling" if nothing is missing."""

    def compiled(*_arguments: object, **_variables: str) -> None:
        raise NotInstalled("compiling")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama_environment, "run_compiler", compiled)
        patch.setattr(venv, "create", lambda folder: (folder / PACKAGES).mkdir(parents=True))
        with pytest.raises(NotInstalled) as raised:
            installed(backend, lambda _line: None)
    return raised.value.message


def test_with_all_headers_it_is_compiled(include: Path) -> None:
    assert include.exists()
    assert refusal("vulkan") == "compiling"


@pytest.mark.parametrize("number", range(len(VULKAN.headers)))
@pytest.mark.parametrize("is_old", [False, True])
def test_a_header_that_is_missing_or_too_old_is_named_with_its_package(
    include: Path, number: int, *, is_old: bool
) -> None:
    name, declared, package = VULKAN.headers[number]
    if is_old:
        (include / name).write_text("", encoding="utf-8")
    else:
        (include / name).unlink()
    expected = f"vulkan cannot be compiled without {name}; Debian has it in {package}"
    assert refusal("vulkan") == (expected if declared or not is_old else "compiling")


def test_a_program_that_is_missing_is_named_with_its_package(include: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert include.exists()
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "glslc" else f"/bin/{name}")
    assert refusal("vulkan") == "vulkan cannot be compiled without glslc; Debian has it in glslc"
