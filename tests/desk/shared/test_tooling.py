"""What all commands share: help, completion, versions, imports, output, waits, units, and the log."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from diskprefix.daemon.cli import commands
from diskprefix.daemon.cli.logs import TextFormatter
from diskprefix.desk.shared import tooling
from diskprefix.desk.shared.tooling import status
from diskprefix.errors import SettingsError
from diskprefix.units import parse_duration, parse_size
from tests.desk.conftest import Run, run_fresh, saved
from tests.desk.terminal import Terminal
from tests.prefixstore.store.building import BLOCK, open_store, prompt, publication
from tests.runtime.plan import tiny
from tests.waiting import wait_for

TOOLS = sorted(set(commands()) - {"serve"})
WITHOUT_STORE = {"chat", "clients", "completion", "dashboard", "doctor", "launch", "list", "ps", "pull", "rm", "run"}
WITHOUT_STORE |= {"service", "show", "stop", "top"}
STORE_TOOLS = set(TOOLS) - WITHOUT_STORE - {"simulate", "warm"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    saved(place / "kv", prompt(1, 2 * BLOCK))
    tiny.write_folder(place / "models/made", dtype=torch.bfloat16)
    line = {"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [0, 1]}
    (place / "day.jsonl").write_text(f"{json.dumps(line)}\n")
    return place


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("commands", "needed"),
    [
        ([f"{command} --help" for command in commands()], set()),
        (["--version"], set()),
        (["inspect", "inspect --tree", "inspect --stats"], {"rich"}),
        (["export ENTRY -o e.safetensors", "import e.safetensors"], {"rich"}),
        (["list --models-dir models", "list --architectures"], {"rich"}),
        # It says what the chat template costs.
        (["show models/made"], {"rich", "jinja2", "tokenizers"}),
        (["simulate day.jsonl --scope full --budget unlimited"], {"rich", "pydantic"}),
    ],
)
def test_a_command_starts_without_what_takes_long_to_import(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch, commands: list[str], needed: set[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("DISKPREFIX_KV_CACHE_DIR", "kv")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
    entry = run("inspect", "--json").json["entries"][0]["id"]
    shown, imported = run_fresh(*(command.replace("ENTRY", entry).split() for command in commands))
    assert len(shown) >= len(commands)
    assert imported <= needed


@pytest.mark.parametrize("command", TOOLS)
def test_the_help_of_a_tool_teaches(run: Run, command: str) -> None:
    shown = run(command, "--help").stdout
    assert shown.count(f"  diskprefix {command}") >= 2, "examples"
    assert "--json" in shown or command in ("chat", "completion", "dashboard", "launch", "run", "top"), (
        "which are for no script"
    )
    assert "Exit codes: 0 " in shown
    folder = ("--kv-cache-dir", "DISKPREFIX_KV_CACHE_DIR", "$XDG_CACHE_HOME/diskprefix/kv")
    assert command not in STORE_TOOLS or all(words in shown for words in folder)


def test_versions_name_what_decides_what_is_computed(run: Run) -> None:
    shown = run("--version").stdout
    assert shown.startswith("diskprefix ")
    assert all(f"{name} " in shown for name in ("Python", "torch", "transformers", "lmdb", "kernels:"))


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
        command = [sys.executable, "-c", "from diskprefix.daemon.cli import main; main()"]
        ended = subprocess.run(command, env=os.environ | words, capture_output=True, text=True, check=False)
        return [answer.partition(",")[2] for answer in ended.stdout.split()]

    assert completed("diskprefix in") == [name for name in commands() if name.startswith("in")]
    assert "--kv-cache-dir" in completed("diskprefix inspect --kv")


WRITERS = [["inspect"], ["inspect", "--json"], ["verify"], ["verify", "--json"], ["purge", "--all", "--dry-run"]]
HELP = [["--help"], ["serve", "--help"]]


@pytest.mark.cases(2)
@pytest.mark.parametrize("args", [*([*args, "--kv-cache-dir", "kv"] for args in WRITERS), *HELP])
def test_output_that_nobody_reads_or_that_cannot_be_written_ends_it_with_its_exit_code(
    place: Path, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    monkeypatch.chdir(place)
    command = [sys.executable, "-m", "diskprefix", *args]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, ""), "that of a shell"
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    message = "error: cannot write the output: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (4, message)


def test_a_long_wait_shows_a_line_and_a_short_one_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with status("short") as say:
        say("still short")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(tooling, "_LONG_S", 0.0)
    with status("waiting") as say:
        wait_for(lambda: capsys.readouterr().err == "waiting\n")
        for line in ("waiting", "more \x1b[2J", "more \x1b[2J"):
            say(line)
    assert capsys.readouterr().err.count("\n") == 1


def test_the_folder_of_the_environment_may_begin_with_a_tilde(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("DISKPREFIX_KV_CACHE_DIR", "~/kv")
    ended = run("verify")
    assert (ended.exit_code, ended.stdout.endswith(f"in {place / 'kv'}\n")) == (0, True)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("command", "verb"), [("verify", "verifying"), ("compact", "compacting"), ("purge --all --yes", "purging")]
)
def test_at_a_terminal_the_bar_goes_to_stderr_and_is_gone_in_the_end(tmp_path: Path, command: str, verb: str) -> None:
    store = open_store(tmp_path)
    store.publish(publication(store, prompt(1, 4 * BLOCK), payload_bytes=400_000))
    store.close()
    terminal = Terminal(*command.split(), "--json", "--kv-cache-dir", str(tmp_path))
    assert terminal.wait() == 0
    assert verb in terminal.shown
    # What stays on the screen is the JSON; the bar was erased before it.
    assert terminal.shown.rindex("{") > terminal.shown.rindex("\x1b[2K")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("50ms", 0.05), ("90s", 90), ("15m", 900), ("12h", 43_200), ("7d", 604_800), ("2w", 1_209_600)),
        *(("45", 45), (" 1.5 h ", 5400)),
    ],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text, param="--older-than") == seconds


@pytest.mark.parametrize(
    "text",
    [
        *("", "d", "-1d", "1 year", "1d2h", "soon", "1y", "inf", "nan", "5M", "5H", "\u0663d", "5\u017f", "1\u2003d"),
        pytest.param("1" + " " * (4 << 20) + "x", id="megabytes"),
    ],
)
def test_what_is_no_duration_is_refused_by_name(text: str) -> None:
    """Upper case too: many read 5M as months."""
    with pytest.raises(SettingsError, match=r"--older-than: .{,102} is not a duration; .* 7d or 2w, in lower case"):
        parse_duration(text, param="--older-than")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4GiB", 4 * 2**30), ("4gib", 4 * 2**30), (" 1.5 K ", 1500), ("9007199254740993", 2**53 + 1), (7, 7), ("0b", 0)],
)
def test_a_size_is_read_to_the_byte_in_either_case(text: str | int, num_bytes: int) -> None:
    assert parse_size(text, param="--budget") == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "4 Gi", "\u0664GiB", "4\u212a", "9" * 400, "nan", "inf"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--budget: .* is not a size; write for example 4GiB"):
        parse_size(text, param="--budget")


def logged(message: str, *values: object, exc_info: Any = None) -> str:
    record = logging.LogRecord("diskprefix", logging.INFO, "file", 1, message, values, exc_info)
    return TextFormatter().format(record)


def test_a_record_of_the_log_is_one_line_and_only_a_traceback_has_more() -> None:
    line = logged("client says %s", 'x\n2026-01-01 ERROR forged \x1b[31m "quoted" \u2028 \ud800')
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    try:
        raise ValueError("\x1b[2J\x9b31m")
    except ValueError:
        lines = logged("failed", exc_info=sys.exc_info()).split("\n")
    assert all(line.isprintable() for line in lines)
    assert "Traceback" in lines[1]
    assert lines[-1] == r"ValueError: \x1b[2J\x9b31m"
