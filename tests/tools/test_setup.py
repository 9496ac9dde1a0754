"""`tools/setup` with a Python that only pretends: what is made, what is left alone, and what it says when it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

PRETENDER = """#!/usr/bin/env bash
# Copies itself into the .venv that it is asked to make, and notes each call of pip in the file calls.
case "$*" in
    --version) echo "Python 3.11.0" ;;
    "-m venv .venv") mkdir -p .venv/bin && cp "$0" .venv/bin/python && echo made >>calls ;;
    *"import diskprefix"*) [[ -e works ]] ;;
    *"-m pip install"*)
        echo installed >>calls
        echo "$*" >arguments
        echo "Collecting what is needed"
        if [[ -e no-network ]]; then echo "NewConnectionError: refused" >&2; exit 1; fi
        if [[ -e broken ]]; then echo "ERROR: no such version" >&2; exit 1; fi
        if [[ -e killed ]]; then kill -9 $PPID; fi
        ;;
    diskprefix/native/build.py) echo compiled >>compiled ;;
    *ensurepip*) [[ ! -e no-venv-module ]] ;;
esac
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "a project"
    (folder / "tools").mkdir(parents=True)
    for name in ("pyproject.toml", "tools/setup", "tools/constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    python = folder / "python"
    python.write_text(PRETENDER, encoding="utf-8")
    python.chmod(0o755)
    return folder


def setup(project: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it from another folder, as a user may."""
    variables = os.environ | {"PYTHON": str(project / "python"), "TMPDIR": str(project.parent)} | environment
    command = [str(project / "tools/setup"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=project.parent, env=variables)


def calls(project: Path) -> list[str]:
    file = project / "calls"
    return file.read_text(encoding="utf-8").split() if file.exists() else []


def test_the_first_run_makes_the_venv_and_the_second_only_compiles(
    project: Path,
) -> None:
    assert setup(project).returncode == 0
    assert calls(project) == ["made", "installed"]
    again = setup(project)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert calls(project) == ["made", "installed"]
    assert (project / "compiled").read_text(encoding="utf-8").split() == ["compiled", "compiled"]


def test_to_run_the_demo_a_users_own_installation_is_left_alone_and_the_tests_complete_it(project: Path) -> None:
    (project / ".venv/bin").mkdir(parents=True)
    shutil.copy(project / "python", project / ".venv/bin/python")
    (project / "works").touch()
    assert setup(project, "--to-run").returncode == 0
    assert (calls(project), (project / ".venv/setup-stamp").exists()) == ([], False)
    assert setup(project).returncode == 0
    assert calls(project) == ["installed"]


def test_a_new_installation_to_run_has_the_client_of_the_demo(project: Path) -> None:
    assert setup(project, "--to-run").returncode == 0
    assert "--editable . httpx" in (project / "arguments").read_text()


def test_what_pip_prints_is_shown_only_when_it_fails(project: Path) -> None:
    (project / "broken").touch()
    assert "Collecting what is needed" in setup(project).stderr
    (project / "broken").unlink()
    assert "Collecting" not in setup(project).stderr


@pytest.mark.parametrize("file", ["pyproject.toml", "tools/constraints.txt"])
def test_a_change_of_what_is_needed_is_installed(project: Path, file: str) -> None:
    setup(project)
    with (project / file).open("a", encoding="utf-8") as changed:
        changed.write("# a change\n")
    assert setup(project).returncode == 0
    assert calls(project) == ["made", "installed", "installed"]


def test_a_project_that_was_moved_is_installed_again(project: Path) -> None:
    setup(project)
    moved = project.rename(project.with_name("moved"))
    assert setup(moved).returncode == 0
    assert calls(moved) == ["made", "installed", "installed"]


def test_a_setup_that_was_killed_is_made_anew(project: Path) -> None:
    (project / "killed").touch()
    assert setup(project).returncode != 0
    (project / "killed").unlink()
    assert setup(project).returncode == 0
    assert calls(project) == ["made", "installed", "made", "installed"]


def test_a_venv_whose_python_is_gone_is_made_anew(project: Path) -> None:
    setup(project)
    (project / ".venv/bin/python").unlink()
    assert setup(project).returncode == 0
    assert calls(project) == ["made", "installed", "made", "installed"]


def test_without_a_network_it_says_so_and_goes_on_from_there_later(project: Path) -> None:
    (project / "no-network").touch()
    refused = setup(project)
    assert refused.returncode == 1
    assert "the package index cannot be reached" in refused.stderr.splitlines()[-1]
    (project / "no-network").unlink()
    assert setup(project).returncode == 0
    assert calls(project) == ["made", "installed", "installed"]


def test_what_pip_refuses_is_not_taken_for_the_network(project: Path) -> None:
    (project / "broken").touch()
    refused = setup(project)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1] == "setup: pip could not install the dependencies; its message is above"


def test_a_python_without_the_venv_module_is_named(project: Path) -> None:
    (project / "no-venv-module").touch()
    refused = setup(project)
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1
    assert "has no venv module" in refused.stderr


def test_no_suitable_python_is_one_clear_line(project: Path) -> None:
    programs = project / "programs"
    programs.mkdir()
    for name in ("bash", "env", "dirname"):
        (programs / name).symlink_to(str(shutil.which(name)))
    refused = setup(project, PATH=str(programs), PYTHON="")
    assert refused.returncode == 1
    assert refused.stderr.startswith("setup: no Python 3.11 or newer was found")
    assert refused.stderr.count("\n") == 1


def test_a_python_that_was_named_but_is_too_old_is_not_replaced_by_another(project: Path) -> None:
    refused = setup(project, PYTHON=str(shutil.which("false")))
    assert refused.returncode == 1
    assert "is not a Python 3.11 or newer" in refused.stderr
    assert refused.stderr.count("\n") == 1
