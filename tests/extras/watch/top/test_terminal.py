"""`diskprefix top` in a real terminal, over a store without a daemon; and where there is no terminal."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.closing import needs
from tests.server.daemon_process import wait_until
from tests.store.building import BLOCK, open_store, prompt, publication

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

    @property
    def screen_with_styles(self) -> str:
        return self._call("capture-pane", "-p", "-e")

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.screen, f"{text!r} is on the screen", 60)

    def press(self, *keys: str) -> None:
        self._call("send-keys", *keys)

    def close(self) -> None:
        self._call("kill-server")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two saved prompts that share three blocks."""
    store = open_store(tmp_path / "kv")
    first, second = prompt(1, 4 * BLOCK), prompt(1, 4 * BLOCK)
    second[3 * BLOCK :] += 1
    for token_ids in (first, second):
        store.publish(publication(store, token_ids))
    store.close()
    return tmp_path / "kv"


@pytest.fixture
def terminal(store: Path) -> Iterator[Tmux]:
    command = [sys.executable, "-m", "diskprefix", "top", "--url", NOBODY, "--kv-cache-dir", str(store)]
    tmux = Tmux(store.parent, *command)
    yield tmux
    tmux.close()


@needs("tmux")
def test_a_saved_prompt_is_found_and_deleted_in_a_real_terminal_without_colours(terminal: Tmux) -> None:
    terminal.wait_for("2 of 2 saved prompts")
    assert "no daemon: the store alone" in terminal.screen
    # ESC [ 3x m and 38;… are colours of characters: grey shades are left.
    colours = {part.partition("m")[0] for part in terminal.screen_with_styles.split("\x1b[38;2;")[1:]}
    assert all(len(set(colour.split(";")[:3])) == 1 for colour in colours)
    terminal.press("Down")
    terminal.press("d")
    terminal.wait_for("Delete the saved prompt")
    terminal.press("y")
    terminal.wait_for("1 of 1 saved prompt,")
    terminal.press("q")
    terminal.wait_for("ended with 0")


def test_without_a_terminal_or_anything_to_show_there_is_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    piped = run("top", "--url", NOBODY, "--kv-cache-dir", tmp_path)
    assert (piped.exit_code, piped.stdout) == (2, "")
    assert piped.stderr.startswith("error: top needs a terminal")
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    nothing = run("top", "--url", NOBODY, "--kv-cache-dir", tmp_path)
    assert nothing.exit_code == 4
    assert nothing.stderr.startswith(f"error: no daemon answers at {NOBODY}")
    assert nothing.stderr.count("\n") == 1
    assert run("top", "--url", "ftp://x").exit_code == 2
