"""vLLM's own tests of connectors, from its sources, against ours."""

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
from diskprefix.progress import Report
from diskprefix.settings import cache_home
from tools.measuring.environments import python_of
from tools.measuring.options import FOLDER
from tools.measuring.workspace import measuring, model_folder

VERSION = "0.32.0"
_ROOT = Path(__file__).parents[2]
_UNIT = "tests/v1/kv_connector/unit"
FILES = (
    "test_kv_connector_lifecycle.py",
    "test_kv_load_failure_recovery.py",
    "test_invalid_blocks_correctness.py",
    "test_cache_pollution_prevention.py",
    "test_error_propagation.py",
    "test_example_connector.py",
)


@click.command()
@FOLDER
def theirs(folder: Path | None) -> None:
    """Run vLLM's tests of life cycle, failed loads and invalid blocks against our connector, and our own tests in its
    environment. Ends as pytest does."""
    progress = Console(stderr=True)
    python, sources = python_of("vllm", progress.print), _sources(progress.print)
    with measuring(folder, progress) as workspace:
        command = [str(python), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-p", "tools.connector.ours"]
        command += [f"--confcutdir={sources / _UNIT}", f"--rootdir={sources}", f"--basetemp={workspace / 'tests'}"]
        environment = os.environ | {"PYTHONPATH": f"{_ROOT}{os.pathsep}{sources}", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment |= {"DISKPREFIX_TESTS_MODEL": str(model_folder("smollm2", progress))}
        ended = subprocess.run(
            [*command, *(str(sources / _UNIT / name) for name in FILES)], check=False, cwd=sources, env=environment
        )
        own = [str(python), "-P", "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--noconftest"]
        environment["PYTHONPATH"] = str(_ROOT)
        ended_own = subprocess.run([*own, "tests/extras/vllm"], check=False, cwd=_ROOT, env=environment)
    sys.exit(ended.returncode or ended_own.returncode)


def _sources(report: Report) -> Path:
    """The folder of vLLM's tests, fetched once from the package index."""
    folder = cache_home() / "environments" / f"vllm-{VERSION}-tests"
    if (folder / "finished").exists():
        return folder
    report(f"fetching the sources of vLLM {VERSION}; this is done once")
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")
    page = httpx.get(f"{index}/vllm/", follow_redirects=True, timeout=60)
    match = re.search(rf'href="([^"#]*/vllm-{re.escape(VERSION)}\.tar\.gz)#sha256=([0-9a-f]+)"', page.text)
    if match is None:
        raise DiskPrefixError(f"{index} has no sources of vLLM {VERSION}")
    archive = httpx.get(page.url.join(match[1]), follow_redirects=True, timeout=600).content
    if hashlib.sha256(archive).hexdigest() != match[2]:
        raise DiskPrefixError(f"the sources of vLLM {VERSION} do not have the digest that the index names")
    folder.mkdir(parents=True, exist_ok=True)
    packed = folder / "sources.tar.gz"
    packed.write_bytes(archive)
    with tarfile.open(packed) as tar:
        prefix = f"vllm-{VERSION}/"
        for member in tar.getmembers():
            if member.name.startswith(f"{prefix}tests/"):
                member.name = member.name.removeprefix(prefix)
                tar.extract(member, folder, filter="data")
    packed.unlink()
    (folder / "finished").touch()
    return folder
