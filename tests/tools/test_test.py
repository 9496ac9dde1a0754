"""`tools/test` with stand-ins for the tools that it calls: what is run for which arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NOTING = '#!/usr/bin/env bash\necho "{name} $*" >>calls\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("tools", "tests/prefixstore/cache", ".venv-tools/bin"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("test", "environment.sh"):
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    (tmp_path / "tests/prefixstore/cache/test_a.py").touch()
    (tmp_path / "report.xml").touch()
    for path, name in (("tools/setup", "setup"), ("tools/check", "check"), (".venv-tools/bin/python", "python")):
        (tmp_path / path).write_text(NOTING.format(name=name), encoding="utf-8")
        (tmp_path / path).chmod(0o755)
    return tmp_path


def calls(project: Path, *arguments: str) -> list[str]:
    variables = os.environ | {"TMPDIR": str(project)}
    subprocess.run([str(project / "tools/test"), *arguments], check=True, cwd=project.parent, env=variables)
    return (project / "calls").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    "arguments",
    [
        ("tests/prefixstore/cache",),
        ("--all", "tests/prefixstore/cache/test_a.py::test_b"),
        ("-x", "./tests"),
        ("-k", "a", "tests/prefixstore/cache/"),
    ],
)
def test_with_a_path_only_its_tests_run(project: Path, arguments: tuple[str, ...]) -> None:
    setup, tests = calls(project, *arguments)
    assert setup == "setup "
    assert tests.startswith("python -m pytest -W error -n 2 ")
    assert tests.endswith(" ".join(word for word in arguments if word != "--all"))
    assert ("not slow" in tests) == ("--all" not in arguments)


@pytest.mark.parametrize(
    "arguments", [(), ("--all",), ("-k", "scope"), ("--junitxml", "report.xml"), ("tests/absent",)]
)
def test_without_one_ruff_and_mypy_run_too(project: Path, arguments: tuple[str, ...]) -> None:
    ran = calls(project, *arguments)
    assert "check " in ran
    assert ran[-1].startswith("python -m pytest -W error -n 2 ")


def test_all_that_changes_reach_runs_and_slow_tests_too(project: Path) -> None:
    last = calls(project, "--changed")[-1]
    assert "--since main" in last
    assert "not slow" not in last


def test_what_guards_a_module_is_printed_and_nothing_else_runs(project: Path) -> None:
    assert calls(project, "--guards", "tokens") == ["setup ", "python -m tests.reach tokens"]
