"""A new user's first commands: completion, versions, and where each setting comes from."""

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


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test writes into the settings of whoever runs it."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in [name for name in os.environ if name.startswith("DISKPREFIX_")]:
        monkeypatch.delenv(name)
    return tmp_path


def test_print_config_names_the_source_of_each_value(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = home / "p.toml"
    policy.write_text('port = 1234\nmax_queue = 7\nkv_cache_budget = "3GiB"\n')
    monkeypatch.setenv("DISKPREFIX_MAX_QUEUE", "8")
    ended = run("serve", "--policy", policy, "--port", "4321", "--standby", "--idle-unload", "0s", "--print-config")
    lines = {line.lstrip("# ").split(" ")[0]: line for line in ended.stdout.splitlines()}
    assert list(lines) == list(SETTINGS)
    assert lines["port"].split() == ["port", "=", "4321", "#", "the", "flag", "--port"]
    assert lines["max_queue"].endswith("# the variable DISKPREFIX_MAX_QUEUE")
    assert lines["kv_cache_budget"].endswith(f"# the policy {policy}")
    assert lines["idle_unload"].split()[2] == "0.0"
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
