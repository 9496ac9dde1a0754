"""`diskprefix ps` and `stop`, and what becomes of a launched daemon."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from diskprefix.desk.clients import daemons_command
from tests.desk.conftest import Run
from tests.desk.small_daemon import small_daemon

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
        (
            {"tokens": 12_448, "waiting": 0, "paused": None},
            "12,448 tokens of prompts that are likely to come were computed in idle time",
        ),
        (
            {"tokens": 9, "waiting": 2, "paused": "other programs"},
            "in idle time, 2 prompts that may come next will be computed (9 tokens are) (other programs want the CPUs)",
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
