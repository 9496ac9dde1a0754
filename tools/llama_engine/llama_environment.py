"""Environments with llama.cpp's library, which pip compiles for a backend. `.venv-tools` has the other packages."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from diskprefix.folders import cache_home
from diskprefix.progress import Report
from diskprefix.runtime.llama.llama_library import VERSION
from tools.measuring.environments import NotInstalled, install_once, run_compiler, run_installer

_NO_AMX = "-mno-amx-int8 -mno-amx-bf16 -mno-amx-tile"
_FIRST_GCC = 13
"""The first version of gcc whose code for AMX does not crash."""


@dataclass(frozen=True)
class Backend:
    """A backend of llama.cpp, which an `option` of CMake chooses. Compiling it needs `programs` and `headers`, given
    with Debian's packages. A header is a path in a folder of headers, with a name that a new one declares."""

    option: str = ""
    programs: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str, str], ...] = ()


BACKENDS = {
    "cpu": Backend(),
    "vulkan": Backend(
        "GGML_VULKAN",
        programs=(("glslc", "glslc"),),
        headers=(
            # Those of Debian 12 are too old; the compiler would say so after some minutes.
            ("vulkan/vulkan_core.h", "VkLayerSettingEXT", "libvulkan-dev from Debian 13 on (or set VULKAN_SDK)"),
            ("spirv/unified1/spirv.hpp", "", "spirv-headers"),
        ),
    ),
    "cuda": Backend("GGML_CUDA", programs=(("nvcc", "nvidia-cuda-toolkit"),)),
    "metal": Backend("GGML_METAL"),
    "hip": Backend("GGML_HIP", programs=(("hipcc", "hipcc"),)),
    "sycl": Backend("GGML_SYCL", programs=(("icpx", "intel-oneapi-compiler-dpcpp-cpp, which Intel's archive has"),)),
}
_HEADERS = (os.environ.get("VULKAN_SDK", "/usr"), "/usr", "/usr/local")
"""The folders whose `include` has headers, in the order in which CMake looks there."""
_COMPILER = (("c++", "g++"),)
_VARIABLES = {"vulkan": {"GGML_VK_VISIBLE_DEVICES": "0"}}
"""Variables of the environment in which a backend is checked. With this one, Vulkan also takes a driver that computes
on the CPU, such as lavapipe."""

BACKEND: Callable[[Any], Any] = click.option(
    "--backend",
    type=click.Choice(list(BACKENDS)),
    help="The backend. Without it, the library in .venv-tools is used if it is there, and else `cpu`.",
)


def variables_of(backend: str | None) -> dict[str, str]:
    """Returns the variables of the environment in which a backend is checked."""
    return dict(_VARIABLES.get(backend or "", {}))


def environment_of(backend: str | None, report: Report) -> Path:
    """Returns the Python of the environment for a backend, which is made on first use. Raises `NotInstalled`."""
    if backend is None and find_spec("llama_cpp") is not None:
        return Path(sys.executable)
    return installed(backend or "cpu", report)


def installed(backend: str, report: Report) -> Path:
    """Returns the Python of the environment for a backend, which is made on first use. Raises `NotInstalled`."""
    folder = cache_home() / "environments" / f"llama-{backend}"
    python, base, arguments = folder / "bin/python", sysconfig.get_path("purelib"), cmake_arguments(backend)
    requirement = f"llama-cpp-python=={VERSION}"

    def install() -> None:
        _require_tools(backend)
        report(f"compiling {requirement} for {backend}; this is done once, and takes ten minutes or more")
        venv.create(folder)
        inside = next(folder.glob("lib/python3*/site-packages"))
        # After its own packages, so that this library takes precedence over one that is installed there.
        (inside / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n", encoding="utf-8")
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install")
        # pip would take what is installed in `.venv-tools`, or a library that it compiled before for another backend.
        alone = ("--verbose", "--no-cache-dir", "--no-binary", "llama-cpp-python", "--ignore-installed", "--no-deps")
        for_cmake = f"{os.environ.get('CMAKE_ARGS', '')} {shlex.join(arguments)}".strip()
        run_compiler([*pip, *alone, requirement], folder / "install.log", report, CMAKE_ARGS=for_cmake)
        run_installer(*pip, "--quiet", requirement)

    install_once(folder, [sys.version_info[:2], base, requirement, arguments], install)
    return python


def cmake_arguments(backend: str) -> list[str]:
    """Returns the arguments of CMake for a backend on this machine."""
    option = BACKENDS[backend].option
    arguments = [f"-D{option}=on"] if option else []
    if _has_amx() and 0 < _gcc_version() < _FIRST_GCC:
        arguments += [f"-DCMAKE_{language}_FLAGS={_NO_AMX}" for language in ("C", "CXX")]
    return arguments


def _has_amx() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return False


def _gcc_version() -> int:
    """Returns the major version of the compiler; 0 if it is not gcc."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), "--version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        return 0
    match = re.match(r".*\) (\d+)\.\d+", said)
    return int(match[1]) if match and "Free Software Foundation" in said else 0


def _require_tools(backend: str) -> None:
    """Raises `NotInstalled` with the packages that compiling for a backend lacks."""
    needs = BACKENDS[backend]
    lacking = [(name, package) for name, package in (*_COMPILER, *needs.programs) if shutil.which(name) is None]
    lacking += [(name, package) for name, declared, package in needs.headers if not _declares(name, declared)]
    if backend == "metal" and sys.platform != "darwin":
        raise NotInstalled("Metal is a backend of macOS; choose another --backend")
    if lacking:
        names, packages = (", ".join(part) for part in zip(*lacking, strict=True))
        raise NotInstalled(f"{backend} cannot be compiled without {names}; Debian has it in {packages}")


def _declares(name: str, declared: str) -> bool:
    """Returns whether there is a header, and the one that the compiler takes declares a name."""
    files = [Path(folder, "include", name) for folder in _HEADERS]
    taken = next((file for file in files if file.exists()), None)
    return taken is not None and declared in taken.read_text(encoding="utf-8", errors="replace")
