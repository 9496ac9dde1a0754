"""Other engines' own tests, from their sources, against our connector, adapter and backend."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import click
import httpx
from rich.console import Console

from diskprefix.errors import DiskPrefixError
from diskprefix.folders import cache_home
from diskprefix.progress import Report
from tests.bridges.real_engines.real_chunks import real_chunks
from tools.measuring.environments import python_of
from tools.measuring.options import FOLDER
from tools.measuring.workspace import measuring, model_folder

VERSION, LMCACHE_VERSION = "0.32.0", "0.5.6"
_PLUGINS = Path(__file__).parent
"""Where the plugins are. They are not imported from `tests`, which is the engine's own package in its tests."""
_ROOT = _PLUGINS.parents[2]
_UNIT = "tests/v1/kv_connector/unit"
FILES = (
    "test_kv_connector_lifecycle.py",
    "test_kv_load_failure_recovery.py",
    "test_invalid_blocks_correctness.py",
    "test_cache_pollution_prevention.py",
    "test_error_propagation.py",
    "test_example_connector.py",
)
LMCACHE_FILES = tuple(
    f"tests/v1/distributed/test_{name}.py"
    for name in (
        *("mock_l2_adapter", "fs_l2_adapter_delete", "fault_inject_l2_adapter", "l2_adapter_base"),
        *("store_controller", "prefetch_controller", "cache_salt_l2_eviction"),
        *("distributed_storage_manager", "storage_manager_l2_keys"),
    )
)


@click.command()
@FOLDER
def theirs(folder: Path | None) -> None:
    """Run vLLM's tests of life cycle, failed loads and invalid blocks against our connector, and our own tests in its
    environment. Ends as pytest does."""
    progress = Console(stderr=True)
    python, sources = python_of("vllm", progress.print), _sources("vllm", VERSION, progress.print)
    with measuring(folder, progress) as workspace:
        command = [str(python), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-p", "ours"]
        command += [f"--confcutdir={sources / _UNIT}", f"--rootdir={sources}", f"--basetemp={workspace / 'tests'}"]
        environment = os.environ | {"PYTHONPATH": _path_with(sources), "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment |= {"DISKPREFIX_TESTS_MODEL": str(model_folder("smollm2", progress))}
        ended = subprocess.run(
            [*command, *(str(sources / _UNIT / name) for name in FILES)], check=False, cwd=sources, env=environment
        )
    sys.exit(ended.returncode or _run_ours(python, "vllm", environment))


@click.command()
@FOLDER
def lmcache(folder: Path | None) -> None:
    """Run LMCache's tests of its adapters and controllers against our adapter, and our own tests in its environment.
    Ends as pytest does."""
    progress = Console(stderr=True)
    python, sources = python_of("lmcache", progress.print), _sources("lmcache", LMCACHE_VERSION, progress.print)
    environment = os.environ | {"PYTHONPATH": _path_with(sources), "LMCACHE_TRACK_USAGE": "false"}
    with measuring(folder, progress) as workspace:
        command = [str(python), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-p", "ours_lmcache"]
        command += [f"--rootdir={sources}", f"--basetemp={workspace / 'tests'}", *LMCACHE_FILES]
        ended = subprocess.run(command, check=False, cwd=sources, env=environment)
    sys.exit(ended.returncode or _run_ours(python, "lmcache", environment))


@click.command()
def sglang() -> None:
    """Run our tests with SGLang's own classes. Ends as pytest does."""
    progress = Console(stderr=True)
    sys.exit(_run_ours(python_of("sglang", progress.print), "sglang", dict(os.environ)))


@click.command()
@click.argument("engine", type=click.Choice(["lmcache", "sglang"]))
@click.option("--texts", type=click.Path(path_type=Path, exists=True), required=True, help="A folder of texts.")
@click.option("--chunks", default=1000, show_default=True, help="The number of chunks of 256 tokens.")
@FOLDER
def beside(engine: str, texts: Path, chunks: int, folder: Path | None) -> None:
    """Store and load real KV of SmolLM2 by our store and by the engine's own files, side by side, and kill processes
    that store. Prints one line of JSON. Needs root, because it drops the page cache."""
    progress = Console(stderr=True)
    python = python_of(engine, progress.print)
    with measuring(folder, progress) as workspace:
        file = workspace / "chunks"
        real_chunks(model_folder("smollm2", progress), texts, file, chunks)
        environment = os.environ | {"PYTHONPATH": str(_ROOT), "LMCACHE_TRACK_USAGE": "false"}
        command = [str(python), "-P", str(_PLUGINS / "side_by_side.py"), engine, str(file), str(workspace)]
        sys.exit(subprocess.run(command, check=False, cwd=_ROOT, env=environment).returncode)


def _path_with(sources: Path) -> str:
    return os.pathsep.join(map(str, (_ROOT, sources, _PLUGINS)))


def _run_ours(python: Path, extra: str, environment: dict[str, str]) -> int:
    """Runs our tests of an extra in its engine's environment. Returns the exit code of pytest."""
    own = [str(python), "-P", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--noconftest"]
    # Warnings of the engine's own packages are no errors here.
    own += ["-W", "ignore::DeprecationWarning", f"tests/bridges/{extra}"]
    return subprocess.run(own, check=False, cwd=_ROOT, env=environment | {"PYTHONPATH": str(_ROOT)}).returncode


def _sources(name: str, version: str, report: Report) -> Path:
    """The folder of an engine's tests, fetched once from the package index."""
    folder = cache_home() / "environments" / f"{name}-{version}-tests"
    if (folder / "finished").exists():
        return folder
    report(f"fetching the sources of {name} {version}; this is done once")
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page = httpx.get(f"{index}/{name}/", follow_redirects=True, timeout=60)
    match = re.search(rf'href="([^"#]*/{name}-{re.escape(version)}\.tar\.gz)#sha256=([0-9a-f]+)"', page.text)
    if match is None:
        raise DiskPrefixError(f"{index} has no sources of {name} {version}")
    archive = httpx.get(page.url.join(match[1]), follow_redirects=True, timeout=600).content
    if hashlib.sha256(archive).hexdigest() != match[2]:
        raise DiskPrefixError(f"the sources of {name} {version} do not have the digest that the index names")
    folder.mkdir(parents=True, exist_ok=True)
    packed = folder / "sources.tar.gz"
    packed.write_bytes(archive)
    with tarfile.open(packed) as tar:
        prefix = f"{name}-{version}/"
        for member in tar.getmembers():
            if member.name.startswith(f"{prefix}tests/"):
                member.name = member.name.removeprefix(prefix)
                tar.extract(member, folder, filter="data")
    packed.unlink()
    (folder / "finished").touch()
    return folder
