"""`tools/setup` with a Python that only pretends: what is made, what is left alone, and what it says when it cannot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waiting import wait_for

ROOT = Path(__file__).parent.parent.parent

PRETENDER = """#!/usr/bin/env bash
# Copies itself into the environment that it is asked to make, and notes each call of pip in the file calls. With a
# number in the file kill-at, the setup is killed in the call of that number, after what the call does.
pid="$(cat setup-pid)"
echo "$*" >>steps
case "$*" in
    --version) echo "Python 3.11.0" ;;
    "-m venv "*)
        if [[ -e slow ]]; then sleep 5; fi
        mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo made >>calls ;;
    *"import diskprefix"*) [[ -e works ]] ;;
    *"-m pip install"*)
        echo installed >>calls
        echo "$*" >arguments
        echo "Collecting what is needed"
        if [[ -e slow ]]; then sleep "$(cat slow)"; fi
        if [[ -e waits ]]; then until [[ -e goes-on ]]; do sleep 0.1; done; fi
        if [[ -e no-network ]]; then echo "NewConnectionError: refused" >&2; exit 1; fi
        if [[ -e broken ]]; then echo "ERROR: no such version" >&2; exit 1; fi
        ;;
    diskprefix/native/build.py)
        echo "compiled $DISKPREFIX_VARIANTS" >>compiled
        echo "compiling the operators, 2 of 6, 3 s" >&2
        if [[ -e no-compiler ]]; then echo "the C++ operators were not compiled" >&2; fi
        ;;
    *ensurepip*) [[ ! -e no-venv-module ]] || exit 1 ;;
    *os.replace*) mv -T "$3" "$4" ;;
esac
status=$?
if [[ -e kill-at ]] && (($(wc -l <steps) >= $(cat kill-at))); then kill -9 "$pid"; fi
exit $status
"""
LINK = ".venv-tools"
NUM_STEPS = 10
"""The calls of Python in a setup that makes another environment."""


def _is_script(path: Path) -> bool:
    """Returns whether a file is a tool in the shell. `conform` needs nothing of this project."""
    return path.is_file() and path.read_bytes().startswith(b"#!") and path.name != "conform" and not path.suffix


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
    # The process of `sh` becomes the one of the setup.
    named = 'echo $$ >"$0/setup-pid"; exec "$0/tools/setup" "$@"'
    command = ["sh", "-c", named, str(project), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=project.parent, env=variables)


def start_setup(project: Path, **environment: str) -> subprocess.Popen[str]:
    variables = os.environ | {"PYTHON": str(project / "python"), "TMPDIR": str(project.parent)} | environment
    return subprocess.Popen([project / "tools/setup"], stderr=subprocess.PIPE, text=True, env=variables)


def calls(project: Path) -> list[str]:
    file = project / "calls"
    return file.read_text(encoding="utf-8").split() if file.exists() else []


def test_the_first_run_makes_the_venv_and_the_second_only_compiles(
    project: Path,
) -> None:
    assert setup(project).returncode == 0
    assert calls(project) == ["made", "installed"]
    again = setup(project)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "compiling the operators, 2 of 6, 3 s\n")
    assert calls(project) == ["made", "installed"]
    assert (project / "compiled").read_text(encoding="utf-8").splitlines() == ["compiled runnable"] * 2


def test_the_environment_of_a_user_is_left_alone(project: Path) -> None:
    (project / ".venv/bin").mkdir(parents=True)
    shutil.copy(project / "python", project / ".venv/bin/python")
    before = sorted((project / ".venv").rglob("*"))
    for arguments in ((), ("--to-run",)):
        active = {"VIRTUAL_ENV": str(project / ".venv"), "PATH": f"{project / '.venv/bin'}:{os.environ['PATH']}"}
        assert setup(project, *arguments, **active).returncode == 0
    assert sorted((project / ".venv").rglob("*")) == before


def test_to_run_the_demo_an_environment_in_which_it_runs_is_enough_and_the_tests_make_a_whole_one(
    project: Path,
) -> None:
    (project / "works").touch()
    assert setup(project, "--to-run").returncode == 0
    with (project / "pyproject.toml").open("a", encoding="utf-8") as changed:
        changed.write("# a change\n")
    assert setup(project, "--to-run").returncode == 0
    assert calls(project) == ["made", "installed"]
    assert setup(project).returncode == 0
    assert calls(project) == ["made", "installed"] * 2


def test_a_new_installation_to_run_has_the_client_of_the_demo_and_the_operators_that_this_cpu_needs(
    project: Path,
) -> None:
    assert setup(project, "--to-run").returncode == 0
    assert "--editable . httpx" in (project / "arguments").read_text()
    assert (project / "compiled").read_text(encoding="utf-8") == "compiled needed\n"


def test_a_setup_that_fails_has_not_touched_an_environment_that_was_made_by_a_process_of_its_number(
    project: Path,
) -> None:
    """In containers, each run has the same number."""
    (project / "broken").touch()
    made = 'mkdir -p "$0/.venv-tools.$$/bin"; ln -s ".venv-tools.$$" "$0/.venv-tools"; exec "$0/tools/setup"'
    variables = os.environ | {"PYTHON": str(project / "python"), "TMPDIR": str(project.parent)}
    done = subprocess.run(["sh", "-c", made, str(project)], capture_output=True, text=True, check=False, env=variables)
    assert "pip could not install" in done.stderr
    assert [path.name for path in (project / LINK).rglob("*")] == ["bin"]


def test_without_a_lock_two_setups_leave_each_others_environments_alone(project: Path, tmp_path: Path) -> None:
    """As on macOS, which has no flock."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for folder in reversed(os.environ["PATH"].split(":")):
        for command in Path(folder).glob("*"):
            if command.name != "flock":
                (commands / command.name).unlink(missing_ok=True)
                (commands / command.name).symlink_to(command)
    (project / "waits").touch()
    first = start_setup(project, PATH=str(commands))
    wait_for(lambda: "installed" in calls(project))
    (project / "waits").unlink()
    assert setup(project, PATH=str(commands)).returncode == 0
    (project / "goes-on").touch()
    _, said = first.communicate()
    assert (first.returncode, "done" in said) == (0, True), said
    assert (project / LINK / "bin/python").exists()
    assert len(list(project.glob(f"{LINK}.*"))) == 1


@pytest.mark.slow
def test_while_pip_and_the_compiler_work_a_line_every_few_seconds_says_how_far_they_are(project: Path) -> None:
    (project / "slow").write_text("9")
    lines = [line for line in setup(project).stderr.splitlines() if "compiling the operators" in line]
    assert len(lines) >= 2
    assert re.fullmatch(r"setup: \d+ s; compiling the operators, 2 of 6, 3 s; Collecting what is needed", lines[-1])
    assert lines[0] != lines[1]


def test_why_the_operators_were_not_compiled_is_said_once_and_how_far_they_were_is_not(project: Path) -> None:
    (project / "no-compiler").touch()
    said = setup(project).stderr
    assert said.count("the C++ operators were not compiled") == 1
    assert "2 of 6" not in said


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
    assert calls(project) == ["made", "installed"] * 2
    assert len([*project.glob(f"{LINK}.*")]) == 1


def test_a_project_that_was_moved_is_installed_again(project: Path) -> None:
    setup(project)
    moved = project.rename(project.with_name("moved"))
    assert setup(moved).returncode == 0
    assert calls(moved) == ["made", "installed"] * 2


def test_an_environment_whose_python_is_gone_is_made_anew(project: Path) -> None:
    setup(project)
    (project / LINK / "bin/python").unlink()
    assert setup(project).returncode == 0
    assert calls(project) == ["made", "installed"] * 2


def steps_of(project: Path) -> list[str]:
    return (project / "steps").read_text(encoding="utf-8").splitlines()


def changed(project: Path) -> str:
    """Makes an environment, and asks for another one. Returns the folder of the one that is there."""
    assert setup(project).returncode == 0
    (project / "steps").unlink()
    with (project / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("# a change\n")
    return os.readlink(project / LINK)


def test_a_setup_has_the_steps_at_which_it_is_killed(project: Path) -> None:
    changed(project)
    assert setup(project).returncode == 0
    assert len(steps_of(project)) == NUM_STEPS


@pytest.mark.cases(3)
@pytest.mark.parametrize("number", range(1, NUM_STEPS + 1))
def test_a_setup_that_is_killed_at_any_step_leaves_the_old_environment(project: Path, number: int) -> None:
    old = changed(project)
    (project / "kill-at").write_text(str(number), encoding="utf-8")
    assert setup(project).returncode < 0
    is_swapped = any("os.replace" in step for step in steps_of(project))
    assert (os.readlink(project / LINK) == old) != is_swapped
    assert (project / LINK / "bin/python").exists()
    assert (project / LINK / "setup-stamp").exists()
    (project / "kill-at").unlink()
    assert setup(project).returncode == 0
    assert [folder.name for folder in project.glob(f"{LINK}.*")] == [os.readlink(project / LINK)]


@pytest.mark.parametrize("file", ["no-network", "broken"])
def test_a_setup_that_fails_leaves_the_old_environment_and_nothing_else(project: Path, file: str) -> None:
    old = changed(project)
    (project / file).touch()
    assert setup(project).returncode == 1
    assert os.readlink(project / LINK) == old
    assert [folder.name for folder in project.glob(f"{LINK}.*")] == [old]


def test_another_environment_by_this_name_is_not_replaced(project: Path) -> None:
    (project / LINK).mkdir()
    refused = setup(project)
    assert (refused.returncode, refused.stderr) == (1, f"setup: {LINK} is not of this tool: remove it\n")


SCRIPTS = sorted(path for path in (*ROOT.glob("tools/*"), *ROOT.glob("tests/*/*")) if _is_script(path))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_installs_nothing(project: Path, script: Path) -> None:
    tool = project / script.relative_to(ROOT)
    tool.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(script, tool)
    shutil.copy(ROOT / "tools/environment.sh", project / "tools/environment.sh")
    before = set(project.rglob("*"))
    variables = os.environ | {"PYTHON": str(project / "python")}
    command = [str(tool), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, cwd=project.parent, env=variables)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert len(shown.stdout) > 80
    assert set(project.rglob("*")) == before


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("no-network", "the package index cannot be reached"),
        ("broken", "setup: pip could not install the dependencies; its message is above"),
        ("no-venv-module", "has no venv module"),
    ],
)
def test_setup_prints_the_obstacle_last_and_works_without_it(project: Path, file: str, words: str) -> None:
    (project / file).touch()
    refused = setup(project)
    assert refused.returncode == 1
    assert words in refused.stderr.splitlines()[-1]
    has_begun = file != "no-venv-module"
    assert (refused.stderr.count("\n") == 1) != has_begun
    assert not (project / LINK).exists()
    (project / file).unlink()
    assert setup(project).returncode == 0
    assert calls(project) == ["made", "installed"] * (1 + has_begun)


@pytest.mark.parametrize(
    ("own", "words"), [("", "setup: no Python 3.11 or newer was found"), ("false", "is not a Python 3.11 or newer")]
)
def test_no_suitable_python_is_one_clear_line_and_one_that_was_named_is_not_replaced(
    project: Path, own: str, words: str
) -> None:
    programs = project / "programs"
    programs.mkdir()
    for name in ("bash", "env", "dirname", "sh", "sed"):
        (programs / name).symlink_to(str(shutil.which(name)))
    path = os.environ["PATH"] if own else str(programs)
    refused = setup(project, PATH=path, PYTHON=str(shutil.which(own)) if own else "")
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert words in refused.stderr
