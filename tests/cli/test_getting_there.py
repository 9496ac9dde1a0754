"""A new user's first commands: init, completion, versions, and where each setting comes from."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from diskprefix.cli import command_names
from diskprefix.settings import SETTINGS
from tests.cli.conftest import Run, run_fresh
from tests.cli.terminal import Terminal


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test writes into the settings of whoever runs it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith("DISKPREFIX_")]:
        monkeypatch.delenv(name)
    return tmp_path


def test_init_writes_settings_that_serve_reads(run: Run, home: Path) -> None:
    ended = run("init", "--yes", "--model", "org/name", "--preset", "rag", "--budget", "7GiB")
    file = home / "config/diskprefix/settings.toml"
    assert (ended.exit_code, ended.stdout.splitlines()[0]) == (0, f"wrote {file}")
    values = tomllib.loads(file.read_text())
    assert (values["model"], values["kv_cache_budget"]) == ("org/name", "7GiB")
    shown = run("serve", "--policy", file, "--print-config").stdout
    assert tomllib.loads(shown)["kv_cache_budget"] == "7GiB"
    assert f"# the policy {file}" in shown
    preset = tomllib.loads(run("serve", "--policy", "rag", "--print-config").stdout)
    mine = tomllib.loads(shown)
    assert {name for name in mine if mine[name] != preset.get(name)} == {"model", "kv_cache_budget"}


def test_init_asks_three_questions_at_a_terminal(home: Path) -> None:
    terminal = Terminal("init", "--file", str(home / "mine.toml"))
    for question, answer in (("Which model", ""), ("What for", "chat"), ("How much disk", "6GiB")):
        terminal.wait_for(question)
        terminal.type(answer + "\r")
    assert terminal.wait() == 0
    values = tomllib.loads((home / "mine.toml").read_text())
    assert ("model" in values, values["kv_cache_budget"]) == (False, "6GiB")


def test_init_writes_a_unit_that_serves_with_the_settings(run: Run, home: Path) -> None:
    files = run("init", "--yes", "--unit", "--json").json["files"]
    unit = (home / "config/systemd/user/diskprefix.service").read_text()
    assert files == [
        str(home / "config/diskprefix/settings.toml"),
        str(home / "config/systemd/user/diskprefix.service"),
    ]
    command = next(line.removeprefix("ExecStart=") for line in unit.splitlines() if line.startswith("ExecStart="))
    assert command == f"{sys.executable} -P -m diskprefix serve --policy {files[0]}"
    assert "Type=notify" in unit
    packaged = Path("systemd/user/diskprefix.service").read_text()
    others = unit.replace(command, "%h/.local/bin/diskprefix serve").splitlines()[2:]
    assert others == packaged[packaged.index("[Unit]") :].splitlines(), "the rest is that of the package"
    if shutil.which("systemd-analyze"):
        subprocess.run(["systemd-analyze", "verify", files[1]], check=True, capture_output=True)


def test_init_replaces_nothing_unless_told(run: Run, home: Path) -> None:
    file = home / "settings.toml"
    file.write_text("port = 1\n")
    ended = run("init", "--yes", "--file", file)
    assert (ended.exit_code, ended.stderr.count("\n"), file.read_text()) == (2, 1, "port = 1\n")
    assert run("init", "--yes", "--file", file, "--force").exit_code == 0
    assert "port" not in tomllib.loads(file.read_text())


def test_a_unit_can_be_added_to_settings_that_are_there(run: Run, home: Path) -> None:
    file = home / "config/diskprefix/settings.toml"
    assert run("init", "--yes").exit_code == 0
    file.write_text("port = 1\n")
    ended = run("init", "--unit")
    assert (ended.exit_code, ended.stdout.splitlines()[0], file.read_text()) == (0, f"kept  {file}", "port = 1\n")
    assert f"serve --policy {file}" in (home / "config/systemd/user/diskprefix.service").read_text()
    assert run("init", "--unit", "--yes", "--budget", "5GiB", "--force").exit_code == 0
    assert run("init", "--unit", "--yes", "--budget", "6GiB").exit_code == 2, "answers are not left out in silence"
    assert tomllib.loads(file.read_text())["kv_cache_budget"] == "5GiB"


@pytest.mark.parametrize("args", [["--yes", "--budget", "soon"], ["--yes", "--budget", "1KiB"], []])
def test_init_refuses_what_it_cannot_write_in_one_line(run: Run, home: Path, args: list[str]) -> None:
    ended = run("init", *args)
    ended.assert_refused(2)
    assert not (home / "config").exists()


def test_print_config_names_the_source_of_each_value(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = home / "p.toml"
    policy.write_text('port = 1234\nmax_queue = 7\nkv_cache_budget = "3GiB"\n')
    monkeypatch.setenv("DISKPREFIX_MAX_QUEUE", "8")
    ended = run(
        "serve", "--policy", policy, "--port", "4321", "--standby", "--kv-cache-min-free", "0B", "--print-config"
    )
    lines = {line.lstrip("# ").split(" ")[0]: line for line in ended.stdout.splitlines()}
    assert list(lines) == list(SETTINGS)
    assert lines["port"].split() == ["port", "=", "4321", "#", "the", "flag", "--port"]
    assert lines["max_queue"].endswith("# the variable DISKPREFIX_MAX_QUEUE")
    assert lines["kv_cache_budget"].endswith(f"# the policy {policy}")
    assert lines["kv_cache_min_free"].split()[2] == "0"
    assert lines["host"].endswith("# default")
    assert lines["model"].startswith("# model =")
    assert f"# default: {SETTINGS['model'].unset}" in lines["model"]
    assert tomllib.loads(ended.stdout)["standby"] is True
    (home / "again.toml").write_text(ended.stdout)
    again = run("serve", "--policy", home / "again.toml", "--print-config").stdout
    assert tomllib.loads(again) == tomllib.loads(ended.stdout), "what is printed can be read again"


def test_versions_name_what_decides_what_is_computed_and_import_none_of_it() -> None:
    shown, imported = run_fresh(["--version"])
    assert shown[0].startswith("diskprefix ")
    assert all(f"{name} " in "\n".join(shown) for name in ("Python", "torch", "transformers", "lmdb", "kernels:"))
    assert not imported & {"torch", "transformers"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(run: Run, shell: str) -> None:
    script = run("completion", shell).stdout
    assert "_DISKPREFIX_COMPLETE" in script
    if (program := shutil.which(shell)) and shell != "fish":
        subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_what_the_scripts_ask_is_answered() -> None:
    """As bash asks it: the words of the line, and which of them the cursor is at."""

    def completed(line: str) -> list[str]:
        words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1), "_DISKPREFIX_COMPLETE": "bash_complete"}
        command = [sys.executable, "-c", "from diskprefix.cli import main; main()"]
        ended = subprocess.run(command, env=os.environ | words, capture_output=True, text=True, check=False)
        return [answer.partition(",")[2] for answer in ended.stdout.split()]

    assert completed("diskprefix in") == [name for name in command_names() if name.startswith("in")]
    assert "--kv-cache-dir" in completed("diskprefix inspect --kv")
