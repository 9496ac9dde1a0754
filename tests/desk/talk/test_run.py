"""`diskprefix run`, `ps` and `stop`, and the short names of models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest

from diskprefix.desk.clients import daemon_choice, daemons_command, model_choice
from diskprefix.desk.models import pull_command
from diskprefix.desk.talk import run_command
from diskprefix.errors import NotReady
from diskprefix.folders import config_home
from diskprefix.runtime.fetch.proposals import full_name, meant_name
from tests.desk.conftest import Run
from tests.desk.small_daemon import models, small_daemon
from tests.desk.terminal import Terminal

QWEN = "unsloth/Qwen3.5-4B-GGUF:Q4_K_M"
RUNNING: dict[str, Any] = {
    "id": "1",
    "model": "m",
    "since_s": 2.0,
    "prompt_tokens": 19_000,
    "computed_tokens": 4096,
    "tokens_per_s": 310.4,
    "seconds_left": 48.1,
    "reply_tokens": 0,
}
WAITING = RUNNING | {"id": "2", "computed_tokens": 0, "tokens_per_s": None, "seconds_left": None}
PROPS: dict[str, Any] = {
    "model": {"name": "m", "needs_bytes": 3 << 30, "max_positions": 32_768, "loaded_at": 0.0},
    "kv_memory": {"running": 1},
    "full_cache": {"state": {"error": None}},
    "queue_depth": 1,
    "running": [WAITING, RUNNING],
}


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


AGENT = """\
#!{python} -S
import os, re, signal, urllib.request
from pathlib import Path

log = Path(os.environ["XDG_STATE_HOME"], "diskprefix/launch/daemon.log").read_text()
os.kill(int(re.findall("runs in process (.*)", log)[-1]), signal.SIGKILL)
urllib.request.urlopen(os.environ["OPENAI_HOST"] + "/v1/models", timeout=60)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("own_places")
def test_a_launched_model_that_dies_is_started_again_and_one_that_cannot_be_loaded_is_an_error(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (agent := tmp_path / "bin/goose").parent.mkdir()
    agent.write_text(AGENT.format(python=sys.executable))
    agent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{agent.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DISKPREFIX_PORT", "0")

    def launched(model: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "diskprefix", "launch", "goose", "--model", str(model)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    ended = launched(chat_model)
    assert ended.returncode == 0, ended.stderr
    assert "died once and was restarted" in ended.stderr.splitlines()[-1]
    shutil.copytree(chat_model, damaged := tmp_path / "damaged")
    next(damaged.glob("*.safetensors")).write_bytes(b"no weights")
    ended = launched(damaged)
    assert ended.returncode == 1
    assert "error: the daemon ended: " in ended.stderr
    assert "is damaged or cut short" in ended.stderr


def test_ps_shows_what_is_in_memory_and_how_long_a_prompt_takes(run: Run) -> None:
    loaded = PROPS | {"model": PROPS["model"] | {"loaded_at": time.time() - 300}}
    with small_daemon(props=[(200, loaded)]) as daemon:
        shown = run("ps", "--url", daemon.url).stdout.splitlines()
        assert shown[1].split() == ["m", "3.0", "GiB", "32,768", "5", "min", "ago", "2", daemon.url]
        assert shown[2] == "m: 0 of 19,000 tokens of the prompt"
        assert shown[3:] == ["m: 4,096 of 19,000 tokens of the prompt, 310 tokens/s, 48.1 s left"]
        assert run("ps", "--url", daemon.url, "--json").json["models"][0]["running"] == [WAITING, RUNNING]
    places = [{"model": "m", "phase": "ready", "needed_bytes": 1, "num_active": 0}]
    places += [{"model": "n", "phase": "waiting", "needed_bytes": 1 << 30, "num_active": 1}]
    replies = [(200, {"models": places}), (200, PROPS | {"running": []})]
    with small_daemon(props=replies) as daemon:
        rows = run("ps", "--url", daemon.url, "--json").json["models"]
        found = [(row["model"], row["state"], row["requests"], row["running"]) for row in rows]
        assert found == [("m", "ready", 0, []), ("n", "waiting", 1, [])]
    with small_daemon(props=[(503, {})]) as daemon:
        assert run("ps", "--url", daemon.url).stdout.splitlines()[1].split() == [
            "no",
            "model",
            "unloaded",
            "0",
            daemon.url,
        ]
    with small_daemon(health=[(200, [])]) as daemon:
        run("ps", "--url", daemon.url).assert_refused(1, "is no diskprefix daemon")


def test_ps_says_what_is_in_the_memory_of_a_model(run: Run) -> None:
    needs = {"weights in Q4_K": 2 << 30, "KV memory for 32,768 tokens": 384 << 20, "room to compute": 640 << 20}
    with small_daemon(props=[(200, PROPS | {"running": [], "model": PROPS["model"] | {"needs": needs}})]) as daemon:
        shown = run("ps", "--url", daemon.url).stdout.splitlines()
        [row] = run("ps", "--url", daemon.url, "--json").json["models"]
    parts = "weights in Q4_K 2.0 GiB, KV memory for 32,768 tokens 384.0 MiB, room to compute 640.0 MiB"
    assert shown[2:] == [f"m: {parts}"]
    assert row["memory_bytes"] == sum(row["memory"].values()) == 3 << 30


def test_ps_says_why_prompts_are_not_saved(run: Run) -> None:
    full = {"full_cache": {"state": {"error": "the disk is full\x1b[2J"}}}
    with small_daemon(props=[(200, PROPS | {"running": []} | full)]) as daemon:
        shown = run("ps", "--url", daemon.url).stdout.splitlines()
        [row] = run("ps", "--url", daemon.url, "--json").json["models"]
    assert shown[2].startswith("m: prompts are not saved, or not all: the disk is full")
    assert "\x1b" not in shown[2]
    assert row["cache_error"] == "the disk is full\x1b[2J"


@pytest.mark.parametrize(
    ("ahead", "line"),
    [
        ({"tokens": 0, "waiting": 0, "paused": None}, None),
        ({"tokens": 12_448, "waiting": 0, "paused": None}, "12,448 tokens of likely prompts computed in idle time"),
        (
            {"tokens": 9, "waiting": 2, "paused": "other programs"},
            "2 likely prompts to be computed in idle time, 9 tokens done (other programs want the CPUs)",
        ),
    ],
)
def test_ps_says_what_was_computed_ahead(run: Run, ahead: dict[str, Any], line: str | None) -> None:
    ahead |= {"cpu_s": 123.0, "cpu_left_s": 1.0}
    with small_daemon(props=[(200, PROPS | {"running": [], "ahead": ahead})]) as daemon:
        shown = run("ps", "--url", daemon.url).stdout.splitlines()
        assert run("ps", "--url", daemon.url, "--json").json["models"][0]["ahead"] == ahead
    assert shown[2:] == ([] if line is None else [f"m: {line}"])


def test_ps_shows_the_progress_of_prompts_that_clients_asked_for(run: Run) -> None:
    asked = [
        {"label": "Claude Code", "tokens": 18_692, "ready": 8100, "waits": True},
        {"label": "Codex", "tokens": None, "ready": 0, "waits": False},
    ]
    ahead = {"tokens": 0, "waiting": 2, "paused": None, "cpu_s": 0.0, "cpu_left_s": 1.0, "asked": asked}
    with small_daemon(props=[(200, PROPS | {"running": [], "ahead": ahead})]) as daemon:
        shown = run("ps", "--url", daemon.url).stdout.splitlines()
    dropped = "not begun, and it waits no longer: others of its client came after it"
    assert shown[3:] == [f"m: for {label}" for label in ("Claude Code: 8,100 of 18,692 tokens", f"Codex: {dropped}")]


def test_a_daemon_that_refuses_the_key_hides_no_other(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = [(403, {"error": {"message": "only admin"}})]
    with small_daemon(props=refuses) as one, small_daemon(props=[(200, PROPS)]) as other:
        monkeypatch.delenv("DISKPREFIX_URL", raising=False)
        monkeypatch.setattr(daemons_command, "own_urls", lambda: [one.url, other.url])
        shown = run("ps")
        assert shown.stderr == f"{one.url}: --api-key: only admin\n"
        assert shown.stdout.splitlines()[1].split()[-1] == other.url
        monkeypatch.setattr(daemons_command, "own_urls", lambda: [one.url])
        run("ps").assert_refused(2, "--api-key: only admin")


@pytest.mark.usefixtures("own_places")
def test_run_without_a_model_talks_to_the_one_that_runs_or_else_to_the_embedded_one(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def find(_stack: object, model: str | None, _key: object, *_flags: str) -> NoReturn:
        asked.append(model)
        raise NotReady("enough")

    monkeypatch.setattr(run_command, "find_daemon", find)
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


def test_run_has_no_option_of_chat_that_it_does_not_obey(run: Run) -> None:
    run("run", "m", "--browser").assert_refused(2, "--browser")


def test_a_daemon_that_cannot_unload_or_is_not_this_users_is_not_ended(run: Run) -> None:
    for status, words in ((404, ["no other model than m", "serve --idle-unload"]), (403, ["cannot unload m"])):
        with small_daemon(props=[(200, PROPS)], unload=[(status, {})]) as daemon:
            run("stop", "m", "--url", daemon.url).assert_refused(2, *words, f"diskprefix stop --url {daemon.url}")
    with small_daemon(props=[(200, PROPS)]) as daemon:
        run("stop", "--url", daemon.url).assert_refused(2, "is not yours")


# A signal between the handler's check and a sleep would be seen when the sleep ends: it is waited for instead.
LISTENS = """\
import signal, socket, time
from diskprefix.daemon.server.process.token_file import published_token
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with socket.create_server(("127.0.0.1", 0)) as listener, published_token("abc", [listener]):
    print(listener.getsockname()[1], flush=True)
    signal.sigwait([signal.SIGTERM])
time.sleep(0.3)
"""


@pytest.mark.usefixtures("own_places")
def test_a_daemon_is_ended_by_any_name_of_its_address_once_it_has_saved(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for unit in ("", "/user.slice/diskprefix.service"):
        with subprocess.Popen([sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True) as daemon:
            assert daemon.stdout is not None
            url = f"localhost:{daemon.stdout.readline().strip()}/v1"
            (tmp_path / str(daemon.pid)).mkdir()
            (tmp_path / str(daemon.pid) / "cgroup").write_text(f"0::{unit}\n")
            monkeypatch.setattr(daemons_command, "_PROC", tmp_path, raising=False)
            ended = run("stop", "--url", url)
            assert daemon.poll() is not None
        assert ended.exit_code == 0, ended.stderr
        assert ("its service starts it again" in ended.stdout) is bool(unit)


@pytest.mark.usefixtures("own_places")
def test_a_short_name_is_taken_wherever_a_model_is_named(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def fetch(name: str, *_: Any, **__: Any) -> Path:
        fetched.append(name)
        return tmp_path

    monkeypatch.setattr(pull_command, "fetched_model", fetch)
    monkeypatch.setattr(model_choice, "cached_model", lambda _name: None)
    assert model_choice.flags_of_model("Qwen3.5:4b") == ["--model", QWEN]
    run("pull", "qwen3.5:4b")
    assert fetched == [QWEN, QWEN]
    assert f'model = "{QWEN},a/b"' in run("serve", "--model", "qwen3.5:4b", "--model", "a/b", "--print-config").stdout
    for command in (["pull", "qwen3.5:5b"], ["run", "qwen3.5:5b"], ["launch", "goose", "--model", "qwen3.5:5b"]):
        monkeypatch.setattr("shutil.which", lambda name: name)
        monkeypatch.setattr(daemon_choice, "own_urls", list)
        run(*command).assert_refused(2, "no model has the short name 'qwen3.5:5b'; did you mean qwen3.5:", "qwen3.5:9b")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3.5:4b").touch()
    assert meant_name("qwen3.5:4b") == "qwen3.5:4b", "a file of this name goes before"
    assert full_name("qwen3.5:4b") == QWEN, "for what a client sends, nothing is looked for"
