"""Several processes on one folder: daemons that share what they save, and commands beside them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.server.daemon_process import DaemonProcess, clean_environment, reply_to, running_daemon


def ask(daemon: DaemonProcess, question: str, scope: str = "full", salt: str | None = None) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": question * 6}], "max_tokens": 6, "temperature": 0}
    with daemon.client() as client:
        return reply_to(client, body, scope=scope, salt=salt)


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def command(name: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """A `diskprefix` command with --json, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "diskprefix", name, "--kv-cache-dir", str(folder), "--json", *arguments],
        capture_output=True,
        text=True,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_two_daemons_see_each_other_and_commands_run_beside_them(chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with running_daemon(chat_model, folder) as one, running_daemon(chat_model, folder) as other:
        for number, (writer, reader) in enumerate([(one, other), (other, one)] * 2):
            question = f"Where does river number {number} rise, and where does it end? "
            first = ask(writer, question)
            writer.wait_saved()
            second = ask(reader, question)
            assert second["prefix_cache"]["restored"] == first["usage"]["prompt_tokens"]
            assert second["prefix_cache"]["source"] == "disk"
            assert text_of(first) == text_of(second) == text_of(ask(writer, question, "off"))
            assert len(command("inspect", folder)["entries"]) == number + 1
            assert command("verify", folder)["problems"] == []
        assert one.stop() == 0
        assert ask(other, "Where does river number 0 rise, and where does it end? ")["prefix_cache"]["restored"] > 0
