from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diskprefix.cli import command_names, tooling
from diskprefix.cli.tooling import status
from diskprefix.errors import SettingsError
from diskprefix.units import parse_duration, parse_size
from tests.cli.conftest import Run, run_fresh
from tests.cli.terminal import Terminal
from tests.store.building import BLOCK, open_store, prompt, publication
from tests.waiting import wait_for

TOOLS = sorted(set(command_names()) - {"serve"})
_WITHOUT_STORE = {"chat", "clients", "completion", "doctor", "launch", "list", "pull", "remote", "rm", "show", "top"}
STORE_TOOLS = sorted(set(TOOLS) - _WITHOUT_STORE - {"simulate", "warm"})


def test_a_command_shows_its_help_without_what_takes_long_to_import() -> None:
    shown, imported = run_fresh(*([command, "--help"] for command in command_names()))
    assert sum(line.startswith("Usage: ") for line in shown) == len(command_names())
    assert imported == set()


@pytest.mark.parametrize("command", TOOLS)
def test_the_help_of_a_tool_teaches(run: Run, command: str) -> None:
    shown = run(command, "--help").stdout
    assert shown.count(f"  diskprefix {command}") >= 2, "examples"
    assert "--json" in shown or command in ("chat", "completion", "launch", "top"), "which are for no script"
    assert "Exit codes: 0 " in shown


@pytest.mark.parametrize("command", STORE_TOOLS)
def test_the_help_of_a_tool_names_the_folder_of_the_store(run: Run, command: str) -> None:
    shown = run(command, "--help").stdout
    assert "--kv-cache-dir" in shown
    assert "DISKPREFIX_KV_CACHE_DIR" in shown
    assert "$XDG_CACHE_HOME/diskprefix/kv" in shown


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with one saved prompt."""
    store = open_store(tmp_path / "kv")
    store.publish(publication(store, prompt(1, 2 * BLOCK)))
    store.close()
    return tmp_path / "kv"


WRITERS = [["inspect"], ["inspect", "--json"], ["verify"], ["verify", "--json"], ["purge", "--all", "--dry-run"]]


@pytest.mark.parametrize("args", WRITERS)
def test_output_that_cannot_be_written_is_one_line_and_exit_code_4(folder: Path, args: list[str]) -> None:
    command = [sys.executable, "-m", "diskprefix", *args, "--kv-cache-dir", str(folder)]
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


HELP = [["--help"], ["serve", "--help"]]


@pytest.mark.parametrize("args", [*([*args, "--kv-cache-dir", "kv"] for args in WRITERS), *HELP])
def test_a_pipe_that_nobody_reads_ends_it_quietly_with_the_code_of_a_shell(
    folder: Path, monkeypatch: pytest.MonkeyPatch, args: list[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "diskprefix", *args]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_the_folder_of_the_environment_may_begin_with_a_tilde(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(tmp_path / "kv").close()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DISKPREFIX_KV_CACHE_DIR", "~/kv")
    ended = run("verify")
    assert (ended.exit_code, ended.stdout.endswith(f"in {tmp_path / 'kv'}\n")) == (0, True)


@pytest.mark.parametrize("args", [["verify"], ["compact"], ["purge", "--all", "--yes"]])
def test_at_a_terminal_the_bar_goes_to_stderr_and_is_gone_in_the_end(tmp_path: Path, args: list[str]) -> None:
    store = open_store(tmp_path)
    store.publish(publication(store, prompt(1, 4 * BLOCK), payload_bytes=400_000))
    store.close()
    terminal = Terminal(*args, "--json", "--kv-cache-dir", str(tmp_path))
    assert terminal.wait() == 0
    verb = {"verify": "verifying", "compact": "compacting", "purge": "purging"}[args[0]]
    assert verb in terminal.shown
    # What stays on the screen is the JSON; the bar was erased before it.
    assert terminal.shown.rindex("{") > terminal.shown.rindex("\x1b[2K")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50ms", 0.05),
        ("90s", 90),
        ("15m", 900),
        ("12h", 43_200),
        ("7d", 604_800),
        ("2w", 1_209_600),
        ("45", 45),
        (" 1.5 h ", 5400),
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
