"""The first screen of each command has no word that only the authors know: what a new user would ask about is in the
debug log, or says what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.server.daemon_process import DaemonProcess, reply_to, running_daemon

AUTHORS_WORDS = re.compile(
    r"\[(start|template|engine|model)\]|\bttft\b|turns that stay|\bexact (at|in)\b|boundar|weights of a token"
    r"|of a CPU|gate=|auto:\d|drafts|\bkernels: |those of serve|operators:|ahead"
)
"""Names of parts of the code, abbreviations, and figures without what follows from them."""
PATH, MOST_CHARS = re.compile(r"/[\w./+=-]{8,}"), 170
"""A path, and the length of a line without its paths that a reader takes in at once."""
BODY = {"messages": [{"role": "user", "content": "Which way to the sea?"}], "max_tokens": 4, "temperature": 0}


def unknown_words(text: str) -> list[str]:
    return [line for line in text.splitlines() if AUTHORS_WORDS.search(line)]


def test_the_log_of_a_start_and_a_request_has_words_for_its_user(
    agent_model: Path, tmp_path: Path, daemon: DaemonProcess
) -> None:
    with running_daemon(agent_model, tmp_path, disk_prefix_cache="auto", log_level="debug") as talkative:
        with talkative.client() as client:
            reply_to(client, BODY)
        talkative.wait_for_line(r"\[template\]")
        assert talkative.stop() == 0, talkative.log
    for_developers = [line for line in talkative.lines if " DEBUG " in line]
    log = "\n".join(line for line in talkative.lines if line not in for_developers)
    assert unknown_words(log) == []
    assert "cache auto (30 recent prompts) in " in log
    assert re.search(r"POST \S+ 200 · prompt \d+ tokens · restored 0 \(\w+\) · reply 4 tokens · first token", log)
    for part in ("[start] server ", "[start] all weights are in memory", "[template] "):
        assert part in "\n".join(for_developers)
    assert " DEBUG " not in daemon.log


@pytest.mark.parametrize(
    "command",
    [
        "ps",
        "show MODEL",
        "list",
        "list --available",
        "inspect",
        "inspect --lost",
        "doctor --model MODEL",
        "clients codex",
    ],
)
def test_the_first_screen_of_a_command_has_words_for_its_user(
    command: str, run: Run, daemon: DaemonProcess, chat_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with daemon.client() as client:
        reply_to(client, BODY)
    monkeypatch.setenv("DISKPREFIX_URL", daemon.url)
    monkeypatch.setenv("DISKPREFIX_KV_CACHE_DIR", str(tmp_path / "kv"))
    ended = run(*command.replace("MODEL", str(chat_model)).split())
    assert unknown_words(ended.stdout + ended.stderr) == []
    lines = (ended.stdout + ended.stderr).splitlines()
    assert [line for line in lines if len(PATH.sub("PATH", line)) > MOST_CHARS] == [], "write two short lines"
