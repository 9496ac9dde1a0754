"""`launch` and `service install` compute the first prompt of an agent ahead: it runs once in the background, and what
it sends is remembered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diskprefix.errors import SettingsError
from diskprefix.extras.clients import first_prompt, first_prompt_ahead
from diskprefix.extras.clients.first_prompt import FirstPrompt
from diskprefix.extras.clients.first_prompt_ahead import compute_in_background, remembered
from diskprefix.extras.clients.launched_daemon import locked
from diskprefix.extras.clients.recipe import Served, agent_called
from diskprefix.extras.setup import service_command
from diskprefix.settings import Settings, config_home
from tests.cli.conftest import Run
from tests.cli.small_daemon import Reply, SmallDaemon, models, small_daemon
from tests.cli.test_first_prompt import SERVED, install, programs, project  # noqa: F401 (fixtures)
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("own_places")

CLAUDE = agent_called("claude")
AGENT = """\
#!{python} -S
import json, os, sys, urllib.request
from pathlib import Path

with open({runs!r}, "a") as file:
    print(*sys.argv[1:], file=file)
if "-p" in sys.argv:
    body = {{"messages": [{{"role": "user", "content": "Hello \\ud800"}}], "tools": [{{"name": "look"}}]}}
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())).read()
"""
CARD = {"id": "two", "context_length": 32_768, "loaded": True}


def ready(num_tokens: int, paused: str | None = None, status: int = 200) -> Reply:
    return status, {"prompt_tokens": 900, "ready_tokens": num_tokens, "paused": paused}


@pytest.fixture
def daemon() -> Iterator[SmallDaemon]:
    with small_daemon(models=[models(CARD)], messages=[ready(0), ready(850)]) as daemon:
        yield daemon


@pytest.fixture
def folder(project: Path, programs: Path) -> Path:  # noqa: F811
    """The launch folder. The agent is installed."""
    install(programs, AGENT.format(python=sys.executable, runs=str(project.parent / "runs")))
    return config_home() / "launch"


def files(folder: Path) -> list[Path]:
    return sorted((folder / "first-prompts").glob("*.json"))


def launch(run: Run, daemon: SmallDaemon) -> list[str]:
    """The lines about the first prompt."""
    ended = run("launch", "claude", "--url", daemon.url)
    assert ended.exit_code == 0, ended.stderr
    return [line for line in ended.stderr.splitlines() if "first prompt" in line]


RUNS = "a second Claude Code runs for a moment in the background, to compute its first prompt ahead"


def test_a_launch_asks_the_agent_once_and_later_ones_say_how_much_is_ready(
    run: Run,
    daemon: SmallDaemon,
    folder: Path,
    project: Path,  # noqa: F811
    programs: Path,  # noqa: F811
) -> None:
    def num_runs() -> int:
        told = (project.parent / "runs").read_text().splitlines()
        return len([line for line in told if line.endswith("-p Hello.")])

    assert launch(run, daemon) == [RUNS]
    wait_for(lambda: daemon.asked.count("messages") == 1)
    [body] = [body for asked, body in zip(daemon.asked, daemon.bodies, strict=True) if asked == "messages"]
    assert (body["model"], body["prefix_cache"]) == ("two", {"ahead": "Claude Code"})
    assert body["messages"] == [{"role": "user", "content": "Hello \ud800"}]
    assert launch(run, daemon) == ["its first prompt: 850 of 900 tokens are ready"]
    assert num_runs() == 1
    [file] = files(folder)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    # Another version.
    install(programs, (programs / "claude").read_text() + "\n# Newer.\n")
    assert launch(run, daemon) == [RUNS]
    wait_for(lambda: daemon.asked.count("messages") == 3)
    assert (num_runs(), len(files(folder))) == (2, 1)
    assert run("launch", "claude", "--clean", "--yes").exit_code == 0
    assert not folder.exists()


def remember(folder: Path, served: Served, **values: Any) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(first_prompt_ahead, "first_prompt", lambda *_: FirstPrompt(**values))
        first_prompt_ahead._run_agent(folder, CLAUDE, served)


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (ready(9), "its first prompt: 9 of 900 tokens are ready; the rest is computed while no request waits"),
        (ready(9, "battery"), "are ready; the rest is not computed ahead now: not on battery"),
        (ready(9, "a \x1b new reason"), "is not computed ahead now: a \\x1b new reason"),
        (
            (400, {"error": {"message": "ahead: no"}}),
            "computed ahead: the daemon refuses it: ahead: no",
        ),
        ((200, {"id": "a message"}), "its first prompt is not computed ahead: the daemon is an older one"),
        ((200, []), "its first prompt is not computed ahead: the daemon is an older one"),
    ],
)
def test_a_launch_says_what_becomes_of_the_rest(run: Run, folder: Path, reply: Reply, line: str) -> None:
    with small_daemon(models=[models(CARD)], messages=[reply]) as daemon:
        remember(folder, Served(url=daemon.url, model="two", key="", context=32_768), route="/v1/messages", body={})
        [said] = launch(run, daemon)
    assert said.endswith(line)


def test_an_agent_that_sends_nothing_is_not_asked_again_on_that_day(
    run: Run,
    daemon: SmallDaemon,
    folder: Path,
    programs: Path,  # noqa: F811
) -> None:
    install(programs, "#!/bin/sh\necho please log in\n")
    assert launch(run, daemon)[0] == RUNS
    wait_for(lambda: len(files(folder)) == 1)
    said = "its first prompt is not computed ahead: Claude Code sent no prompt; it said: please log in"
    for _ in range(2):
        assert launch(run, daemon) == [said]
    assert "messages" not in daemon.asked


def test_a_daemon_with_ahead_off_runs_no_agent(run: Run, folder: Path) -> None:
    props = [(200, {"ahead": {"paused": "off"}})]
    with small_daemon(models=[models(CARD)], props=props) as daemon:
        assert launch(run, daemon) == ["its first prompt is not computed ahead: work ahead is off"]
    assert not files(folder)


def test_another_day_model_or_folder_has_a_run_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(folder, SERVED, route="/v1/messages", body={})
    assert remembered(folder, CLAUDE, SERVED) is not None
    assert remembered(folder, CLAUDE, Served(url="", model="other", key="", context=32_768)) is None
    with monkeypatch.context() as patched:
        patched.chdir(tmp_path)
        assert remembered(folder, CLAUDE, SERVED) is None
    made_for = first_prompt_ahead._made_for(CLAUDE)
    monkeypatch.setattr(first_prompt_ahead, "_made_for", lambda _: made_for.replace('"20', '"30'))
    assert remembered(folder, CLAUDE, SERVED) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"made_for": 1}', b"[" * 100_000])
def test_a_damaged_file_is_made_again(folder: Path, content: bytes) -> None:
    remember(folder, SERVED, route="/v1/messages", body={})
    [file] = files(folder)
    file.write_bytes(content)
    assert remembered(folder, CLAUDE, SERVED) is None
    remember(folder, SERVED, route="/v1/messages", body={"a": 1})
    assert remembered(folder, CLAUDE, SERVED) is not None


def test_few_prompts_are_remembered_and_no_long_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_prompt_ahead, "_MAX_FILES", 3)
    for number in range(5):
        served = Served(url="", model=f"model-{number}", key="", context=32_768)
        remember(folder, served, route="/v1/messages", body={})
        os.utime(first_prompt_ahead._file(folder, CLAUDE, served), (number, number))
    assert len(files(folder)) == 3
    remember(folder, SERVED, route="/v1/messages", body={"long": "a" * first_prompt_ahead._MAX_BYTES})
    assert remembered(folder, CLAUDE, SERVED) is None


def test_a_second_process_leaves_the_agent_to_the_first(folder: Path) -> None:
    file = first_prompt_ahead._file(folder, CLAUDE, SERVED)
    with locked(file.with_suffix(".lock")), pytest.raises(BlockingIOError):
        first_prompt_ahead._run_agent(folder, CLAUDE, SERVED)


def test_the_process_ends_quietly_without_a_daemon(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task: dict[str, Any] = {"names": ["claude"], "url": "http://127.0.0.1:9", "model": None, "api_key": None}
    task |= {"folder": str(folder), "patience_s": 0}
    monkeypatch.setattr(sys, "stdin", _Input(json.dumps(task)))
    monkeypatch.setattr(os, "nice", lambda _: 0)
    assert first_prompt_ahead.main() == 1
    assert not folder.exists()


class _Input:
    """A standard input."""

    def __init__(self, text: str) -> None:
        self.buffer, self._text = self, text

    def read(self) -> bytes:
        return self._text.encode()


@pytest.mark.usefixtures("folder")
def test_a_folder_that_is_gone_is_one_line(project: Path, tmp_path: Path) -> None:  # noqa: F811
    (project / "x.py").unlink()
    project.rmdir()
    with pytest.raises(SettingsError, match="Claude Code cannot be run here: No such file"):
        first_prompt.first_prompt(CLAUDE, SERVED, tmp_path / "profile")
    assert remembered(tmp_path, CLAUDE, SERVED) is None


def test_a_network_that_cannot_be_used_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt is made by another process."""
    before = os.stat("/proc/self/ns/net").st_ino
    monkeypatch.setattr(first_prompt, "_SIOCSIFFLAGS", 0)
    assert not first_prompt._can_be_set_apart()
    assert os.stat("/proc/self/ns/net").st_ino == before


@pytest.mark.parametrize(
    ("changes", "names"),
    [({}, ["claude-code"]), ({"ahead": "off"}, None), ({"api_keys": Path("keys")}, None)],
)
def test_a_service_asks_the_installed_agents(
    folder: Path,
    changes: dict[str, Any],
    names: list[str] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = list[tuple[Any, ...]]()
    monkeypatch.setattr(service_command, "compute_in_background", lambda *values, **_: asked.append(values))
    monkeypatch.setattr(service_command, "may_be_asked", lambda: [CLAUDE])
    service_command._compute_first_prompts(Settings(**changes))
    assert [[agent.name for agent in values[0]] for values in asked] == ([] if names is None else [names])
    line = "each runs once in this folder, in the background, to compute its first prompt ahead: Claude Code\n"
    assert capsys.readouterr().err == ("" if names is None else line)
    assert {values[1:] for values in asked} <= {(folder, "http://127.0.0.1:8642")}


def test_a_service_does_nothing_without_agents_and_its_install_never_fails(
    programs: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **_options: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(service_command, "compute_in_background", fail)
    monkeypatch.setenv("PATH", str(programs))
    service_command._compute_first_prompts(Settings())
    install(programs, "#!/bin/sh\n")
    assert [agent.name for agent in first_prompt_ahead.may_be_asked()] == ["claude-code"]
    service_command._compute_first_prompts(Settings())
    assert capsys.readouterr().err == ""


def test_the_key_is_no_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[Any]()
    popen = subprocess.Popen

    def record(command: list[str], **options: Any) -> Any:
        started.append(command)
        return popen([sys.executable, "-c", "import sys; sys.stdin.read()"], **options)

    monkeypatch.setattr(subprocess, "Popen", record)
    compute_in_background([CLAUDE], tmp_path, "http://127.0.0.1:9", "two", "secret-key")
    assert "secret-key" not in str(started)
