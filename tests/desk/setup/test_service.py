"""`diskprefix service` under a real systemd of a user, and under a stand-in for launchd."""

from __future__ import annotations

import json
import os
import plistlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.closing import needs
from tests.daemon.server.daemon_process import clean_environment, free_port, wait_until
from tests.desk.conftest import Run

_BOOT = """
mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/system &&
mount -t tmpfs tmpfs /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup &&
for folder in /lib /usr/lib; do [ -x $folder/systemd/systemd ] && exec $folder/systemd/systemd --user; done
"""


Service = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose name systemd would read as a specifier, and cut at the space."""
    folder = tmp_path / "100%h home"
    (folder / "run").mkdir(parents=True, mode=0o700)
    return folder


@pytest.fixture
def service(home: Path) -> Iterator[Service]:
    """Runs `diskprefix service` in a session of its own: mounts and control groups of this machine are not touched."""
    # Agents that are installed on this machine do not run.
    environment = clean_environment(HOME=str(home), XDG_RUNTIME_DIR=str(home / "run"), DISKPREFIX_AHEAD="off")
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "DBUS_SESSION_BUS_ADDRESS"):
        environment.pop(name, None)
    if os.geteuid() != 0:
        pytest.skip("needs root")
    manager = subprocess.Popen(["unshare", "-m", "-C", "sh", "-c", _BOOT], env=environment, stderr=subprocess.DEVNULL)

    def inside(*command: str) -> subprocess.CompletedProcess[str]:
        entered = ["nsenter", "-t", str(manager.pid), "-m", "-C", *command]
        return subprocess.run(entered, env=environment, capture_output=True, text=True, check=False)

    def is_up() -> bool:
        return manager.poll() is not None or inside("systemctl", "--user", "is-system-running").stdout == "running\n"

    try:
        wait_until(is_up, "systemd did not start")
        if manager.poll() is not None:
            pytest.skip("needs root that may mount")
        yield lambda *arguments: inside(sys.executable, "-P", "-m", "diskprefix", "service", *arguments)
    finally:
        manager.terminate()
        manager.wait()


@needs("systemctl")
@needs("unshare")
@pytest.mark.slow
def test_an_installed_service_holds_its_port_over_a_kill_and_leaves_nothing_when_removed(
    service: Service, home: Path, chat_model: Path
) -> None:
    port = free_port()

    def state(command: str = "status", *flags: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(service(command, "--json", *flags).stdout)
        return found

    def serves() -> dict[str, Any]:
        wait_until(lambda: state()["state"] == "active", "the service is not active")
        return state()

    assert (service("status").returncode, state()["installed"]) == (1, False)
    flags = ("--model", str(chat_model), "--port", str(port), "--kv-cache-dir", str(home / "kv"))
    assert state("install", *flags)["url"] == f"http://127.0.0.1:{port}"
    first = serves()
    assert "serving tiny-chat" in first["status"]
    assert state("install", *flags)["pid"] == first["pid"], "nothing changed"
    os.kill(first["pid"], signal.SIGKILL)
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    # The daemon is gone, and starts again after RestartSec=.
    assert httpx.post(f"{first['url']}/v1/chat/completions", json=body, timeout=60).status_code == 200
    assert serves()["pid"] != first["pid"]
    moved = state("install", *flags[:2], "--port", str(free_port()))
    assert moved["url"] != first["url"]
    assert httpx.get(f"{moved['url']}/health", timeout=60).status_code in (200, 503)
    assert (service("remove").returncode, service("remove").returncode, service("status").returncode) == (0, 0, 1)
    assert [path for path in (home / ".config").rglob("*") if not path.is_dir()] == []
    mine = home / ".config/systemd/user/diskprefix.service"
    mine.write_text("[Service]\n", encoding="utf-8")
    refused = service("install", *flags)
    assert (refused.returncode, refused.stderr.count("\n"), str(mine) in refused.stderr) == (2, 1, True)
    assert mine.read_text(encoding="utf-8") == "[Service]\n"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (None, "systemctl was not found"),
        ("echo Failed to connect to bus: No medium found >&2; exit 1", "this user has no systemd session"),
    ],
)
@pytest.mark.parametrize("command", ["install", "status"])
def test_where_there_is_no_session_it_is_one_line(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, said: str, command: str
) -> None:
    _stand_in(home, monkeypatch, "systemctl", program)
    ended = run("service", command)
    assert (ended.exit_code, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert said in ended.stderr
    assert not (home / ".config").exists()


def test_a_service_that_was_never_installed_is_removed_without_a_session(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stand_in(home, monkeypatch, "systemctl", None)
    ended = run("service", "remove")
    assert (ended.exit_code, ended.stdout) == (0, "no service was installed\n")
    assert run("service", "remove", "--json").json == {"installed": False, "removed": False}


def test_launchd_is_given_an_agent_that_serves_with_the_options(
    run: Run, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stand_in(home, monkeypatch, "launchctl", f'echo "$*" >>"{home}/calls"; [ "$1" != print ] || exit 113')
    monkeypatch.setattr(sys, "platform", "darwin")
    port = free_port()
    run("service", "install", "--port", str(port))
    agent = plistlib.loads((home / "Library/LaunchAgents/diskprefix.plist").read_bytes())
    policy = home / ".config/diskprefix/service.toml"
    assert agent["ProgramArguments"][-3:] == ["serve", "--policy", str(policy)]
    assert f"port = {port}\n" in policy.read_text(encoding="utf-8")
    run("service", "install", "--host", "a host").assert_refused(2, "--host: 'a host' cannot be resolved")
    assert run("service", "remove").exit_code == 0
    calls = [line.split()[0] for line in (home / "calls").read_text(encoding="utf-8").splitlines()]
    assert [call for call in calls if call != "print"] == ["bootstrap", "bootout"]
    assert not policy.exists()


def _stand_in(home: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str | None) -> None:
    (home / "bin").mkdir()
    if script is not None:
        (home / "bin" / name).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        (home / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(home / "bin"))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
