"""The first prompt of an agent, taken from one run of it against a server that stands in for the daemon."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from msgspec.structs import replace

from diskprefix.desk.shared.recipes.recipe import Served, agent_called
from diskprefix.desk.warm import first_prompt as first_prompt_module
from diskprefix.desk.warm import warm_command
from diskprefix.desk.warm.first_prompt import first_prompt
from diskprefix.desk.warm.stand_in import StandIn
from diskprefix.errors import SettingsError
from tests.daemon.server.daemon_process import DaemonProcess
from tests.desk.conftest import Run

SERVED = Served(url="http://127.0.0.1:1", model="mine", key="secret", context=32_768)
AGENT = """\
#!{python} -S
import json, os, socket, sys, urllib.request
from pathlib import Path

def send(body):
    url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
    headers = {{"Content-Type": "application/json"}}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return answer.read().decode()

def outcome(work):
    try:
        work()
    except OSError as error:
        return type(error).__name__ + " " + str(error.errno)
    return "done"

home = Path(os.environ["CLAUDE_CONFIG_DIR"])
settings = sorted(path.name for path in home.iterdir())
(home / "history").write_text("Hello.")
for variable, usual in ("XDG_DATA_HOME", ".local/share"), ("XDG_STATE_HOME", ".local/state"):
    place = Path(os.environ.get(variable) or Path.home() / usual)
    place.mkdir(parents=True, exist_ok=True)
    (place / "conversations").write_text("Hello.")
seen = json.dumps({{
    "arguments": sys.argv[1:],
    "files": sorted(os.listdir()),
    "writes": outcome(lambda: Path("new").write_text("x")),
    "reaches": outcome(lambda: socket.create_connection(("192.0.2.1", 80), timeout=2)),
    "settings": settings,
}})
said = [{{"role": "user", "content": "Hello."}}]
send({{"messages": said * 9999, "max_tokens": 9}})
tools = [{{"name": "look", "description": "Look at it. " * 20, "input_schema": {{"type": "object"}}}}]
ends = send({{"messages": said, "tools": tools, "stream": True, "max_tokens": 9, "metadata": {{"user_id": seen}}}})
assert "message_stop" in ends
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a file in it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "x.py").write_text("print(1)")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def install(programs: Path, text: str) -> None:
    (programs / "claude").write_text(text)
    (programs / "claude").chmod(0o755)


def test_an_agent_runs_apart_and_leaves_nothing(
    project: Path, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, kept = tmp_path / "user", tmp_path / "kept"
    user.mkdir()
    kept.mkdir()
    monkeypatch.setenv("HOME", str(user))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(kept))
    install(programs, AGENT.format(python=sys.executable))
    profile = tmp_path / "profile"
    (profile / ".claude").mkdir(parents=True)
    (profile / ".claude/settings.json").write_text("{}")
    (profile / ".claude/long.jsonl").write_bytes(bytes(1 << 20))
    found = first_prompt(agent_called("claude"), SERVED, profile)
    assert (found.route, found.body["tools"][0]["name"]) == ("/v1/messages", "look")
    seen = json.loads(found.body["metadata"]["user_id"])
    assert seen["arguments"][-2:] == ["-p", "Hello."]
    assert seen["settings"] == [".claude.json", "settings.json"]
    if not found.had_network:
        # EROFS and ENETUNREACH.
        assert (seen["writes"], seen["reaches"]) == ("OSError 30", "OSError 101")
        assert seen["files"] == ["x.py"]
    assert sorted(os.listdir(project)) == ["x.py"]
    assert (os.listdir(user), os.listdir(kept)) == ([], [])
    assert sorted(os.listdir(profile / ".claude")) == ["long.jsonl", "settings.json"]


ATTACK = """\
#!{python} -S
import ctypes, fcntl, json, os, sys, time, urllib.request
from pathlib import Path

def outcome(work):
    try:
        work()
    except OSError as error:
        return error.errno
    return "done"

def remount():
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (32 | 4096, 32):
        if not libc.mount(None, os.fsencode(os.getcwd()), None, flags, None):
            return
    raise OSError(ctypes.get_errno(), "")

lock = os.open({lock!r}, os.O_RDWR)
reading, writing = os.pipe()
if not os.fork():
    os.setsid()
    fcntl.flock(os.open({lock!r}, os.O_RDWR), fcntl.LOCK_EX)
    os.write(writing, b"x")
    time.sleep(600)
os.read(reading, 1)
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
seen = {{
    "rights": [int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapAmb")],
    "remounts": outcome(remount),
    "writes": outcome(lambda: Path("new").write_text("x")),
    "writes below": outcome(lambda: Path("below/new").write_text("x")),
    "signals": outcome(lambda: os.kill({pid}, 0)),
}}
body = {{"messages": [], "tools": [{{"name": json.dumps(seen)}}]}}
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())).read()
"""
IN_MOUNTS = """\
import json, subprocess, sys
from pathlib import Path
from diskprefix.desk.warm.first_prompt import first_prompt
from diskprefix.desk.shared.recipes.recipe import agent_called
from tests.desk.warm.test_first_prompt import SERVED
subprocess.run(["mount", "-t", "tmpfs", "none", "below"], check=True)
found = first_prompt(agent_called("claude"), SERVED, Path(sys.argv[1]))
print(json.dumps([found.had_network, json.loads(found.body["tools"][0]["name"])]))
"""


def test_an_agent_that_tries_to_stay_and_to_write_can_do_neither(project: Path, programs: Path, tmp_path: Path) -> None:
    """As root, with a mount in the folder."""
    (project / "below").mkdir()
    (tmp_path / "lock").touch()
    install(programs, ATTACK.format(python=sys.executable, lock=str(tmp_path / "lock"), pid=os.getpid()))
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no program can have mounts of its own here")
    ended = subprocess.run(
        [*unshare, sys.executable, "-c", IN_MOUNTS, str(tmp_path / "profile")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    had_network, seen = json.loads(ended.stdout)
    assert not had_network
    with (tmp_path / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    rights = {"rights": [0, 0, 0, 0], "remounts": errno.EPERM, "signals": errno.ESRCH}
    assert seen == rights | {"writes": errno.EROFS, "writes below": errno.EROFS}


def test_a_folder_with_the_temporary_files_is_not_shown(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be read-only, with the copy of the profile in it."""
    install(programs, AGENT.format(python=sys.executable))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = first_prompt(agent_called("claude"), SERVED, tmp_path / "profile")
    seen = json.loads(found.body["metadata"]["user_id"])
    assert (seen["files"], seen["writes"]) == ([".git"], "done")


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        (None, r"Claude Code is not installed \(no claude in PATH\); install it: npm install"),
        ("#!/bin/sh\necho please log in\n", "Claude Code sent no prompt; it said: please log in"),
        ("#!/bin/sh\nexit 3\n", "Claude Code sent no prompt; it said: nothing"),
    ],
)
@pytest.mark.usefixtures("project")
def test_an_agent_without_a_prompt_is_an_error(
    program: str | None, problem: str, programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if program is None:
        monkeypatch.setenv("PATH", str(programs))
    else:
        install(programs, program)
    with pytest.raises(SettingsError, match=problem):
        first_prompt(agent_called("claude-code"), SERVED, tmp_path / "profile")


def test_a_folder_that_is_gone_is_one_line(project: Path, programs: Path, tmp_path: Path) -> None:
    install(programs, "#!/bin/sh\n")
    (project / "x.py").unlink()
    project.rmdir()
    with pytest.raises(SettingsError, match="Claude Code cannot be run here: No such file"):
        first_prompt(agent_called("claude"), SERVED, tmp_path / "profile")


def test_a_network_that_cannot_be_used_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt is made by another process."""
    before = os.stat("/proc/self/ns/net").st_ino
    monkeypatch.setattr(first_prompt_module, "_SIOCSIFFLAGS", 0)
    assert not first_prompt_module._can_be_set_apart()
    assert os.stat("/proc/self/ns/net").st_ino == before


@pytest.mark.usefixtures("project")
def test_an_agent_without_a_probe_is_refused(programs: Path, tmp_path: Path) -> None:
    install(programs, "#!/bin/sh\n")
    with pytest.raises(SettingsError, match="cannot be asked for its first prompt"):
        first_prompt(replace(agent_called("claude"), probe=()), SERVED, tmp_path)


@pytest.mark.usefixtures("project")
def test_warm_computes_the_first_prompt_of_an_agent(run: Run, daemon: DaemonProcess, programs: Path) -> None:
    install(programs, AGENT.format(python=sys.executable))
    warm = ["warm", "--agent", "claude", "--agent", "opencode", "--url", daemon.url, "--json"]
    for number in range(2):
        first, second = run(*warm).json["prompts"]
        assert (first["where"], first["error"], first["saved"] in ("queued", "stored")) == ("Claude Code", None, True)
        assert 60 < first["prompt_tokens"] < 400
        assert (first["restored"] > 50) == bool(number)
        assert second["error"].startswith("OpenCode is not installed") or second["where"] == "OpenCode"


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 9, "completion_tokens": 0},
        {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 3}},
        {"input_tokens": 2, "cache_creation_input_tokens": 3, "cache_read_input_tokens": 4},
    ],
)
def test_the_tokens_of_a_prompt_are_read_from_any_usage(usage: dict[str, Any]) -> None:
    assert warm_command._prompt_tokens(usage) == 9


def test_warm_without_a_prompt_is_wrong_usage(run: Run) -> None:
    run("warm").assert_refused(2, "give a FILE or --agent NAME")


MESSAGES: Any = [{"role": "user", "content": "Hello."}]


def test_official_clients_read_the_replies_of_the_stand_in() -> None:
    with StandIn("mine") as stand_in:
        one = openai.OpenAI(base_url=f"{stand_in.url}/v1", api_key="k", max_retries=0)
        other = anthropic.Anthropic(base_url=stand_in.url, api_key="k", max_retries=0)
        chat = one.chat.completions.create(model="mine", messages=MESSAGES)
        assert chat.choices[0].message.content == "OK"
        chunks = [*one.chat.completions.create(model="mine", messages=MESSAGES, stream=True)]
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, "stop"]
        assert one.responses.create(model="mine", input="Hello.").output_text == "OK"
        with one.responses.stream(model="mine", input="Hello.") as stream:
            assert stream.get_final_response().output_text == "OK"
        message = other.messages.create(model="mine", messages=MESSAGES, max_tokens=9)
        assert (message.stop_reason, message.content[0].type) == ("end_turn", "text")
        with other.messages.stream(model="mine", messages=MESSAGES, max_tokens=9) as events:
            assert events.get_final_text() == "OK"
        assert [model.id for model in one.models.list()] == ["mine"]
        assert not stand_in.has_tools
        assert stand_in.first_prompt() is not None
