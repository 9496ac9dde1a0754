"""`tools/versions`: the tests that touch undocumented parts of packages, with the newest version of each package. An
environment has this package and whatever else its version needs; all other packages come from `.venv-tools`.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Console

from diskprefix.errors import DiskPrefixError
from diskprefix.folders import cache_home
from tools.measuring.environments import NotInstalled, install_once, run_installer
from tools.measuring.options import JSON, run_tool
from tools.measuring.report import new_table, print_report, say

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "tools/constraints.txt"
_GRID = ("tests/runtime/grid", "tests/prefixstore/kv/test_kinds.py", "tests/runtime/library")

PACKAGES: dict[str, tuple[str, ...]] = {
    # Hooks of generate, classes of caches, names of arguments, `_from_config`; modules of processors are replaced.
    "transformers": (*_GRID, "tests/runtime/load/test_loader.py", "tests/runtime/pictures"),
    # `Tensor._version`, switches of kernels; modules that it imports are replaced.
    "torch": (
        *_GRID,
        "tests/runtime/load/test_loader.py",
        "tests/runtime/load/test_fingerprint.py",
        "tests/test_packages.py",
    ),
    # Functions of downloads are replaced.
    "huggingface-hub": ("tests/desk/models/test_pull.py",),
    # The format of the file, and the engine under it.
    "lmdb": (
        "tests/prefixstore/store/test_lmdb_engine.py",
        "tests/prefixstore/store/test_environment.py",
        "tests/prefixstore/store/test_released_formats.py",
    ),
    # Its class of connections is extended.
    "uvicorn": (
        "tests/daemon/server/process",
        "tests/daemon/server/test_http.py",
        "tests/daemon/server/test_limits.py",
    ),
    "h11": ("tests/daemon/server/test_http.py", "tests/daemon/server/test_limits.py", "tests/daemon/router"),
    "starlette": (
        "tests/daemon/server/test_app.py",
        "tests/daemon/server/test_http.py",
        "tests/daemon/server/test_streaming.py",
    ),
    # Its limits, warnings and error texts are read.
    "llguidance": ("tests/daemon/engine/constraints", "tests/daemon/chat/output"),
    # Its JSON and the order of its steps are written.
    "tokenizers": (
        "tests/runtime/files/test_tokenizer.py",
        "tests/daemon/chat/test_encoder.py",
        "tests/runtime/files/gguf/test_gguf.py",
    ),
    # Its tables of types.
    "gguf": (
        "tests/runtime/files/gguf/test_gguf.py",
        "tests/runtime/files/gguf/test_gguf_refusals.py",
        "tests/runtime/plan/quants",
    ),
    "safetensors": ("tests/runtime/files/test_folder_weights.py", "tests/runtime/load/test_loader.py"),
    # Its texts of errors are shown.
    "pydantic": ("tests/daemon/api", "tests/daemon/server/test_bad_requests.py"),
    "msgspec": (
        "tests/prefixstore/store/test_note_record.py",
        "tests/prefixstore/store/test_schema.py",
        "tests/test_foundations.py",
    ),
}
"""Each package with the tests that touch its undocumented parts."""


class VersionsError(DiskPrefixError):
    """The index does not answer as expected; the message is one line."""


def pins() -> dict[str, str]:
    """Returns the versions in `constraints.txt` by the packages' canonical names."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    listed = [Requirement(line) for line in lines if not line.startswith("#")]
    return {
        canonicalize_name(requirement.name): str(requirement.specifier).removeprefix("==") for requirement in listed
    }


def newest_of(answer: str) -> str:
    """Returns the newest version in an answer of `pip index versions`. If one without a build's suffix is installed,
    that is the first. Otherwise only versions with the same suffix count: torch's others come with CUDA.

    Raises `VersionsError`."""
    listed = re.search(r"^Available versions: (.+)$", answer, re.MULTILINE)
    installed = re.search(r"^ +INSTALLED: +(\S+)", answer, re.MULTILINE)
    if listed is None:
        raise VersionsError("pip index versions lists no version")
    build = Version(installed[1]).local if installed else None
    versions = [Version(text) for text in listed[1].split(", ")]
    if build and installed:
        # An index with one build only may not list the installed version.
        versions = [version for version in versions if version.local == build] or [Version(installed[1])]
    return str(max(versions))


def newest(name: str) -> str:
    """Returns the newest stable version of a package that the index has for this machine. Raises `VersionsError`."""
    asked = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", name]
    ended = subprocess.run(asked, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise VersionsError(f"{name}: {(ended.stderr.strip().splitlines() or ['pip failed'])[-1]}")
    return newest_of(ended.stdout)


def environment(name: str, version: str) -> Path:
    """Returns the Python of an environment with one package of another version. Raises `NotInstalled`."""
    folder = cache_home() / "environments" / f"versions-{name}"
    python, base = folder / "bin/python", sysconfig.get_path("purelib")
    others = "".join(f"{other}=={pin}\n" for other, pin in pins().items() if other != canonicalize_name(name))

    def install() -> None:
        venv.create(folder)
        inside = next(folder.glob("lib/python3*/site-packages"))
        # After its own packages, so that packages installed here take precedence.
        (inside / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n", encoding="utf-8")
        (folder / "constraints.txt").write_text(others, encoding="utf-8")
        pip = (
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "--python",
            str(python),
            "install",
            "--quiet",
        )
        run_installer(*pip, "--constraint", str(folder / "constraints.txt"), f"{name}=={version}")

    install_once(folder, [sys.version_info[:2], base, version, others], install)
    asked = f"from importlib.metadata import version; print(version({name!r}))"
    installed = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=False).stdout.strip()
    if installed != version:
        raise NotInstalled(f"{folder} has {name} {installed or 'not at all'} instead of {version}")
    return python


def counts(output: str) -> str:
    """Returns the last line of pytest without the time, such as `1 failed, 12 passed`."""
    lines = [line.strip("= ") for line in output.splitlines() if re.search(r"\b(passed|failed|errors?)\b.* in ", line)]
    return re.sub(r"( in [0-9.]+s.*)$", "", lines[-1]) if lines else "pytest did not end"


def run_tests(python: Path, tests: Sequence[str], log: Path) -> tuple[bool, str]:
    """Returns whether all tests pass with a Python, and their counts. pytest's output is in `log`."""
    command = [str(python), "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", *tests]
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    log.write_text(ended.stdout, encoding="utf-8")
    return not ended.returncode, counts(ended.stdout)


def row(name: str, progress: Console) -> dict[str, Any]:
    """Returns the row of a package in the table."""
    pinned, tests = pins()[canonicalize_name(name)], PACKAGES[name]
    record: dict[str, Any] = {"package": name, "pinned": pinned, "newest": None, "tests": list(tests)}
    try:
        record["newest"] = newest(name)
        say(progress, f"{name} {record['newest']}: an environment")
        python = environment(name, record["newest"])
        log = python.parents[1] / "tests.log"
        say(progress, f"{name} {record['newest']}: {' '.join(tests)}")
        passed, said = run_tests(python, tests, log)
        if not passed:
            say(progress, f"{name} {record['newest']}: see {log}")
    except (VersionsError, NotInstalled) as error:
        passed, said = False, str(error)
    return record | {"result": said, "passed": passed}


def show(report: dict[str, Any], console: Console) -> None:
    table = new_table("", left=("package", "pinned", "newest", "tests", "result"))
    for package in report["packages"]:
        tests = [test.removeprefix("tests/").removesuffix(".py") for test in package["tests"]]
        result = package["result"] if package["passed"] else f"✗ {package['result']}"
        table.add_row(package["package"], package["pinned"], package["newest"] or "?", "\n".join(tests), result)
    # A narrow terminal cuts no error.
    console.width = 240
    console.print(table, soft_wrap=True)


@click.command()
@click.argument("packages", nargs=-1, type=click.Choice(list(PACKAGES)))
@JSON
def main(packages: tuple[str, ...], as_json: bool) -> None:
    """Test the newest version of each package whose undocumented parts are used.

    For each, an environment in the cache folder has its newest stable version, and the others as in
    tools/constraints.txt. The tests that touch the package run in it. PACKAGES chooses some. Takes about ten minutes,
    and needs the package index. Exits with 1 if a version cannot be installed or a test fails.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    progress = Console(stderr=True)
    rows = [row(name, progress) for name in packages or PACKAGES]
    print_report({"packages": rows}, as_json, show)
    sys.exit(not all(package["passed"] for package in rows))


if __name__ == "__main__":
    run_tool(main, "tools/versions")
