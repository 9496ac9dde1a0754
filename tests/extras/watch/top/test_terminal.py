"""`diskprefix top` in a real terminal, and where there is none."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from diskprefix.extras import daemon_call
from tests.cli.conftest import Run
from tests.closing import needs
from tests.server.daemon_process import DaemonProcess, wait_until

NOBODY = "http://127.0.0.1:9"


class Tmux:
    """A terminal of 80 by 24 characters in which a command runs."""

    def __init__(self, folder: Path, *command: str) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]
        line = f"NO_COLOR=1 {shlex.join(command)}; echo ended with $?; sleep 60"
        self._call("new-session", "-d", "-x", "80", "-y", "24", line)

    def _call(self, *args: str) -> str:
        return subprocess.run([*self._tmux, *args], check=True, capture_output=True, text=True).stdout

    @property
    def screen(self) -> str:
        return self._call("capture-pane", "-p")

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.screen, f"{text!r} is on the screen", 60)

    def press(self, *keys: str) -> None:
        self._call("send-keys", *keys)

    def close(self) -> None:
        self._call("kill-server")


@needs("tmux")
def test_the_daemon_is_shown_in_a_real_terminal_until_ctrl_c(daemon: DaemonProcess, tmp_path: Path) -> None:
    tmux = Tmux(tmp_path, sys.executable, "-m", "diskprefix", "top", "--url", daemon.url)
    try:
        tmux.wait_for("compute saved")
        assert f" · ok · {daemon.url}" in tmux.screen
        tmux.press("C-c")
        tmux.wait_for("ended with 0")
    finally:
        tmux.close()


def test_without_a_terminal_or_a_daemon_there_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run("top", "--url", NOBODY).assert_refused(2, "top needs a terminal")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    run("top", "--url", NOBODY).assert_refused(1, f"no daemon answers at {NOBODY}")
    run("top", "--url", "ftp://x").assert_refused(2)


def test_a_port_that_says_nothing_is_no_daemon(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_call, "_CONNECT_S", 0.05)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        run("top", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}").assert_refused(1, "timed out")
