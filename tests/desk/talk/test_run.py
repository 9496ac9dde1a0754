"""`diskprefix run`, `ps` and `stop`, and the short names of models."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from diskprefix.desk.shared.launched_daemon import LaunchedDaemon
from diskprefix.desk.talk import run_command
from diskprefix.errors import NotReady
from diskprefix.folders import config_home
from tests.desk.conftest import Run
from tests.desk.small_daemon import models, small_daemon
from tests.desk.terminal import Terminal


@pytest.mark.slow
@pytest.mark.usefixtures("own_places")
def test_a_model_is_run_stays_is_unloaded_and_ends(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        monkeypatch.setenv("DISKPREFIX_PORT", str(probe.getsockname()[1]))

    def typed(*args: str, piped: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "diskprefix", *args]
        return subprocess.run(command, input=piped, capture_output=True, text=True, check=False)

    # So many tokens are saved.
    question = ["run", str(chat_model), "Say", "it.", "--max-tokens", "4", "--temperature", "0"]
    piped = "What do the birds do when the tide goes out? " * 8
    try:
        first = typed(*question, piped=piped)
        assert first.returncode == 0, first.stderr
        assert "`diskprefix stop` ends" in first.stderr
        assert "none restored" in first.stderr
        [model] = json.loads(typed("ps", "--json").stdout)["models"]
        assert (model["model"], model["state"], model["requests"]) == ("tiny-chat", "ready", 0)
        assert typed("stop", "other").returncode == 2
        assert typed("stop", "tiny-chat").stdout.endswith("unloading\n")
        again = typed(*question, piped=piped)
        assert (again.stdout, "starting" in again.stderr) == (first.stdout, False)
        assert "restored from disk" in again.stderr
    finally:
        ended = typed("stop")
    assert (ended.returncode, ended.stdout.endswith(": ended\n")) == (0, True)
    assert (typed("ps").returncode, json.loads(typed("ps", "--json").stdout)) == (0, {"models": []})


@pytest.mark.slow
@pytest.mark.usefixtures("own_places")
def test_a_conversation_goes_on_after_its_daemon_was_killed(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISKPREFIX_PORT", "0")

    def typed(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "diskprefix", *args], capture_output=True, text=True, check=False)

    try:
        first = typed("run", str(chat_model), "Say it.", "--max-tokens", "4")
        assert first.returncode == 0, first.stderr
        terminal = Terminal("run", "--max-tokens", "4", "--temperature", "0")
        terminal.wait_for("/help lists the commands")
        # So many tokens are saved.
        terminal.type(f"{'What do the birds do when the tide goes out? ' * 8}\n")
        terminal.wait_for("first token after")
        assert "talking to tiny-chat, which your daemon" in terminal.shown
        terminal.shown = ""
        state = (config_home() / "launch/daemon.json").read_text(encoding="utf-8").partition("\n")[0]
        os.kill(json.loads(state)["pid"], signal.SIGKILL)
        terminal.type("And then?\n")
        terminal.wait_for("restored from disk")
        assert "the daemon ended without an error, as if killed" in terminal.shown
        assert "starting a daemon" in terminal.shown
        assert "no daemon answers" not in terminal.shown, "nobody has to start one"
        assert terminal.interrupt() == 0
    finally:
        ended = typed("stop")
    assert ended.stdout.endswith(": ended\n")


@pytest.mark.usefixtures("own_places")
def test_run_without_a_model_talks_to_the_one_that_runs_or_else_to_the_embedded_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def find(_stack: object, model: str | None, _key: object, *_flags: str) -> NoReturn:
        asked.append(model)
        raise NotReady("enough")

    monkeypatch.setattr(run_command, "find_daemon", find)
    monkeypatch.setattr(run_command, "with_piped", lambda prompt: prompt)
    empty: list[tuple[int, Any]] = [(200, {"data": []})]
    with small_daemon(models=empty) as first, small_daemon(models=[models({"id": "oak"})]) as second:
        monkeypatch.setattr(run_command, "own_urls", lambda: [first.url, second.url])
        ended = run("run")
        assert ended.stderr == f"talking to oak, which your daemon at {second.url} has\nerror: enough\n"
        monkeypatch.setattr(run_command, "own_urls", lambda: [first.url])
        ended = run("run")
    assert ended.stderr.startswith(
        "talking to the embedded model, SmolLM2-135M-Instruct; `diskprefix list --available`"
    )
    assert asked == ["oak", "SmolLM2-135M-Instruct"]


@pytest.mark.usefixtures("own_places")
def test_what_cannot_be_answered_starts_no_daemon(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty input, a prompt in the place of the model, and models that are nowhere."""

    def starts(*_: object) -> NoReturn:
        raise AssertionError("a daemon is started")

    monkeypatch.setattr(LaunchedDaemon, "start", starts)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b" ")))
    run("run", "tiny-chat").assert_refused(2, "standard input is empty")
    run("run", "Name three rivers.").assert_refused(2, "'Name three rivers.' is no model; MODEL comes first")
    run("run", "nope", "hi").assert_refused(2, "no model has the short name 'nope'")
    run("run", str(tmp_path / "x.gguf"), "hi").assert_refused(3, "no such file or folder")


def test_run_has_no_option_of_chat_that_it_does_not_obey(run: Run) -> None:
    run("run", "m", "--browser").assert_refused(2, "--browser")
